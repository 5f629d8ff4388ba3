"""What `cppbatch tune` has found is used where it fits, and never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.sizing.profile import TunedSettings, Used, profile_path, save_profile, use_profile

TUNED = TunedSettings(n_parallel=8, n_ctx=8192, kv_layout="per-sequence", flash_attn="off", n_ubatch=256, n_threads=2)


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """With a profile."""
    monkeypatch.setenv("CPPBATCH_CONFIG", str(tmp_path))
    config = EngineConfig(model_path=str(tiny_llama))
    save_profile(config, TUNED, {"tokens_per_s": 100.0})
    return config


def test_a_profile_sets_only_what_the_user_has_not_set(config: EngineConfig) -> None:
    used, line, _ = use_profile(config, given=())
    assert {name: getattr(used, name) for name in TunedSettings.__struct_fields__} == msgspec.structs.asdict(TUNED)
    assert line
    assert "-np 8 -c 8192 --kv-layout per-sequence -fa off -ub 256 -t 2; use --no-profile to ignore it" in line
    mine = replace(config, n_ubatch=64)
    assert use_profile(mine, given={"n_ubatch"})[0].n_ubatch == 64


def test_parallelism_and_cells_are_taken_together_or_not_at_all(config: EngineConfig) -> None:
    used, line, _ = use_profile(replace(config, n_parallel=3), given={"n_parallel"})
    assert (used.n_parallel, used.n_ctx, used.n_ubatch) == (3, 16384, 256)
    assert line
    assert "-c" not in line.split(": ")[1].split(";")[0].split()


@pytest.mark.parametrize(
    "other", [{"n_gpu_layers": 0}, {"cache_type_k": "q8_0"}, {"device": 1}, {"pooling": "mean"}], ids=str
)
def test_other_conditions_have_other_profiles(config: EngineConfig, other: dict[str, Any]) -> None:
    different = replace(config, **other)
    assert use_profile(different, given=()) == Used(different)


def test_another_file_of_that_name_has_another_profile(config: EngineConfig, tmp_path: Path) -> None:
    copy = tmp_path / Path(config.model_path).name
    copy.write_bytes(Path(config.model_path).read_bytes())
    assert profile_path(replace(config, model_path=str(copy))) == profile_path(config)
    copy.write_bytes(copy.read_bytes() + b"\0")
    assert profile_path(replace(config, model_path=str(copy))) != profile_path(config)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("version = 1", "version = 2", "it has version 2"),
        ("n_parallel = 8", "n_parallel = 0", "-np"),
        ("n_parallel = 8", "n_parallel = 4096", "from 1 to 256"),
        ("n_ubatch = 256", "n_ubatch = 'many'", "Expected `int`"),
        ('flash_attn = "off"', 'flash_attn = "maybe"', "Invalid enum value"),
        ("n_threads = 2", "n_threads = 2\nn_toes = 10", "n_toes"),
        ("[settings]", "[settings", "Expected"),
        ("[settings]", f"deep = {'[' * 3000}{']' * 3000}\n[settings]", "nested too deep"),
    ],
)
def test_a_profile_that_makes_no_sense_is_left_out_with_a_warning(
    config: EngineConfig, old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_path(config)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert use_profile(config, given=()) == Used(config)
    assert str(path) in caplog.text
    assert reason in caplog.text
    assert "cppbatch tune" in caplog.text


def test_bytes_that_are_not_text_are_left_out_too(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    profile_path(config).write_bytes(b"\xff\x00\xfe")
    assert use_profile(config, given=()) == Used(config)
    assert "is not used" in caplog.text


def test_profile_settings_that_conflict_with_the_users_are_left_out(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    small = replace(config, n_batch=4, n_parallel=2)
    assert use_profile(small, given={"n_batch"}) == Used(small)
    assert "less than n_parallel (-np), which is 8" in caplog.text


def test_the_engine_starts_with_the_step_times_of_the_profile_if_its_settings_are_those_of_the_profile(
    config: EngineConfig,
) -> None:
    save_profile(config, TUNED, {}, {"1": 5.0, "8": 12.5})
    assert use_profile(config, given=())[0].step_ms == ((1, 5.0), (8, 12.5))
    assert use_profile(replace(config, n_threads=1), given={"n_threads"})[0].step_ms == ()
