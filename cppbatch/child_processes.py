"""Child processes that end with this one, even if it is killed, and do not get the signals of a terminal.

done = run(child_command("cppbatch.llama.kernels_child", "Q4_0"), seconds=120)

A child is this file, run by its path with the parent's process id, a program and its arguments. It arranges its end and
runs the program. Unlike `python -m module`, it does not import modules from the current folder.

Ctrl-C, a closed terminal and systemd's stop signal all processes of a group at once. How to end is for the parent to
decide, so children block these signals, also while Python starts, when they would print a traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import IO, Any, TypeVar

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_GROUP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def child_command(program: str, *arguments: str) -> list[str]:
    """The command that runs Python code in a child of this process.

    `program`: a module, or the path of a file (*.py), for which no package is imported.
    """
    return [sys.executable, __file__, str(os.getpid()), program, *arguments]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a `child_command`. `options` as of `subprocess.Popen`. Raises `OSError`.

    On Linux the child also ends with the thread that starts it. A child that is to live longer is started again.
    """
    child: subprocess.Popen[Any] | None = None
    try:
        with _signals_blocked():
            child = subprocess.Popen(command, creationflags=_CREATION_FLAGS, **options)
    except BaseException:  # Ctrl-C, which was blocked meanwhile: no caller knows the child
        if child:
            child.kill()
            child.wait()
        raise
    return child


def run(
    command: Sequence[str],
    *,
    seconds: float | None,
    stdin: bytes = b"",
    stdout: int | IO[Any] = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a `child_command` and returns its exit code and output. `env`: changes of this process's environment.

    Raises `subprocess.TimeoutExpired` after `seconds`, when the child is killed, and `OSError` if it cannot be started;
    in `to_thread` also `ChildKilled`.
    """
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", **(env or {})}  # if llama.cpp aborts: a debugger would take seconds
    with start(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, env=env) as child:
        try:
            if group := _group.get():
                group.add(child)
            output, errors = child.communicate(stdin, timeout=seconds)
        except BaseException:
            child.kill()
            child.wait()  # after Ctrl-C, `with` does not
            raise
    if group and group.is_killed:
        raise ChildKilled
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def ends_with_parent() -> Callable[[], None] | None:
    """The `preexec_fn` of another program that is to end with this thread; None where there is none (not Linux).

    For programs without threads: it runs between fork and exec.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # not in the child
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class ChildKilled(Exception):
    """The caller of `to_thread` was cancelled."""


async def to_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Runs `function` on a thread. Cancelling kills the children that `function` runs, and ends the thread."""
    import asyncio

    group = _Group()
    token = _group.set(group)
    try:
        return await asyncio.to_thread(function, *arguments)
    except asyncio.CancelledError:
        group.kill()
        raise
    finally:
        _group.reset(token)


class _Group:
    """The running children of a call of `to_thread`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[Any]] = []
        self.is_killed = False

    def add(self, child: subprocess.Popen[Any]) -> None:
        with self._lock:
            self._children.append(child)
            if self.is_killed:
                child.kill()

    def kill(self) -> None:
        with self._lock:
            self.is_killed = True
            for child in self._children:
                child.kill()  # has no effect on one that has ended


_group: ContextVar[_Group | None] = ContextVar("_group", default=None)


_CREATION_FLAGS = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # on Windows: the child gets no Ctrl-C


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks `_GROUP_SIGNALS` in this thread, and so in the children that it starts. They arrive afterwards."""
    if sys.platform == "win32":
        yield
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in _GROUP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


_released = threading.Event()


def _end_with(parent: int) -> None:
    """From now on, the end of the parent kills this process."""
    if not _set_death_signal(is_killed=True):  # which, unlike a thread, needs no GIL
        threading.Thread(target=_watch, args=(parent,), name="cppbatch-parent", daemon=True).start()
    if sys.platform != "win32" and os.getppid() != parent:  # it has ended already
        os._exit(1)


def release() -> None:
    """For a child that notices by itself that its parent has ended, and has something to clean up then."""
    _set_death_signal(is_killed=False)
    _released.set()


def _set_death_signal(*, is_killed: bool) -> bool:
    """Whether Linux kills this process when its parent ends. Returns whether it is set."""
    if sys.platform != "linux":
        return False
    import ctypes

    number = signal.SIGKILL if is_killed else 0
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number) == 0)


def _watch(parent: int) -> None:
    if sys.platform == "win32":
        import psutil

        with suppress(psutil.Error):  # it has ended already
            psutil.Process(parent).wait()
    else:
        while os.getppid() == parent and not _released.wait(0.5):
            pass
    if not _released.is_set():
        os._exit(1)


def _run_program() -> None:
    import runpy

    parent, program, *arguments = sys.argv[1:]
    _end_with(int(parent))
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.pop(0)  # the folder of this file: its modules would shadow others of the same name
    if packages not in sys.path:
        sys.path.append(packages)
    from cppbatch import child_processes  # noqa: PLW0406 (not `__main__`: its state is what the program sees)

    child_processes._run_program()
