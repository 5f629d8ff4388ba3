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
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NoReturn

import msgspec

from cppbatch import child_processes
from cppbatch.cluster.link import (
    LAST_WORDS,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    GetLive,
    GetStats,
    LimitThreads,
    Live,
    Loaded,
    LoadFailed,
    Loading,
    Log,
    Question,
    Refused,
    SharedStatus,
    SlotAction,
    SlotDone,
    Stats,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
    Update,
    Updated,
    WorkerSetup,
    refusal,
)
from cppbatch.cluster.sockets import WorkerLink
from cppbatch.cluster.worker.threads import InputThreads, StepLoop
from cppbatch.config import EngineConfig
from cppbatch.engine.core import EngineCore
from cppbatch.engine.disk.slots import SlotPrefix, SlotReport
from cppbatch.engine.grammar.grammar_check import SlowGrammar
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.engine.sequence import Seq
from cppbatch.errors import CppBatchError, EngineClosed, InvalidRequest, OutOfMemory, RequestCancelled
from cppbatch.llama.backend import Backend
from cppbatch.models.attention_times import RequestSizes, keep_sizes

log = logging.getLogger("cppbatch.worker")

OnProgress = Callable[[float], bool]


class Worker:
    """Handles the server's messages. The main thread steps; other threads receive, prepare requests and send events."""

    def __init__(self, engine: EngineCore, step_loop: StepLoop, link: WorkerLink, status: SharedStatus) -> None:
        self._engine = engine
        self._step_loop = step_loop
        self._link = link
        self._status = status
        self._input_threads = InputThreads()
        self._thread_numbers = _ThreadNumbers()
        self._preparing: set[str] = set()
        self._cancelled: set[str] = set()  # requests cancelled during preparation

    def run(self) -> None:
        """Runs until the server sends `Stop` or kills this process."""
        threading.Thread(target=self._receive, name="cppbatch-receiver", daemon=True).start()
        self._step_loop.run(self._engine)
        self._keep_sizes()
        self._engine.inputs.close()  # a grammar may take 10 s to compile
        self._input_threads.close()  # these threads read the model
        self._engine.close()

    def _keep_sizes(self) -> None:
        stats = self._engine.stats()
        prompt_tokens = stats.prompt_tokens + stats.prefix_hit_tokens
        sizes = RequestSizes(sum(stats.finished.values()), prompt_tokens, stats.prompt_tokens, stats.generated_tokens)
        if sizes.output_tokens:
            with contextlib.suppress(OSError):  # the model's file was removed meanwhile
                keep_sizes(Path(self._engine.config.model_path), sizes)

    # --- on the receiver's thread -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self._link.receive())
        except Exception:
            _crash(self._link, "failed to handle a message")

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, (Submit, Check, Tokenize, SlotAction, Update)):
            self._preparing.add(message.id)
            if isinstance(message, Update):
                self._step_loop.post(partial(self._answer_update, message))
                return
            if isinstance(message, SlotAction):
                threads = self._input_threads.for_files()
            elif isinstance(message, Tokenize):
                threads = self._input_threads.for_text(message.text)
            else:
                threads = self._input_threads.for_request(self._engine, message.request)
            threads.submit(self._process, message, perf_counter())
        elif isinstance(message, Cancel):
            cancelled = message.id
            if cancelled in self._preparing:
                self._cancelled.add(cancelled)
            self._step_loop.post(lambda engine: self._cancel(engine, cancelled))
        elif isinstance(message, GetStats):
            self._step_loop.post(lambda engine: self._link.send(Stats(engine.stats())))
        elif isinstance(message, GetLive):
            self._step_loop.post(lambda engine: self._link.send(Live(engine.live())))
        elif isinstance(message, LimitThreads):
            limit = message.n
            self._step_loop.post(lambda engine: engine.limit_threads(limit))
        elif isinstance(message, Stop):
            self._step_loop.stop()

    # --- on an input thread -----------------------------------------------------------------------------------------

    def _process(self, message: Submit | Question, arrived_at: float, *, patient: bool = False) -> None:
        """Records the request in the shared status during preparation: some texts and grammars crash the process."""
        request_id = message.id
        thread = self._thread_numbers.current()
        self._status.set_preparing(thread, int(request_id))
        try:
            command = self._make_command(message, thread, arrived_at, patient=patient)
        except InvalidRequest as error:
            self._step_loop.post(self._answer_now(refusal(request_id, error)))
        except RequestCancelled:
            self._step_loop.post(lambda engine: self._answer(request_id, _cancelled_event(request_id)))
        except SlowGrammar:
            self._input_threads.for_slow_grammars().submit(self._process, message, arrived_at, patient=True)
        except EngineClosed:
            log.debug("request %s was being prepared when the engine closed", request_id)
        except Exception as error:  # a bug; preparation changes nothing that other requests use
            log.exception("failed to prepare a request")
            failed = _failed(message, error)
            self._step_loop.post(lambda engine: self._answer(request_id, failed))
        else:
            if isinstance(message, Submit) and message.request.report_acceptance:
                self._link.send(Events([GenerationEvent(request_id=request_id)]))
            self._step_loop.post(command)
        finally:
            self._status.set_preparing(thread, -1)

    def _make_command(
        self, message: Submit | Question, thread: int, arrived_at: float, *, patient: bool
    ) -> Callable[[EngineCore], None]:
        """Prepares a request and returns the command that adds or answers it between two steps.

        Raises `InvalidRequest`, `RequestCancelled`, and unless `patient` `SlowGrammar`.
        """
        request_id, engine = message.id, self._engine

        def cancelled() -> bool:
            self._status.progressed(thread)
            return request_id in self._cancelled

        if cancelled():
            raise RequestCancelled("cancelled before it was prepared")
        answer: Checked | Tokenized
        if isinstance(message, SlotAction):
            return self._slot_command(message)
        if isinstance(message, Submit):
            sequence = engine.make_sequence(
                message.request, message.resume, cancelled=cancelled, arrived_at=arrived_at, patient=patient
            )
            return lambda engine: self._add(engine, request_id, sequence)
        if isinstance(message, Check):
            engine.make_sequence(message.request, cancelled=cancelled, patient=patient)
            answer = Checked(request_id)
        else:
            special = {"add_special": message.add_special, "parse_special": message.parse_special}
            tokens = engine.inputs.tokens(message.text, **special, cancelled=cancelled)
            pieces = list({token.id: token for token in tokens}.values())
            answer = Tokenized(request_id, [token.id for token in tokens], pieces)
        return self._answer_now(answer)

    def _answer_now(self, message: Refused | Checked | Tokenized) -> Callable[[EngineCore], None]:
        """Sends the answer without waiting for the end of the step. Returns the command that forgets the request."""
        self._link.send(message)
        return lambda engine: self._forget(message.id)

    def _slot_command(self, message: SlotAction) -> Callable[[EngineCore], None]:
        """Reads the file of a slot to restore. Raises `InvalidRequest`."""
        request_id, path, slots = message.id, Path(message.path), self._engine.slots
        if message.action == "restore":
            prefix = slots.read(path)
            return lambda engine: self._answer_slot(request_id, lambda: slots.put(message.slot, prefix))
        if message.action == "erase":
            return lambda engine: self._answer_slot(request_id, lambda: slots.erase(message.slot))

        def take(engine: EngineCore) -> None:
            try:
                prefix = slots.take(message.slot)
            except InvalidRequest as error:
                self._answer(request_id, refusal(request_id, error))
            else:
                self._input_threads.for_files().submit(write, prefix)

        def write(prefix: SlotPrefix) -> None:
            try:
                report = slots.write(path, prefix)
            except InvalidRequest as error:
                answer = refusal(request_id, error)
                self._step_loop.post(lambda engine: self._answer(request_id, answer))
            except Exception:
                _crash(self._link, "failed to save a slot")
            else:
                self._step_loop.post(lambda engine: self._answer(request_id, SlotDone(request_id, report)))

        return take

    # --- between two steps ------------------------------------------------------------------------------------------

    def _answer_slot(self, request_id: str, change: Callable[[], SlotReport]) -> None:
        try:
            answer: FromWorker = SlotDone(request_id, change())
        except InvalidRequest as error:
            answer = refusal(request_id, error)
        self._answer(request_id, answer)

    def _answer_update(self, message: Update, engine: EngineCore) -> None:
        try:
            found = engine.update(message.request_id, message.tokens)
            answer: FromWorker = Updated(message.id, found)
        except InvalidRequest as error:
            answer = refusal(message.id, error)
        self._answer(message.id, answer)

    def _add(self, engine: EngineCore, request_id: str, sequence: Seq) -> None:
        self._preparing.discard(request_id)
        if request_id in self._cancelled:
            self._answer(request_id, _cancelled_event(request_id))
        else:
            engine.add(sequence)

    def _answer(self, request_id: str, message: FromWorker) -> None:
        self._forget(request_id)
        self._link.send(message)

    def _forget(self, request_id: str) -> None:
        self._preparing.discard(request_id)
        self._cancelled.discard(request_id)

    def _cancel(self, engine: EngineCore, request_id: str) -> None:
        engine.cancel(request_id)
        if request_id not in self._preparing:  # the request is already in the engine, or has ended
            self._cancelled.discard(request_id)


