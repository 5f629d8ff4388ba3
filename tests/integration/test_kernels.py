"""Kernels are timed in a child process, once for each library and CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf.quants import dequantize

from cppbatch import child_processes
from cppbatch.cli.doctor_command import doctor
from cppbatch.cli.models_command import models
from cppbatch.cli.serve_command import find_advice
from cppbatch.config import EngineConfig
from cppbatch.llama.kernels_child import encode
from cppbatch.models import kernels
from cppbatch.models.kernels import ROWS, kernel_times
from cppbatch.models.requantize import plan_auto
from tests.support import tiny_models
from tests.support.server_process import ServerProcess


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Path:
    """An empty folder for times."""
    return empty_cache / "kernels"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The types that each child process was asked for."""
    started: list[list[str]] = []
    run = child_processes.run

    def counted(command: list[str], **settings: Any) -> Any:
        started.append(command[4:])
        return run(command, **settings)

    monkeypatch.setattr(child_processes, "run", counted)
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


@pytest.mark.usefixtures("untimed_kernels")
def test_only_what_is_missing_is_timed(children: list[list[str]]) -> None:
    kernel_times(["Q8_0"])
    assert kernel_times(["Q8_0", "F16"]).keys() == {"Q8_0", "F16"}
    assert children == [["Q8_0"], ["F16"]]


def test_a_type_that_llama_cpp_repacks_is_timed_both_ways(cache: Path) -> None:
    """Q4_0 is repacked on x86-64 with AVX2 and on Arm; floats never are."""
    times = kernel_times(["Q4_0", "F32"])
    plain = times["Q4_0"].plain_ms
    assert plain is not None
    assert tuple(plain) == ROWS
    assert 0 < plain[1] < plain[256]
    assert times["F32"].plain_ms is None
    [file] = cache.iterdir()
    assert kernel_times(["Q4_0", "F32"]) == times
    assert json.loads(file.read_text())["plain_ms"].keys() == {"Q4_0"}


def test_float_weights_have_batched_kernels_in_every_build() -> None:
    assert kernel_times(["F32"])["F32"].is_batched


def test_types_that_are_not_timed_are_left_out(children: list[list[str]]) -> None:
    assert kernel_times(["IQ2_XXS", "I32", "no such type"]) == {}
    assert children == []


@pytest.mark.usefixtures("untimed_kernels")
@pytest.mark.parametrize("command", [["false"], ["echo", "no JSON"], ["/no/such/program"]])
def test_a_child_that_fails_gives_no_times_and_is_started_again(
    command: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "child_command", lambda types: command)
        assert kernel_times(["F16"]) == {}
    assert not cache.exists()
    assert kernel_times(["F16"])


@pytest.mark.usefixtures("untimed_kernels")
@pytest.mark.parametrize("content", ["", "{", "null", '{"a": 1}', '{"ms": {}, "has_gpu": false}', "\x00"])
def test_an_unreadable_cache_is_replaced(cache: Path, content: str) -> None:
    kernel_times(["F16"])
    [file] = cache.iterdir()
    file.write_text(content)
    assert kernel_times(["F16"]).keys() == {"F16"}
    assert json.loads(file.read_text())["ms"].keys() == {"F16"}


@pytest.mark.usefixtures("untimed_kernels")
def test_without_a_writable_cache_times_are_kept_in_a_folder_of_the_user(
    children: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = kernel_times(["F16"])
    assert kernel_times(["F16"]) == first
    assert children == [["F16"]]
    (own,) = tmp_path.glob("cppbatch-*")
    assert own.stat().st_mode & 0o077 == 0
    other = own.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    own.rename(tmp_path / f"cppbatch-{other}")  # of another user, which could contain any times
    kernel_times(["F16"])
    assert children == [["F16"], ["F16"]]


def test_without_llama_cpp_python_no_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_times(["F16"]) == {}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "Q4_K", "IQ4_NL", "IQ4_XS", "BF16", "F16", "MXFP4"])
def test_ggmls_conversion_gives_the_weights_back(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    encoded = encode(rows, gguf.GGMLQuantizationType[kind])
    again = dequantize(encoded, gguf.GGMLQuantizationType[kind])
    assert np.abs(again - rows).mean() < 0.15


@pytest.fixture
def row_by_row(untimed_kernels: None, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model of Q4_1 and cached times of a CPU that computes Q4_1 row by row."""
    kernel_times(["F16"])
    [file] = cache.iterdir()
    slow, fast = ({1: 1.0, 4: n * 4 / 16, 16: n, 256: 16 * n} for n in (16.0, 8.0))
    file.write_text(
        json.dumps(
            {
                "ms": {"Q4_1": slow, "Q8_0": fast, "BF16": fast, "F16": fast, "F32": fast},
                "plain_ms": {},
                "has_gpu": False,
            }
        )
    )
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("CPPBATCH_MODELS", str(folder))
    return tiny_models.llama(folder / "tiny.gguf", quant="Q4_1")


def test_inspect_shows_which_types_are_computed_row_by_row(row_by_row: Path) -> None:
    result = CliRunner().invoke(models, ["inspect", str(row_by_row)])
    assert "Q4_1 row by row. all 15 matrices are Q4_1" in result.output
    gain = "makes matrix products of 16 sequences, and of their prompts, about 2.0x faster"
    assert f"`cppbatch models requantize {row_by_row}` {gain}" in result.output


def test_inspect_names_the_copy_that_is_beside_the_file(row_by_row: Path) -> None:
    copy = plan_auto(row_by_row, kernel_times).output
    copy.write_bytes(row_by_row.read_bytes())
    result = CliRunner().invoke(models, ["inspect", str(row_by_row)])
    assert f"computes row by row; its copy (-m {copy}) makes matrix products" in result.output
    assert "requantize" not in result.output


def test_inspect_gives_it_as_json(row_by_row: Path) -> None:
    found = json.loads(CliRunner().invoke(models, ["inspect", "--json", str(row_by_row)]).output)["kernels"]
    assert found["types"]["Q4_1"] == {
        "ms": {"1": 1.0, "4": 4.0, "16": 16.0, "256": 256.0},
        "batch_gain": 1.0,
        "is_batched": False,
    }
    assert found["on_gpu"] is False
    assert "requantize" in found["advice"]


def test_doctor_and_inspect_name_one_gain(run: Callable[..., tuple[int, str, str]], row_by_row: Path) -> None:
    """That of the cached times. `pull` names none."""
    named = [run(*command)[1] for command in (["models", "inspect", row_by_row], ["doctor"])]
    assert [re.findall(r"about [\d.]+x faster", out) for out in named] == [["about 2.0x faster"]] * 2


def test_doctor_advises_but_reports_no_problem(row_by_row: Path) -> None:
    result = CliRunner().invoke(doctor)
    assert "requantize" in result.output
    assert "no problems" in result.output
    assert result.exit_code == 0


def test_serve_advises_once_it_is_ready(row_by_row: Path) -> None:
    with ServerProcess("-m", row_by_row, "-c", "256", "-np", "1", "-t", "1") as server:
        server.wait_line("hint: all 15 matrices are Q4_1, which this CPU computes row by row; `cppbatch models", 60)
        assert server.url


def test_serve_has_no_advice_for_a_file_that_does_not_load(tmp_path: Path) -> None:
    assert find_advice(EngineConfig(model_path=str(tiny_models.truncated(tmp_path / "cut.gguf")))) is None
