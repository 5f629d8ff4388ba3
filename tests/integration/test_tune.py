"""`cppbatch tune` on a tiny model, each point in a child process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cppbatch.bench.tune import tuner
from cppbatch.bench.tune.measurement import MeasurementTask, measure_in_child
from cppbatch.cli.main import cli
from cppbatch.config import EngineConfig
from cppbatch.sizing.profile import profiles_folder


def test_a_process_that_cannot_load_the_model_reports_the_reason(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(tmp_path / "none.gguf"))
    assert "model file not found" in (measure_in_child(MeasurementTask(config=config, seconds=0.1), 60).error or "")


def test_speed_counts_the_generated_tokens_and_not_the_configured_sequences(tiny_llama: Path) -> None:
    config = EngineConfig(model_path=str(tiny_llama), n_ctx=160, n_parallel=4, n_batch=4, n_threads=1)
    point = measure_in_child(
        MeasurementTask(config=config, seconds=0.05), 60
    )  # the first has ended before the last is read
    assert not point.error
    assert 0 <= point.tokens_per_s * point.inter_token_ms / 1000 < 3.5


def test_a_profile_of_a_real_model_is_written_and_used(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_CONFIG", str(tmp_path))
    monkeypatch.setattr(tuner, "_SECONDS", 0.02)
    model = ["-m", str(tiny_llama), "-c", "1024", "-t", "1", "-fa", "off", "-ub", "64", "--kv-layout", "unified"]
    report = tmp_path / "report.json"
    limits = ["-np", "4", "--max-minutes", "1", "--json", str(report)]
    done = CliRunner().invoke(cli, ["tune", *model, *limits])
    assert done.exit_code == 0, done.output
    figures = json.loads(report.read_text())
    assert figures["settings"]["chosen"]["n_parallel"] == 4
    assert max(row["tokens_per_s"] or 0 for row in figures["rows"]) > 0
    [profile] = profiles_folder().iterdir()
    used = CliRunner().invoke(cli, ["generate", "-m", str(tiny_llama), "-p", "ab", "-n", "2"])
    assert used.exit_code == 0, used.output
    assert f"using the profile {profile} of 2" in used.stderr
    assert "-np 4 -c 1024 --kv-layout unified -fa off -ub 64 -t 1; use --no-profile to ignore it" in used.stderr
