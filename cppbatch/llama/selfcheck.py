"""Checks, before a model is loaded, whether this build of llama.cpp crashes on this CPU.

At the first decode, a GCC build without -fno-dse crashes with SIGSEGV in its AMX code, and a build for another CPU
crashes with SIGILL. So a child process decodes tiny quantised models first. Its verdict is cached per library build and
CPU.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import msgspec

from cppbatch import child_processes
from cppbatch.errors import LibraryError
from cppbatch.findings import build_key, finding_path, read_finding, write_finding
from cppbatch.llama.library import REINSTALL, library_path

log = logging.getLogger("cppbatch.llama")

_TIMEOUT_S = 120
_FINE = "fine"
_CRASH_NAMES = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT")
_ABORT = re.compile(r"^\S+\.\w+:\d+: (.+)|^ *what\(\): +(.+)", re.MULTILINE)  # of ggml, and of C++
_CRASHES = {getattr(signal, name) for name in _CRASH_NAMES if hasattr(signal, name)}  # Windows has fewer


class Verdict(msgspec.Struct, frozen=True):
    """The result of the child process."""

    fast_path_works: bool
    """The CPU path with repacked weights (`repack=True`)."""
    plain_path_works: bool
    detail: str
    """How the child ended if it failed."""
    is_certain: bool = True
    """False if the failure may be temporary (a timeout, no memory): such a verdict is not cached."""


def repacking_works() -> bool:
    """Whether weights may be repacked for this CPU. Logs a warning if not; raises `LibraryError` if nothing works."""
    verdict = check()
    if verdict.fast_path_works:
        return True
    if verdict.plain_path_works or not verdict.is_certain:
        log.warning(
            "this build of llama-cpp-python fails its self-check on this CPU (%s), so its fast CPU path is disabled "
            "and prefill is several times slower. Rebuild it with:\n  %s",
            verdict.detail,
            REINSTALL,
        )
        return False
    raise LibraryError(
        f"this build of llama-cpp-python does not work on this CPU ({verdict.detail}). Rebuild it with:\n  {REINSTALL}"
    )


@functools.cache
def check() -> Verdict:
    """The verdict for the installed library on this CPU, cached on disk."""
    path = finding_path("selfcheck", build_key(Path(library_path()).parent))
    if cached := read_finding(path, Verdict):
        return cached
    verdict = _run_check()
    if verdict.is_certain:
        write_finding(path, verdict)
    return verdict


def _run_check() -> Verdict:
    from cppbatch.models.synthetic import LlamaShape, write_llama  # imported here: only needed once per machine

    with tempfile.TemporaryDirectory(prefix="cppbatch-selfcheck-") as folder:
        shape = LlamaShape(n_layer=1, n_embd=256, n_head=4, n_head_kv=4, n_ff=512)
        models = [write_llama(Path(folder) / f"{quant}.gguf", shape, quant=quant) for quant in ("Q4_0", "Q8_0")]
        fast = run_child(child_command(models, repack=True))
        if fast is None:
            return Verdict(True, True, "")
        plain = run_child(child_command(models, repack=False))
        certain = fast.crashed and (plain is None or plain.crashed)
        return Verdict(False, plain is None, (plain or fast).text, certain)


class Failure(msgspec.Struct, frozen=True):
    """How a child process failed."""

    text: str
    crashed: bool


def child_command(models: list[Path], *, repack: bool) -> list[str]:
    """The command of the child process."""
    return child_processes.child_command("cppbatch.llama.selfcheck_child", str(int(repack)), *map(str, models))


def find_crash(
    what: str, verdict: Path, command: list[str], timeout_s: float | None = None, *, remembers: bool = False
) -> str | None:
    """How llama.cpp crashes when it runs this command in a child process; None if it does not.

    `what`: names the object of the trial in the log. `verdict`: the file (`finding_path`) that caches success. With
    `remembers` it also caches a crash; otherwise a crash is tried again each time. Other failures are only logged.
    """
    found = read_finding(verdict, str)
    if found == _FINE or (found and remembers):
        return None if found == _FINE else found
    failure = run_child(command, timeout_s)
    if failure and not failure.crashed:
        log.info("could not check %s: %s", what, failure.text)
        return None
    if remembers or not failure:
        write_finding(verdict, failure.text if failure else _FINE)
    return failure.text if failure else None


def run_child(command: list[str], timeout_s: float | None = None) -> Failure | None:
    """Runs a child that may crash. Returns None if its exit code is 0, else how it ended."""
    timeout_s = timeout_s or _TIMEOUT_S
    try:
        done = child_processes.run(command, seconds=timeout_s)
    except OSError as error:
        return Failure(f"it could not be started: {error}", crashed=False)
    except subprocess.TimeoutExpired:
        return Failure(f"no result within {timeout_s} s", crashed=False)
    if done.returncode == 0:
        return None
    errors = done.stderr.decode(errors="replace")
    found = _ABORT.search(errors)
    reason = f": {found[1] or found[2]}" if found else ""
    if -done.returncode in _CRASHES:
        return Failure(f"killed by {signal.Signals(-done.returncode).name}{reason}", crashed=True)
    if done.returncode >= 0xC0000000:  # an exception on Windows
        return Failure(f"terminated by exception {done.returncode:#x}{reason}", crashed=True)
    last = errors.strip().splitlines()[-1:] or ["no output"]
    return Failure(f"exit code {done.returncode}: {last[0]}", crashed=False)
