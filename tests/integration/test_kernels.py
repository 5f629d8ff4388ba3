"""Kernels are timed in a child process, once for each library and CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from cppbatch.llama.encode import encode
from cppbatch.models import kernels
from cppbatch.models.kernels import ROWS, kernel_times


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for times."""
    monkeypatch.setattr(kernels, "user_cache_path", lambda name: tmp_path / "cache")
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The types that each child process was asked for."""
    started: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **settings: Any) -> Any:
        started.append(command[3:])
        return run(command, **settings)

    monkeypatch.setattr(subprocess, "run", counted)
    return started


def test_types_are_timed_in_one_child_and_the_second_time_they_are_read(children: list[list[str]], cache: Path) -> None:
    first = kernel_times(["F32", "Q4_1", "F32"])
    assert first.keys() == {"F32", "Q4_1"}
    for times in first.values():
        assert tuple(times.ms) == ROWS
        assert 0 < times.ms[1] < times.ms[256]
    assert kernel_times(["Q4_1"]) == {"Q4_1": first["Q4_1"]}
    assert children == [["F32", "Q4_1"]]
    assert len(list(cache.iterdir())) == 1


def test_only_what_is_missing_is_timed(children: list[list[str]]) -> None:
    kernel_times(["Q8_0"])
    assert kernel_times(["Q8_0", "F16"]).keys() == {"Q8_0", "F16"}
    assert children == [["Q8_0"], ["F16"]]


def test_float_weights_have_batched_kernels_in_every_build() -> None:
    assert kernel_times(["F32"])["F32"].is_batched


def test_types_that_are_not_timed_are_left_out(children: list[list[str]]) -> None:
    assert kernel_times(["IQ2_XXS", "I32", "no such type"]) == {}
    assert children == []


@pytest.mark.parametrize("command", [["false"], ["echo", "no JSON"], ["/no/such/program"]])
def test_a_child_that_fails_gives_no_times_and_is_asked_again(
    command: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "child_command", lambda types: command)
        assert kernel_times(["F16"]) == {}
    assert not cache.exists()
    assert kernel_times(["F16"])


@pytest.mark.parametrize("content", ["", "{", "null", '{"a": 1}', "\x00"])
def test_an_unreadable_cache_is_replaced(cache: Path, content: str) -> None:
    kernel_times(["F16"])
    [file] = cache.iterdir()
    file.write_text(content)
    assert kernel_times(["F16"]).keys() == {"F16"}
    assert json.loads(file.read_text())["ms"].keys() == {"F16"}


def test_without_llama_cpp_python_there_are_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_times(["F16"]) == {}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "Q4_K", "IQ4_NL", "IQ4_XS", "BF16", "F16", "MXFP4"])
def test_ggmls_conversion_gives_the_weights_back(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    encoded = encode(rows, gguf.GGMLQuantizationType[kind])
    again = dequantize(encoded, gguf.GGMLQuantizationType[kind])
    assert np.abs(again - rows).mean() < 0.15
