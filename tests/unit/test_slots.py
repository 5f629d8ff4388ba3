"""Slots: which cached prefix a slot has, and the file that it is saved to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.engine.disk.slots import Footer, read_slot_file, read_slot_head, write_slot_file
from cppbatch.errors import InvalidRequest
from tests.support.fakes import drain, fake_engine, greedy

TOKENS = np.arange(40, dtype=np.int32)
CELLS: Any = {"n_ctx": 256, "sharing": "cells"}
STATE = np.arange(200, dtype=np.uint8)
FOOTER = Footer(model="m", digest="d", cache_types=("f16", "f16"), cache_salt="", adapters=[("a", 0.5)], form={"n": 1})


def ask(engine: BatchInferenceEngine, prompt: list[int], id_slot: int = -1) -> int:
    """How many tokens of the prompt came from the cache."""
    engine.add_request(prompt, greedy(1), id_slot=id_slot)
    usage = drain(engine)[-1].usage
    assert usage
    return usage.cached_tokens


def test_a_slot_has_the_tokens_of_its_last_request_as_long_as_they_are_cached() -> None:
    with fake_engine(**CELLS) as engine:
        ask(engine, [1] * 30, id_slot=3)
        assert engine.core.slots.take(3).tokens.tolist() == [1] * 30
        ask(engine, [2] * 40, id_slot=3)
        assert engine.core.slots.take(3).tokens.tolist() == [2] * 40
        with pytest.raises(InvalidRequest, match="slot 2 has no cached prefix"):
            engine.core.slots.take(2)
        engine.clear_prefix_cache()
        with pytest.raises(InvalidRequest, match="slot 3 has no cached prefix"):
            engine.core.slots.take(3)


def test_slots_of_evicted_prefixes_are_forgotten() -> None:
    with fake_engine(**CELLS, prefix_cache_ram=0) as engine:
        for slot in range(60):
            ask(engine, [slot] * 30, id_slot=slot)
        slots = engine.core.kv.cache.slots
        assert engine.core.slots.take(59).tokens.tolist() == [59] * 30
        assert len(slots) <= 256 // 30 + 2
        engine.clear_prefix_cache()
        assert not slots


def test_an_erased_slot_leaves_no_prefix_and_no_memory() -> None:
    with fake_engine(**CELLS) as engine:
        ask(engine, [1] * 30, id_slot=0)
        ask(engine, [2] * 30)
        assert engine.core.slots.erase(0).n_tokens == 30
        assert (ask(engine, [1] * 30), ask(engine, [2] * 30)) == (0, 29)
        engine.clear_prefix_cache()
        assert engine.core.kv.n_free == engine.core.kv.n_ctx


def test_a_prefix_that_is_put_back_is_taken_and_bounded() -> None:
    with fake_engine(**CELLS) as engine:
        ask(engine, [1] * 30, id_slot=0)
        prefix = engine.core.slots.take(0)
    with fake_engine(**CELLS, prefix_cache_ram=1) as engine:
        engine.core.slots.put(1, prefix)
        assert engine.stats().prefix_cache_bytes == prefix.state.n_bytes
        assert ask(engine, [1] * 30) == 29
    with fake_engine(**CELLS, prefix_cache_ram=0) as engine, pytest.raises(InvalidRequest, match="--prefix-cache-ram"):
        engine.core.slots.put(1, prefix)


def test_a_file_is_read_as_it_was_written_and_the_older_form_too(tmp_path: Path) -> None:
    path = tmp_path / "a"
    n_bytes = write_slot_file(path, TOKENS, STATE, FOOTER)
    data = path.read_bytes()
    assert n_bytes == len(data)
    n_words = np.uint32(len(TOKENS)).tobytes()
    for content in (data, data[:8] + n_words + data[24:]):  # without the words before the tokens
        path.write_bytes(content)
        tokens, state, footer, n = read_slot_file(path)
        assert (tokens.tolist(), state.tolist(), n) == (TOKENS.tolist(), STATE.tolist(), len(content))
        assert msgspec.structs.replace(footer, checksum=0) == FOOTER


def test_any_changed_or_missing_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_slot_file(path, TOKENS, STATE, FOOTER)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(InvalidRequest, match="not a complete slot file"):
            read_slot_file(path)
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(InvalidRequest, match="not a complete slot file"):
            read_slot_file(path)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no named pipes in folders")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(InvalidRequest, match="'a' cannot be read: it is not a regular file"):
        read_slot_file(tmp_path / "a")
    with pytest.raises(OSError, match="not a regular file"):
        read_slot_head(tmp_path / "a")


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(_from: object, _to: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_slot_file(path, TOKENS, STATE, FOOTER)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


def test_a_slot_of_a_model_with_states_has_its_checkpoints() -> None:
    text = [9] * 60
    engines = [fake_engine(n_ctx=256, n_batch=64, sharing="checkpoints") for _ in range(2)]
    engines[0].generate([text], greedy(2, ignore_eos=True), id_slot=1)
    engines[1].core.slots.put(1, engines[0].core.slots.take(1))
    (answer,) = engines[1].generate([[*text[:-2], 5, 6]], greedy(2, ignore_eos=True))
    assert answer.usage.cached_tokens == len(text) - 4
