"""Cached prefixes on disk: the folder, its bound and its leftovers, the index, and when the engine reads and writes."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.config import EngineConfig, disk_folder
from cppbatch.engine.disk import folder as prefix_folder
from cppbatch.engine.disk import prefixes
from cppbatch.engine.disk.folder import PrefixFolder, file_name
from cppbatch.engine.disk.prefix_index import PrefixIndex
from cppbatch.engine.disk.slots import Footer, StateKey, weight_files
from cppbatch.engine.engine import BatchInferenceEngine as Engine
from cppbatch.engine.kv import pool
from cppbatch.engine.kv.prefix_tier import TierLimits
from cppbatch.engine.kv.radix_tree import Tokens
from cppbatch.engine.kv.save_cost import DiskCost
from cppbatch.errors import ConfigError
from cppbatch.models import digest as digests
from tests.support.fakes import drain, fake_engine, greedy, reference, tokens_of

STATE = np.arange(1000, dtype=np.uint8)
CELLS: Any = {"n_ctx": 256, "sharing": "cells"}
LONG = [1 + i % 50 for i in range(60)]


def tokens_from(start: int, n: int = 40) -> Tokens:
    return np.arange(start, start + n, dtype=np.int32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"weights")
    return path


def key_of(model: Path, **changes: Any) -> StateKey:
    with fake_engine(path=str(model)) as engine:
        config = EngineConfig(model_path=str(model), **changes)
        files = weight_files(config)
        files.read()
        return StateKey(engine.info, config, {"version": "1"}, files)


def footer_of(key: StateKey, cache_salt: str = "") -> Footer:
    return Footer(
        model="m",
        digest=key.digest,
        cache_types=key.cache_types,
        cache_salt=cache_salt,
        adapters=[],
        form={"n": 1},
        settings=key.settings,
    )


def write(folder: PrefixFolder, key: StateKey, tokens: Tokens) -> str:
    footer = footer_of(key)
    name = file_name(key.short, tokens, footer)
    assert folder.write(name, tokens, STATE, footer)
    return name


def names(folder: PrefixFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir() if path.name != ".prefixes.lock")


# --- the setting ------------------------------------------------------------------------------------------------------


def test_the_setting_is_a_folder_with_or_without_gigabytes() -> None:
    assert disk_folder("") is None
    assert disk_folder("/a/b") == (Path("/a/b"), 16 * 10**9)
    assert disk_folder("/a,b,0.5") == (Path("/a,b"), 5 * 10**8)
    for wrong in ("/a,", "/a,x", "/a,0", "/a,-1", ",3", "/a,inf", "/a,nan"):
        with pytest.raises(ConfigError, match="--prefix-cache-disk"):
            EngineConfig(model_path="m", prefix_cache_disk=wrong)
    with pytest.raises(ConfigError, match="needs host memory"):
        EngineConfig(model_path="m", prefix_cache_disk="/a", prefix_cache_ram=0)


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"prefix_cache_disk .*file/x is not writable \(Not a directory\)"):
        PrefixFolder(file / "x", 1000)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_private_and_has_the_written_content(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 10_000), key_of(model)
    name = write(folder, key, tokens_from(-5))
    assert names(folder) == [name]
    assert stat.S_IMODE((folder.folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    tokens, state, footer = folder.read(name)
    assert (tokens.tolist(), state.tolist()) == (tokens_from(-5).tolist(), STATE.tolist())
    assert msgspec.structs.replace(footer, checksum=0) == footer_of(key)
    assert folder.read_head(name)[0].tolist() == tokens_from(-5).tolist()


def test_every_changed_byte_and_every_torn_end_is_a_miss(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 10_000), key_of(model)
    path = folder.folder / write(folder, key, tokens_from(0))
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises(ValueError):  # noqa: PT011  # any
            folder.read(path.name)
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(ValueError):  # noqa: PT011
            folder.read(path.name)


def test_a_file_under_the_name_of_another_prefix_is_damaged(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 10_000), key_of(model)
    a, b = write(folder, key, tokens_from(0)), write(folder, key, tokens_from(1))
    os.replace(folder.folder / a, folder.folder / b)
    with pytest.raises(ValueError, match="a different prefix"):
        folder.read(b)
    index = PrefixIndex(folder, key)
    assert len(index) == 0
    assert names(folder) == []


def test_the_least_recently_used_files_of_all_keys_leave_within_the_bound(model: Path, tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path / "d", 5000)
    keys = [key_of(model), key_of(model, cache_type_k="f32")]
    other = folder.folder / "notes.kv"
    other.write_bytes(bytes(100_000))
    written = []
    for i in range(12):
        written.append(write(folder, keys[i % 2], tokens_from(i)))
        os.utime(folder.folder / written[-1], (i, i))
        n_bytes = sum(path.stat().st_size for path in folder.folder.glob("prefix-*"))
        assert n_bytes <= 5000
        if i == 2:
            folder.touch(written[0])
    assert written[0] in names(folder), "it was used later than the others"
    assert names(folder)[1:] == sorted([written[0], *written[-2:]])
    assert other.exists()


def test_a_file_larger_than_the_bound_is_not_written_and_deletes_none(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 2000), key_of(model)
    name = write(folder, key, tokens_from(0))
    footer = footer_of(key)
    assert (
        folder.write(file_name(key.short, tokens_from(1), footer), tokens_from(1), np.zeros(2000, np.uint8), footer)
        == 0
    )
    assert names(folder) == [name]


def test_files_of_killed_writers_are_removed_and_those_of_running_ones_kept(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 5000), key_of(model)
    dead, living = folder.folder / ".prefix-dead.part", folder.folder / ".prefix-living.part"
    dead.touch()
    with living.open("wb") as file:
        prefix_folder._lock(file.fileno())
        PrefixFolder(folder.folder, 5000)
        assert names(folder) == [living.name]
        file.truncate(2500)
        first = write(folder, key, tokens_from(0))
        second = write(folder, key, tokens_from(1))
        assert names(folder) == [living.name, second], "what is being written counts"
        assert first != second
        file.truncate(4500)
        with pytest.raises(OSError, match="size limit"):
            write(folder, key, tokens_from(2))
    write(folder, key, tokens_from(2))
    assert not living.exists()


def test_a_full_disk_leaves_no_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 5000), key_of(model)
    name = write(folder, key, tokens_from(0))

    def fail(_handle: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", fail)
        with pytest.raises(OSError, match="No space"):
            write(folder, key, tokens_from(1))
    assert names(folder) == [name]
    usage = type("Usage", (), {"total": 10**12, "free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="not enough free space"):
        write(folder, key, tokens_from(1))
    assert names(folder) == [name], "deleting all of it would not be enough"


# --- the index --------------------------------------------------------------------------------------------------------


def test_the_index_finds_what_another_process_wrote_and_forgets_what_it_deleted(model: Path, tmp_path: Path) -> None:
    ours, theirs = PrefixFolder(tmp_path / "d", 50_000), PrefixFolder(tmp_path / "d", 50_000)
    key = key_of(model)
    index = PrefixIndex(ours, key)
    name = write(theirs, key, tokens_from(0))
    write(theirs, key_of(model, cache_type_k="f32"), tokens_from(0, 50))
    assert index.refresh() == 0
    assert len(index) == 1
    found = index.best(tokens_from(0, 30), ("", ()), TierLimits(n_bytes=10_000))
    assert found
    assert (found[0].name, found[1]) == (name, 30)
    assert index.best(tokens_from(0, 30), ("", ()), TierLimits(whole=True, n_bytes=10_000)) is None
    assert index.best(tokens_from(0, 30), ("salt", ()), TierLimits(n_bytes=10_000)) is None
    assert index.best(tokens_from(0, 30), ("", ()), TierLimits(n_bytes=10)) is None
    theirs.remove(name)
    index.refresh()
    assert len(index) == 0


def test_the_key_follows_from_the_weights_of_model_projector_and_adapters(model: Path, tmp_path: Path) -> None:
    projector, adapter = tmp_path / "mmproj.gguf", tmp_path / "adapter.gguf"
    for path in (projector, adapter):
        path.write_bytes(b"weights")
    keys, adapters = set(), set()
    for changed in (None, model, projector, adapter):
        if changed:
            changed.write_bytes(b"WEIGHTS")
        key = key_of(model, mmproj=str(projector), lora=((str(adapter), 1.0),))
        keys.add(key.short)
        adapters.add(key.adapter_digests(((0, 0.5),)))
    assert (len(keys), len(adapters)) == (3, 2)


def test_a_salt_is_not_readable_in_the_file(model: Path, tmp_path: Path) -> None:
    folder, key = PrefixFolder(tmp_path / "d", 50_000), key_of(model)
    index = PrefixIndex(folder, key)
    with fake_engine(path=str(model), **CELLS) as engine:
        engine.add_request(LONG, greedy(1), id_slot=0)
        drain(engine)
        state = engine.core.slots.take(0).state
    footer = index.footer(("a secret", ()), state)
    folder.write(index.name(tokens_from(0), footer), tokens_from(0), state.data, footer)
    (path,) = folder.folder.glob("prefix-*")
    assert b"secret" not in path.read_bytes()
    index.refresh()
    assert index.best(tokens_from(0), ("a secret", ()), TierLimits(n_bytes=10_000))
    assert not index.best(tokens_from(0), ("another", ()), TierLimits(n_bytes=10_000))


# --- when reading and writing pay off ---------------------------------------------------------------------------------


def test_reading_is_compared_with_computing() -> None:
    token_s = 0.0
    cost = DiskCost(lambda: token_s)
    assert cost.is_worth(1, 10**12), "without measurements"
    token_s = 1e-4
    cost.observe_read(10**6, 0.1)
    assert cost.is_worth(1000, 10**5)
    assert not cost.is_worth(1000, 10**7)
    assert sum(cost.is_worth(1000, 10**7) for _ in range(64)) == 2, "now and then the disk is measured again"


# --- in an engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def few_and_slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake context has few cells, and computes a token faster than any disk reads one. Nothing is written beside
    requests, unless a test allows it."""
    made = prefixes.DiskPrefixes.__init__

    def make(self: Any, folder: Any, key: Any, _token_s: Any) -> None:
        made(self, folder, key, lambda: 1.0, min_tokens=20)
        self._left_s = -1e9

    monkeypatch.setattr(prefixes.DiskPrefixes, "__init__", make)


