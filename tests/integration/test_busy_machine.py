"""Other programs keep the cores busy: engines use fewer threads, and `cppbatch doctor` says so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from cppbatch import EngineConfig
from cppbatch.bench import resource_usage
from cppbatch.cli import doctor_command
from cppbatch.engine.compute_threads import usable_cpus
from cppbatch.engine.runtime import Runtime, load_runtime
from tests.support.batch_files import wait_until
from tests.support.narrow import some

Busy = Callable[[int], AbstractContextManager[list[int]]]


@contextmanager
def busy(n: int) -> Iterator[list[int]]:
    """Keeps `n` cores busy; the numbers of the processes."""
    with ExitStack() as stack:
        loops = [stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])) for _ in range(n)]
        for loop in loops:
            stack.callback(loop.kill)
        time.sleep(0.2)  # until they have started
        yield [loop.pid for loop in loops]


@contextmanager
def loaded(config: EngineConfig) -> Iterator[Runtime]:
    runtime = load_runtime(config)
    yield runtime
    runtime.close()


@pytest.mark.parametrize("settings", [{}, {"n_threads": len(usable_cpus())}, {"pooling": "mean"}], ids=str)
def test_beside_busy_cores_an_engine_uses_one_thread_also_with_a_number_of_its_own(
    tiny_llama: Path, settings: dict[str, object]
) -> None:
    config = EngineConfig(str(tiny_llama), n_ctx=256, n_parallel=2, **settings)  # type: ignore[arg-type]
    with busy(len(usable_cpus())), loaded(config) as runtime:
        threads = some(runtime.threads)

        def after_a_step() -> int:
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            return threads.now()

        wait_until(lambda: after_a_step() == 1)


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Doctor has no model whose kernels it would time."""
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))


@pytest.mark.usefixtures("no_models")
def test_doctor_names_the_programs_that_keep_cores_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "_WATCH_S", 0.4)
    with busy(len(usable_cpus())) as pids:

        def are_named() -> bool:  # other tests may keep the cores busier meanwhile
            others = resource_usage.watch_other_programs(0.4)
            shown = CliRunner().invoke(doctor_command.doctor).output
            [line] = [line for line in shown.splitlines() if line.split()[1:2] == ["cores"]]
            return (
                others.cores > 0.5 * len(pids)
                and any(each.pid in pids for each in others.busiest)
                and any(f"(process {pid})" in line for pid in pids)
                and line.startswith(" !")
                and "stop them" in line
            )

        wait_until(are_named)


@pytest.mark.usefixtures("no_models")
def test_doctor_does_not_mention_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = resource_usage.OtherPrograms(0.1, [])
    monkeypatch.setattr(resource_usage, "watch_other_programs", lambda seconds: quiet)
    assert "ok cores        not used by other programs" in CliRunner().invoke(doctor_command.doctor).output
