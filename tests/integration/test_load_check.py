"""A file that crashes llama.cpp is tried in a child process first, and refused with one sentence that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.config import EngineConfig
from cppbatch.engine import load_check
from cppbatch.engine.load_check import check_loads
from cppbatch.errors import ModelError
from cppbatch.llama import selfcheck
from cppbatch.llama.selfcheck import Failure
from tests.support import tiny_models, tiny_projectors
from tests.support.lora_files import write_lora
from tests.support.mutated_files import retyped, without_numbers


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last norm has integers, for which ggml aborts the process."""
    path = tiny_models.llama(tmp_path_factory.mktemp("models") / "crashing.gguf")
    return retyped(path, "output_norm.weight", "I32")


def generate(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cppbatch", "generate", *map(str, flags), "-p", "x", "-np", "1", "-c", "256"]
    return subprocess.run(
        [*command, "-t", "1", "--no-memory-check"], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("is_draft", [False, True], ids=["model", "draft-model"])
def test_a_command_names_the_file_that_crashes_llama_cpp_and_its_reason(
    is_draft: bool, crashing: Path, tiny_llama: Path
) -> None:
    done = generate("-m", tiny_llama, "-md", crashing) if is_draft else generate("-m", crashing)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {crashing} cannot be used: llama.cpp crashes when it loads the file or computes with it (killed by "
        "SIGABRT: binary_op: unsupported types: dst: f32, src0: f32, src1: i32). Download it again, or use another "
        "file\n"
    )


def test_a_model_that_computes_no_numbers_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Each of its requests would fail."""
    path = without_numbers(tiny_models.llama(tmp_path / "nan.gguf"), "output_norm.weight")
    with pytest.raises(ModelError, match=r"nan\.gguf cannot be used: all logits are NaN"):
        BatchInferenceEngine(path, n_ctx=256, n_parallel=1, n_threads=1)


class Children:
    """Stands in for the child processes."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.tried: list[list[str]] = []

    def run(self, command: list[str], _timeout_s: float | None) -> Failure | None:
        self.tried.append(command[4:])
        return self.failure


@pytest.fixture
def children(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    children = Children()
    monkeypatch.setattr(selfcheck, "run_child", children.run)
    return children


def test_a_file_is_tried_once_until_it_changes(children: Children, tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "model.gguf")
    for _ in range(2):
        check_loads(EngineConfig(str(path)))
    check_loads(EngineConfig(str(path), n_ctx=512))
    assert children.tried == [[str(path)]]
    tiny_models.llama(path, seed=1)
    check_loads(EngineConfig(str(path)))
    assert children.tried == [[str(path)]] * 2


def test_a_file_that_crashes_is_tried_each_time(children: Children, tiny_llama: Path) -> None:
    children.failure = Failure("killed by SIGSEGV", crashed=True)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tiny-llama\.gguf cannot be used: llama\.cpp crashes .*SIGSEGV"):
            check_loads(EngineConfig(str(tiny_llama)))
    children.failure = Failure("no result within 600 s", crashed=False)
    check_loads(EngineConfig(str(tiny_llama)))
    assert len(children.tried) == 3


def test_a_file_that_the_header_refuses_is_not_tried(children: Children, tmp_path: Path) -> None:
    path = retyped(tiny_models.llama(tmp_path / "model.gguf"), "output.weight", "I32")
    with pytest.raises(ModelError, match=r"output\.weight is of type I32"):
        check_loads(EngineConfig(str(path)))
    assert children.tried == []


def test_an_adapter_is_tried_with_its_model_and_a_worker_tries_only_that(
    children: Children, tiny_llama: Path, tmp_path: Path
) -> None:
    """The server reports the end of a worker as one of its model."""
    adapter = write_lora(tmp_path / "lora.gguf")
    check_loads(EngineConfig(str(tiny_llama), lora=((str(adapter), 1.0),)), survives_crash=True)
    assert children.tried == [[str(tiny_llama), str(adapter)]]


@pytest.mark.parametrize("kind", ["llama", "mamba", "encoder"])
def test_every_kind_of_model_passes(kind: str, request: pytest.FixtureRequest) -> None:
    command = load_check.load_command([str(request.getfixturevalue(f"tiny_{kind}"))])
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_every_kind_of_projector_passes(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    projector = getattr(tiny_projectors, kind)(tmp_path / "projector.gguf")
    subprocess.run(load_check.projector_command(str(projector), str(tiny_llama)), check=True, timeout=60)