def ask(engine: Engine, prompt: list[int], n: int = 4, **options: Any) -> int:
    """How many tokens of the prompt came from the cache. The text is right."""
    name = engine.add_request(prompt, greedy(n), **options)
    events = drain(engine)
    assert tokens_of(events, name) == reference(prompt, greedy(n))[0]
    usage = events[-1].usage
    assert usage
    return usage.cached_tokens


def disk_engine(model: Path, folder: Path, **settings: Any) -> BatchInferenceEngine:
    return fake_engine(path=str(model), prefix_cache_disk=str(folder), **{**CELLS, **settings})


def write_while_idle(engine: Engine) -> None:
    """Until nothing is left to write."""
    disk, end = engine.core._disk, time.monotonic() + 5
    while disk and (disk._candidates or not disk._is_free()):
        time.sleep(min(0.02, engine.core.idle()))
        assert time.monotonic() < end


def test_the_pool_imports_nothing_of_the_disk_not_even_for_types() -> None:
    modules = list((Path(pool.__file__).parent).glob("*.py"))
    assert len(modules) > 10
    assert not [module.name for module in modules if "engine.disk" in module.read_text()]


def files(folder: Path) -> int:
    return len(list(folder.glob("prefix-*.kv")))


@pytest.mark.parametrize("sharing", ["cells", "copy"])
def test_a_prefix_persists_across_a_restart(model: Path, tmp_path: Path, sharing: str) -> None:
    layout = {"sharing": sharing, "unified": sharing == "cells"}
    with disk_engine(model, tmp_path / "d", **layout) as engine:
        assert ask(engine, LONG) == 0
        write_while_idle(engine)
        assert files(tmp_path / "d") == 1
        assert engine.stats().prefix_disk_written_bytes > 0
    with disk_engine(model, tmp_path / "d", **layout) as engine:
        assert engine.stats().prefixes_on_disk == 1
        assert ask(engine, [*LONG[:40], 55, 56]) == 40, "a part of it"
        stats = engine.stats()
        assert (stats.prefix_disk_hits, stats.prefix_disk_hit_tokens) == (1, 40)
        assert ask(engine, LONG) > 50, "now from host memory"
        assert engine.stats().prefix_disk_hits == 1


