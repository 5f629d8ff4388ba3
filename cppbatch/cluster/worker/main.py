"""The worker process: an engine and the link to the server. `worker/process.py` starts it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from cppbatch import child_processes
from cppbatch.cluster.link import LAST_WORDS, Loaded, LoadFailed, Loading, Log, WorkerSetup
from cppbatch.cluster.shared_status import SharedStatus
from cppbatch.cluster.sockets import WorkerLink
from cppbatch.cluster.worker.worker import Worker
from cppbatch.config import EngineConfig
from cppbatch.engine.core import EngineCore
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.errors import CppBatchError, OutOfMemory
from cppbatch.llama.backend import Backend
from cppbatch.models.attention_times import RequestSizes, keep_sizes

log = logging.getLogger("cppbatch.worker")

OnProgress = Callable[[float], bool]


class _LogSender(logging.Handler):
    """Sends log records to the server process, which formats and writes them."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__()
        self._link = link
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(Log(record.levelno, record.name, self.format(record)))
        except Exception:
            self.handleError(record)


def _crash(link: WorkerLink, message: str, last_words: Path | None = None) -> NoReturn:
    """Ends the process after a bug, or because memory ran out. Crash recovery then identifies the request that caused
    it and continues the others. `last_words`: the file for the reason."""
    error = sys.exc_info()[1]
    if last_words and isinstance(error, (OutOfMemory, MemoryError)):
        last_words.write_text(f"{type(error).__name__}: {error}")
        log.error("%s: %s", message, error)
    else:
        log.exception(message)
    link.flush()
    os._exit(1)


def _receive(link: WorkerLink, worker: Worker) -> None:
    """Passes on the server's messages, on a thread."""
    try:
        while True:
            worker.handle(link.receive())
    except Exception:
        _crash(link, "failed to handle a message")


def _keep_sizes(engine: EngineCore) -> None:
    stats = engine.stats()
    prompt_tokens = stats.prompt_tokens + stats.prefix_hit_tokens
    sizes = RequestSizes(sum(stats.finished.values()), prompt_tokens, stats.prompt_tokens, stats.generated_tokens)
    if sizes.output_tokens:
        with contextlib.suppress(OSError):  # the model's file was removed meanwhile
            keep_sizes(Path(engine.config.model_path), sizes)


def _exit_with_server(folder: str) -> None:
    """Ends this process when the server process ends for any reason, which closes standard input."""

    def wait_for_end() -> None:
        while os.read(0, 1 << 10):  # not sys.stdin, whose lock this thread would hold when the interpreter ends
            pass
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides tracebacks: without its folder the main thread may fail
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait_for_end, name="cppbatch-parent", daemon=True).start()
    child_processes.release()


def _runtime(setup: WorkerSetup, on_progress: OnProgress) -> Runtime:
    if setup.runtime is None:
        return load_runtime(setup.config, on_progress, survives_crash=True)
    module, _, function = setup.runtime.partition(":")
    make: Callable[[EngineConfig, OnProgress], Runtime] = getattr(importlib.import_module(module), function)
    return make(setup.config, on_progress)


def main() -> None:
    """Reads the setup from the standard input, loads the model, serves requests."""
    with contextlib.suppress(CppBatchError):  # raised again below
        Backend.get()  # loads the library while the server prepares the setup
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the server has ended
        return
    setup = msgspec.json.decode(line, type=WorkerSetup)
    _exit_with_server(setup.folder)
    link = WorkerLink(setup)
    logging.basicConfig(level=setup.log_level, handlers=[_LogSender(link)])
    status = SharedStatus(Path(setup.folder) / "status")

    def on_progress(fraction: float) -> bool:
        status.heartbeat()
        link.send(Loading(fraction))
        return True

    last_words = Path(setup.folder) / LAST_WORDS
    try:
        Backend.get().write_last_words(last_words)
        worker = Worker(setup.config, link.send, runtime=_runtime(setup, on_progress), status=status)
    except (CppBatchError, MemoryError) as error:
        kind = OutOfMemory if isinstance(error, MemoryError) else type(error)
        link.send(LoadFailed(kind.__name__, str(error)))
        link.flush()
        return
    gc.freeze()  # objects alive now stay alive: garbage collection during a step skips them
    link.send(Loaded(worker.engine.runtime.info, worker.engine.stats()))
    threading.Thread(target=_receive, args=(link, worker), name="cppbatch-receiver", daemon=True).start()
    try:
        worker.run()
        _keep_sizes(worker.engine)
        worker.close()
    except Exception:
        _crash(link, "the engine failed", last_words)
    os._exit(0)  # no other thread has anything to finish


if __name__ == "__main__":
    main()
