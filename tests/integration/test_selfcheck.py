"""The self-check: a build that crashes is found out in a child process, once for each library and CPU."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cppbatch import findings
from cppbatch.cli.doctor_command import doctor
from cppbatch.errors import LibraryError
from cppbatch.llama import Backend, selfcheck
from cppbatch.llama.library import REINSTALL
from cppbatch.llama.selfcheck import Verdict
from tests.support import tiny_models

FINE = "pass"
SIGSEGV = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
SIGILL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
MESSAGE = "import sys; sys.exit('the logits are not finite')"
SILENT = "import sys; sys.exit(3)"
HANGS = "import time; time.sleep(60)"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="deaths by signal")


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Iterator[Path]:
    """An empty folder for verdicts, and none known to this process."""
    selfcheck.check.cache_clear()
    yield empty_cache / "selfcheck"
    selfcheck.check.cache_clear()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[bool]]:
    """Sets the behaviour of the child with and without repacked weights; lists the children started."""
    started: list[bool] = []

    def set_to(fast: str, plain: str) -> list[bool]:
        def child_command(models: Sequence[Path], *, repack: bool) -> list[str]:
            assert all(model.is_file() for model in models)
            started.append(repack)
            return [sys.executable, "-c", fast if repack else plain]

        monkeypatch.setattr(selfcheck, "child_command", child_command)
        return started

    return set_to


def test_the_installed_build_works_here() -> None:
    assert selfcheck.check().plain_path_works


def test_a_working_build_needs_one_child_and_no_warning(
    children: Callable[[str, str], list[bool]], caplog: pytest.LogCaptureFixture
) -> None:
    started = children(FINE, FINE)
    assert selfcheck.repacking_works()
    assert started == [True]
    assert not caplog.records


@pytest.mark.parametrize(
    ("fast", "detail", "certain"),
    [
        (SIGSEGV, "killed by SIGSEGV", True),
        (SIGILL, "killed by SIGILL", True),
        (MESSAGE, "exit code 1: the logits are not finite", False),
        (SILENT, "exit code 3: no output", False),
    ],
)
def test_a_failing_fast_path_is_turned_off_with_a_warning_that_says_how_to_rebuild(
    children: Callable[[str, str], list[bool]], caplog: pytest.LogCaptureFixture, fast: Any, detail: str, certain: bool
) -> None:
    children(fast, FINE)
    assert selfcheck.check() == Verdict(False, True, detail, is_certain=certain)
    with caplog.at_level(logging.WARNING):
        assert not selfcheck.repacking_works()
    [record] = caplog.records
    assert detail in record.message
    assert REINSTALL in record.message


def test_a_build_that_always_crashes_raises_with_the_line_that_rebuilds_it(
    children: Callable[[str, str], list[bool]],
) -> None:
    children(SIGSEGV, SIGILL)
    assert selfcheck.check() == Verdict(False, False, "killed by SIGILL")
    with pytest.raises(LibraryError, match="killed by SIGILL") as caught:
        selfcheck.repacking_works()
    assert REINSTALL in str(caught.value)


def test_a_hanging_child_is_ended_and_counts_as_a_failure(
    children: Callable[[str, str], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_TIMEOUT_S", 0.5)
    children(HANGS, FINE)
    assert selfcheck.check() == Verdict(False, True, "no result within 0.5 s", is_certain=False)


def test_a_child_that_only_hung_is_started_again_next_time(
    children: Callable[[str, str], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_TIMEOUT_S", 0.5)
    children(HANGS, FINE)
    assert not selfcheck.check().fast_path_works
    selfcheck.check.cache_clear()
    children(FINE, FINE)
    assert selfcheck.check().fast_path_works


def test_the_verdict_is_kept_for_the_next_process(children: Callable[[str, str], list[bool]], cache: Path) -> None:
    started = children(SIGSEGV, FINE)
    first = selfcheck.check()
    selfcheck.check.cache_clear()
    assert selfcheck.check() == first
    assert started == [True, False]
    [file] = cache.iterdir()
    assert json.loads(file.read_text())["detail"] == "killed by SIGSEGV"


def test_another_cpu_gets_a_verdict_of_its_own(
    children: Callable[[str, str], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = children(FINE, FINE)
    selfcheck.check()
    selfcheck.check.cache_clear()
    monkeypatch.setattr(findings, "_cpu", lambda: "another CPU")
    selfcheck.check()
    assert started == [True, True]


def test_another_build_of_the_library_gets_a_verdict_of_its_own(
    children: Callable[[str, str], list[bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "lib" / "libllama.so"
    library.parent.mkdir()
    library.write_bytes(b"one build")
    monkeypatch.setattr(selfcheck, "library_path", lambda: str(library))
    started = children(FINE, FINE)
    selfcheck.check()
    selfcheck.check.cache_clear()
    library.write_bytes(b"another, longer build")
    selfcheck.check()
    assert started == [True, True]


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"a": 1}', "\x00"])
def test_an_unreadable_verdict_is_found_out_again_and_replaced(
    children: Callable[[str, str], list[bool]], cache: Path, content: str
) -> None:
    children(FINE, FINE)
    selfcheck.check()
    [file] = cache.iterdir()
    file.write_text(content)
    selfcheck.check.cache_clear()
    assert selfcheck.check() == Verdict(True, True, "")
    assert json.loads(file.read_text())["fast_path_works"] is True


def test_a_cache_that_cannot_be_written_is_ignored(
    children: Callable[[str, str], list[bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    children(FINE, FINE)
    assert selfcheck.repacking_works()


@pytest.fixture
def models(untimed_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("CPPBATCH_MODELS", str(folder))
    return folder


def test_doctor_finds_all_well(children: Callable[[str, str], list[bool]], models: Path) -> None:
    children(FINE, FINE)
    tiny_models.llama(models / "tiny.gguf")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 0
    assert "no problems" in result.output
    assert str(models / "tiny.gguf") in result.output


@pytest.mark.parametrize(("plain", "state"), [(FINE, "works only without its fast path"), (SIGILL, "does not work")])
def test_doctor_shows_how_to_rebuild_a_crashing_library(
    children: Callable[[str, str], list[bool]], models: Path, plain: Any, state: str
) -> None:
    children(SIGSEGV, plain)
    tiny_models.llama(models / "tiny.gguf")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert state in result.output
    assert REINSTALL in result.output
    assert "1 problem\n" in result.output


def test_doctor_shows_how_to_get_a_model(children: Callable[[str, str], list[bool]], models: Path) -> None:
    children(FINE, FINE)
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "cppbatch models pull" in result.output


def test_doctor_names_the_kernels_of_a_portable_build_and_a_missing_decoder(
    children: Callable[[str, str], list[bool]], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(FINE, FINE)
    monkeypatch.setattr(Backend.get(), "cpu_variant", "zen4")
    monkeypatch.setitem(sys.modules, "soxr", None)
    result = CliRunner().invoke(doctor)
    assert "variant      zen4: of the CPU kernels in this wheel, the fastest that run here\n" in result.output
    assert 'audio input requires soxr: pip install "cppbatch[media]"' in result.output


def test_doctor_names_the_problem_of_the_model(children: Callable[[str, str], list[bool]], models: Path) -> None:
    children(FINE, FINE)
    tiny_models.not_gguf(models / "page.gguf")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "Download a .gguf version" in result.output


def test_doctor_counts_every_problem(children: Callable[[str, str], list[bool]], models: Path) -> None:
    children(SIGSEGV, SIGSEGV)
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "2 problems" in result.output