def test_until_the_weights_are_known_nothing_is_read_or_written_and_nothing_is_lost(
    model: Path, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    gate, read = threading.Event(), digests._hash

    def slow(path: Path, is_stopped: digests.IsStopped) -> str:
        gate.wait(10)
        return read(path, is_stopped)

    monkeypatch.setattr(digests, "_SMALL_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    monkeypatch.setattr(digests, "_hash", slow)
    with disk_engine(model, tmp_path / "d") as engine:
        assert ask(engine, LONG) == 0, "a miss"
        assert ask(engine, LONG[::-1]) == 0
        time.sleep(prefixes._IDLE_S)
        engine.core.idle()
        assert files(tmp_path / "d") == 1
        gate.set()
        engine.core._weights.wait(10)
        ask(engine, [7] * 5)  # reads the names of the files, before one of them is written again
        write_while_idle(engine)
        assert files(tmp_path / "d") == 2
    with disk_engine(model, tmp_path / "d") as engine:
        assert ask(engine, LONG[::-1]) > 50, "an unchanged file is known at once"


def test_several_requests_wait_for_one_read(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    with disk_engine(model, tmp_path / "d") as engine:
        prompts = {engine.add_request([*LONG, i, i], greedy(3)): [*LONG, i, i] for i in range(4)}
        events = drain(engine)
        for name, prompt in prompts.items():
            assert tokens_of(events, name) == reference(prompt, greedy(3))[0]
        stats = engine.stats()
        assert (stats.prefix_disk_hits, stats.prefix_disk_read_bytes > 0) == (4, True)
        assert stats.prefix_disk_read_bytes == next((tmp_path / "d").glob("prefix-*")).stat().st_size


def test_a_prefix_longer_than_a_sequence_may_be_is_not_read(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    streams: dict[str, Any] = {"sharing": "copy", "unified": False, "n_parallel": 4, "n_ctx": 200}
    with disk_engine(model, tmp_path / "d", **streams) as engine:
        assert ask(engine, LONG[:40]) == 0
        assert engine.stats().prefix_disk_read_bytes == 0


def test_a_recurrent_state_without_checkpoints_is_taken_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    states: dict[str, Any] = {"sharing": "whole", "ctx_checkpoints": 0}
    with disk_engine(model, tmp_path / "d", **states) as engine:
        ask(engine, LONG, 4)
    said = reference(LONG, greedy(4))[0]
    with disk_engine(model, tmp_path / "d", **states) as engine:
        assert ask(engine, [*LONG[:40], 55, 56]) == 0
        assert ask(engine, [*LONG, *said, 7, 8]) == len(LONG) + 3


def test_a_prefix_on_disk_has_its_checkpoints(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d", sharing="checkpoints") as engine:
        ask(engine, LONG, 4)
    assert files(tmp_path / "d") == 1
    for unified in (True, False):
        with disk_engine(model, tmp_path / "d", sharing="checkpoints", unified=unified, n_parallel=1) as engine:
            assert ask(engine, [*LONG[:-2], 55, 56]) == 57  # before a marker
            assert engine.stats().prefix_disk_hits == 1


def test_salts_and_short_prefixes_are_misses(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG, cache_salt="a")
        ask(engine, [3] * 12)
    assert files(tmp_path / "d") == 1
    with disk_engine(model, tmp_path / "d") as engine:
        assert ask(engine, LONG, cache_salt="b") == 0
        assert ask(engine, LONG) == 0
        assert ask(engine, LONG, cache_salt="a") > 50
    with disk_engine(model, tmp_path / "d", cache_type_k="f32") as engine:
        assert ask(engine, LONG, cache_salt="a") == 0
    model.write_bytes(b"other weights")
    with disk_engine(model, tmp_path / "d") as engine:
        assert ask(engine, LONG, cache_salt="a") == 0


def test_a_system_prompt_is_written_once_and_a_longer_conversation_replaces_a_shorter_one(
    model: Path, tmp_path: Path
) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        for i in range(8):
            ask(engine, [*LONG, *[i + 1] * 10])
            write_while_idle(engine)
    assert files(tmp_path / "d") == 1
    first = LONG + [1] * 10 + reference([*LONG, *[1] * 10], greedy(4))[0]
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, [*first, *range(1, 41)])
        write_while_idle(engine)
        assert files(tmp_path / "d") == 1
        assert engine.stats().prefixes_on_disk == 1
    with disk_engine(model, tmp_path / "d") as engine:
        assert ask(engine, [*first, *range(1, 41), 9]) == len(first) + 40


def test_a_small_rest_of_a_conversation_is_written_at_the_end(model: Path, tmp_path: Path) -> None:
    prompt = [1 + i % 7 for i in range(110)]
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, prompt)
        write_while_idle(engine)
        longer = [*prompt, *reference(prompt, greedy(4))[0], *[9] * 22]
        ask(engine, longer)
        write_while_idle(engine)
        before = engine.stats().prefix_disk_written_bytes
    with disk_engine(model, tmp_path / "d") as engine:
        assert before
        assert ask(engine, [*longer, 5, 5]) == len(longer)


def test_a_damaged_file_is_a_miss_and_is_deleted(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    (path,) = (tmp_path / "d").glob("prefix-*")
    data = path.read_bytes()
    at = data.index(b"{") - 10  # in the state
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with disk_engine(model, tmp_path / "d", prefix_cache_ram=1) as engine:
        assert ask(engine, LONG) == 0
        assert engine.stats().prefix_disk_damaged == 1
        assert engine.stats().prefix_disk_hits == 0
    assert files(tmp_path / "d") == 1, "it is written again at the end"


def test_files_and_the_folder_may_vanish(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    with disk_engine(model, tmp_path / "d") as engine:
        sequence = engine.prepare(_request("x", LONG))
        for path in (tmp_path / "d").iterdir():
            path.unlink()
        (tmp_path / "d").rmdir()
        engine.add(sequence)
        assert tokens_of(drain(engine), "x") == reference(LONG, greedy(4))[0]
        assert engine.stats().prefixes_on_disk == 0
        write_while_idle(engine)
        assert files(tmp_path / "d") == 1, "the folder is made again"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _request(name: str, prompt: list[int]) -> Any:
    from cppbatch.engine.request import GenerationRequest

    return GenerationRequest(id=name, prompt=prompt, params=greedy(4))


def test_a_full_disk_is_one_line_and_no_failed_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_handle: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with disk_engine(model, tmp_path / "d") as engine:
        monkeypatch.setattr("os.write", fail)
        for i in range(4):
            ask(engine, [i + 1] * 50)
            time.sleep(0.11)
            engine.core.idle()
            assert engine.core._disk
            engine.core._disk._wait_for_writer(5)
            engine.core._disk._paused_until = 0
        monkeypatch.undo()
    lines = [record.message for record in caplog.records if "cannot write cached prefixes to disk" in record.message]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]


def test_a_cancelled_request_leaves_its_read_to_others(model: Path, tmp_path: Path) -> None:
    with disk_engine(model, tmp_path / "d") as engine:
        ask(engine, LONG)
    with disk_engine(model, tmp_path / "d") as engine:
        name = engine.add_request(LONG, greedy(4))
        engine.core.scheduler.plan()  # starts the read
        engine.cancel(name)
        drain(engine)
        end = time.monotonic() + 5
        while engine.core._disk and engine.core._disk._reads:
            engine.core.idle()
            assert time.monotonic() < end
        assert ask(engine, LONG) > 50


def test_writing_beside_requests_takes_its_share_of_the_time_only(model: Path, tmp_path: Path) -> None:
    now = 0.0
    with disk_engine(model, tmp_path / "d") as engine:
        disk = engine.core._disk
        assert disk
        disk._clock = lambda: now
        disk._counted_at = now
        disk._left_s = -0.05
        ask(engine, LONG)
        for now in (1.0, 2.0, 4.0, 8.0):  # noqa: B007
            disk.after_step(engine.core.kv.state_of)
            assert disk._is_free()
            assert files(tmp_path / "d") == 0
        now = 12.0
        disk.after_step(engine.core.kv.state_of)
        assert disk._wait_for_writer(5)
        assert files(tmp_path / "d") == 1


def test_a_prefix_that_leaves_host_memory_is_written_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_engine(model, tmp_path / "d", n_ctx=64, n_parallel=1, prefix_cache_ram=1) as engine:
        disk = engine.core._disk
        assert disk
        for i in (1, 2):
            ask(engine, [i] * 40)
        assert files(tmp_path / "d") == 0
        assert len(engine.core.kv.cache.in_host) == 1
        monkeypatch.setattr(disk, "after_step", lambda _: None)
        disk._left_s = 0.1
        ask(engine, [3] * 40)
        assert disk._wait_for_writer(5)
        assert files(tmp_path / "d") == 1
        disk._left_s = -1e9
