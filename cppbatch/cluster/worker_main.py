"""Runs in a worker process: an engine and the link to the server. Start: `python -m cppbatch.cluster.worker_main`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from cppbatch.cluster.engine_threads import StepLoop
from cppbatch.cluster.intake_threads import IntakeThreads
from cppbatch.cluster.shared_status import SharedStatus
from cppbatch.cluster.worker_link import WorkerLink
from cppbatch.cluster.worker_messages import (
    AskStats,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    Loaded,
    LoadFailed,
    Loading,
    Log,
    Refused,
    Stats,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
    WorkerSetup,
)
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.scheduler import StepPlan
from cppbatch.engine.sequence import Seq
from cppbatch.errors import CppBatchError, InvalidRequest, RequestCancelled

log = logging.getLogger("cppbatch.worker")

Progress = Callable[[float], bool]


class Worker:
    """Does what the messages say. The main thread steps, others receive, prepare requests, tell what came of steps."""

    def __init__(self, engine: BatchInferenceEngine, link: WorkerLink, box: SharedStatus) -> None:
        self._engine = engine
        self._link = link
        self._box = box
        self._steps = StepLoop(lambda events: link.send(Events(events)), beat=box.beat)
        self._intake = IntakeThreads()
        self._slots = _Slots()
        self._cancelled: set[int] = set()  # while they were being prepared
        self._preparing: set[int] = set()
        self._last_computed: list[int] = []
        engine.on_plan = self._note_what_is_computed
        engine.survives_failures = False

    def run(self) -> None:
        """For ever: the server's process ends it."""
        threading.Thread(target=self._receive, name="cppbatch-receiver", daemon=True).start()
        self._steps.run(self._engine)

    def _note_what_is_computed(self, plan: StepPlan) -> None:
        """Sequences that only hold a place are left out: whatever happens now is none of their doing."""
        computed = [int(sequence.id) for sequence, _ in plan.chunks]
        if computed != self._last_computed:
            self._box.runs(computed)
            self._last_computed = computed

    # --- the receiver's thread --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self._link.receive())
        except Exception:
            _die(self._link, "a message could not be handled")

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, (Submit, Check, Tokenize)):
            self._preparing.add(message.number)
            if isinstance(message, Tokenize):
                threads = self._intake.for_text(message.text)
            else:
                threads = self._intake.for_request(self._engine, message.request)
            threads.submit(self._prepare, message)
        elif isinstance(message, Cancel):
            number = message.number
            if number in self._preparing:
                self._cancelled.add(number)
            self._steps.do(lambda engine: self._cancel(engine, number))
        elif isinstance(message, AskStats):
            self._steps.do(lambda engine: self._link.send(Stats(engine.stats())))

    # --- a preparing thread -----------------------------------------------------------------------------------------

    def _prepare(self, message: Submit | Check | Tokenize) -> None:
        """The box knows of it meanwhile: some texts and grammars kill a process while they are read."""
        number = message.number
        slot = self._slots.mine()
        self._box.prepares(slot, number)
        try:
            then = self._prepared(message)
        except InvalidRequest as error:
            refused = Refused(number, error.field, error.message)
            self._steps.do(lambda engine: self._done(number, refused))
        except RequestCancelled:
            self._steps.do(lambda engine: self._done(number, _cancelled(number)))
        except Exception:
            _die(self._link, "preparing a request failed")
        else:
            self._steps.do(then)
        finally:
            self._box.prepares(slot, -1)

    def _prepared(self, message: Submit | Check | Tokenize) -> Callable[[BatchInferenceEngine], None]:
        """What is to be done with it between two steps. Raises `RequestCancelled` when it is not wanted any more."""
        number, engine = message.number, self._engine

        def cancelled() -> bool:
            return number in self._cancelled

        if cancelled():
            raise RequestCancelled("cancelled before it was prepared")
        answer: FromWorker
        if isinstance(message, Submit):
            sequence = engine.prepare(message.request, message.progress, cancelled=cancelled)
            return lambda engine: self._add(engine, number, sequence)
        if isinstance(message, Check):
            engine.prepare(message.request, cancelled=cancelled)
            answer = Checked(number)
        else:
            special = {"add_special": message.add_special, "parse_special": message.parse_special}
            tokens = engine.tokens(message.text, **special, cancelled=cancelled)
            answer = Tokenized(
                number, [token.id for token in tokens], list({token.id: token for token in tokens}.values())
            )
        return lambda engine: self._done(number, answer)

    # --- between two steps ------------------------------------------------------------------------------------------

    def _add(self, engine: BatchInferenceEngine, number: int, sequence: Seq) -> None:
        self._preparing.discard(number)
        if number in self._cancelled:
            self._done(number, _cancelled(number))
        else:
            engine.add(sequence)

    def _done(self, number: int, message: FromWorker) -> None:
        self._preparing.discard(number)
        self._cancelled.discard(number)
        self._link.send(message)

    def _cancel(self, engine: BatchInferenceEngine, number: int) -> None:
        engine.cancel(str(number))
        if number not in self._preparing:  # it was added meanwhile, or has ended
            self._cancelled.discard(number)


def _cancelled(number: int) -> Events:
    """The end of a request that was cancelled before it was the engine's."""
    return Events([GenerationEvent(request_id=str(number), finish_reason=FinishReason.CANCELLED)])


class _Slots:
    """Gives each preparing thread a place of its own in the black box."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}

    def mine(self) -> int:
        with self._lock:
            return self._known.setdefault(threading.get_ident(), len(self._known))


class _Sender(logging.Handler):
    """Sends log records to the server's process, which knows how they are to be written."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__()
        self._link = link
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(Log(record.levelno, record.name, self.format(record)))
        except Exception:
            self.handleError(record)


def _die(link: WorkerLink, why: str) -> NoReturn:
    """For bugs: like a crash, so that whoever brought it about is found out, and nobody else suffers."""
    log.exception(why)
    link.flush()
    os._exit(1)


def _end_with_parent(folder: str) -> None:
    """The standard input ends when the server's process does, however that happens: then nobody needs this one."""

    def watch() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="cppbatch-parent", daemon=True).start()


def _runtime(setup: WorkerSetup, progress: Progress) -> Runtime | None:
    if setup.runtime is None:
        return None
    module, _, function = setup.runtime.partition(":")
    make: Callable[[EngineConfig, Progress], Runtime] = getattr(importlib.import_module(module), function)
    return make(setup.config, progress)


def main() -> None:
    """Reads its setup from the standard input, loads the model, serves."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # they go to the server's process too, which says when to end
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSetup)
    _end_with_parent(setup.folder)
    link = WorkerLink(setup)
    logging.basicConfig(level=setup.log_level, handlers=[_Sender(link)])
    box = SharedStatus(Path(setup.folder) / "box")

    def progress(fraction: float) -> bool:
        box.beat()
        link.send(Loading(fraction))
        return True

    try:
        engine = BatchInferenceEngine(setup.config, progress=progress, runtime=_runtime(setup, progress))
    except CppBatchError as error:
        link.send(LoadFailed(type(error).__name__, str(error)))
        link.flush()
        return
    gc.freeze()  # what is there by now stays: collecting garbage in mid-step need not look at it
    link.send(Loaded(engine.info, engine.stats()))
    try:
        Worker(engine, link, box).run()
    except Exception:
        _die(link, "the engine failed")


if __name__ == "__main__":
    main()
