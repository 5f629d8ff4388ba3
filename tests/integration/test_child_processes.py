"""Child processes end with their parent, however it ends, and leave the signals of a terminal to it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import measuring
import psutil
import pytest

from cppbatch import child_processes
from cppbatch.child_processes import child_command, run, start
from tests.support.processes import left_after

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

SCRIPTS = str(Path(measuring.__file__).parent)
BUSY = str(Path(child_processes.__file__).parents[1] / "tests" / "support" / "busy_child.py")
PARENT = f"""
import subprocess, time
from cppbatch.child_processes import child_command, start
child = start(child_command({BUSY!r}), stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread watches, which needs the GIL")
def test_a_child_that_never_releases_the_gil_ends_with_its_parent(how: signal.Signals) -> None:
    with python(PARENT) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(how)
        assert not left_after(2, [child])


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_other_programs_end_with_a_benchmark_that_is_killed() -> None:
    code = (
        f"import sys, time; sys.path.append({SCRIPTS!r}); from server_process import ChildProcess\n"
        "with ChildProcess(['sleep', '60']) as child: print(child.pid, flush=True); time.sleep(60)\n"
    )
    with python(code) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert not left_after(2, [child])


def test_without_a_signal_of_the_kernel_a_child_watches_its_parent() -> None:
    """As on macOS and Windows."""
    code = (
        "import time; from cppbatch import child_processes\n"
        "child_processes._set_death_signal = lambda *, is_killed: False\n"
        "child_processes._end_with({parent}); time.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}.format(parent=os.getpid())])\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    with python(parent) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        time.sleep(0.3)
        assert child.is_running()
        process.kill()
        assert not left_after(2, [child])


def test_a_child_whose_parent_has_ended_before_it_starts_does_nothing() -> None:
    command = child_command("platform")
    command[2] = "1"
    assert run(command, seconds=20).stdout == b""


def test_children_block_signals_of_the_group_and_this_thread_does_not() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with start(child_command(BUSY), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline().split() == ["SIGHUP", "SIGINT", "SIGTERM"]
        child.kill()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_modules_in_the_current_folder_are_not_those_of_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's `queue.py` ended every worker."""
    for name in ("queue", "msgspec", "cppbatch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the module')")
    monkeypatch.chdir(tmp_path)
    done = run(child_command("cppbatch.findings"), seconds=20)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_child_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(child_command(BUSY), seconds=0.5)
    assert not psutil.Process().children()


async def test_a_cancelled_call_kills_its_children_and_frees_its_thread() -> None:
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(child_processes.ChildKilled):
            run(child_command(BUSY), seconds=60)
        ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(child_processes.to_thread(wait), 0.3)
    assert await asyncio.to_thread(ended.wait, 2)
    assert not psutil.Process().children()


def test_a_child_outlives_a_call_of_release() -> None:
    """For one that cleans up when its parent has ended."""
    child = (
        "import os, time; from cppbatch import child_processes as c\n"
        "c._end_with(os.getppid()); c.release(); print(os.getpid(), flush=True)\n"
        "time.sleep(0.3); print('cleaned up', flush=True)\n"
    )
    parent = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with python(parent) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
        assert process.stdout.readline() == "cleaned up\n"


ANSWERING = f"""
import sys
sys.path.append({SCRIPTS!r})
from measuring import answer_lines
print("a library says hello", flush=True)
answer_lines(lambda a, b=1: a * b if a else exit(3))
"""


def test_a_measuring_process_answers_questions_until_it_ends() -> None:
    with measuring.MeasuringChild([sys.executable, "-c", ANSWERING]) as child:
        assert child.ask(3) == 3
        assert child.ask(3, 4) == 12
        with pytest.raises(SystemExit, match="ended with code 3"):
            child.ask(0)