def _failed(message: Submit | Question, error: Exception) -> FromWorker:
    """The answer to a request or question whose preparation failed."""
    why = f"it could not be prepared: {type(error).__name__}: {error}"
    if isinstance(message, Submit):
        return Events([GenerationEvent(request_id=message.id, finish_reason=FinishReason.ERROR, error=why)])
    return refusal(message.id, InvalidRequest("request", why))


def _cancelled_event(request_id: str) -> Events:
    """The last event of a request cancelled before it was added to the engine."""
    return Events([GenerationEvent(request_id=request_id, finish_reason=FinishReason.CANCELLED)])


class _ThreadNumbers:
    """Numbers the input threads from 0, for their entries in the shared status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}

    def current(self) -> int:
        with self._lock:
            return self._numbers.setdefault(threading.get_ident(), len(self._numbers))


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
    step_loop = StepLoop(lambda events: link.send(Events(events)), heartbeat=status.heartbeat)
    try:
        Backend.get().write_last_words(last_words)
        engine = EngineCore(
            setup.config,
            runtime=_runtime(setup, on_progress),
            on_plan=lambda plan: status.set_computing([int(sequence.id) for sequence, _ in plan.pieces]),
            on_admitted=step_loop.output_thread.put,
            survives_failures=False,
            prepares_beside_steps=True,
        )
    except (CppBatchError, MemoryError) as error:
        kind = OutOfMemory if isinstance(error, MemoryError) else type(error)
        link.send(LoadFailed(kind.__name__, str(error)))
        link.flush()
        return
    gc.freeze()  # objects alive now stay alive: garbage collection during a step skips them
    link.send(Loaded(engine.runtime.info, engine.stats()))
    try:
        Worker(engine, step_loop, link, status).run()
    except Exception:
        _crash(link, "the engine failed", last_words)
    os._exit(0)  # no other thread has anything to finish


if __name__ == "__main__":
    main()
