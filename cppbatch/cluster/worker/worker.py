"""An engine that answers the messages of `cluster/link.py`: in a worker process, or on a thread of a `LocalEngine`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

from cppbatch.cluster.link import (
    Answer,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    GetLive,
    GetStats,
    LimitThreads,
    Live,
    Question,
    Refused,
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
    refusal,
)
from cppbatch.cluster.shared_status import SharedStatus
from cppbatch.cluster.worker.threads import Command, InputThreads, StepLoop
from cppbatch.config import EngineConfig
from cppbatch.engine.core import EngineCore
from cppbatch.engine.grammar.grammar_check import SlowGrammar
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine.vocabulary import IsCancelled
from cppbatch.errors import EngineClosed, InvalidRequest, RequestCancelled

log = logging.getLogger("cppbatch.worker")

Prepare = Callable[[IsCancelled], Command | None]
"""Prepares a request or question on an input thread, and returns what remains to be done between two steps."""


class Worker:
    """An engine with its threads. `run` steps it; other threads prepare requests and send events.

    `handle` takes the messages, and `send` gets the answers, on any of the threads. The ids of requests and questions
    are decimal numbers. Their sender limits the number of requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        send: Callable[[FromWorker], None],
        *,
        progress: Callable[[float], bool] | None = None,
        runtime: Runtime | None = None,
        status: SharedStatus | None = None,
    ) -> None:
        """Loads the model; arguments and errors as in `EngineCore`.

        `status`: of a process that another one watches. The requests being prepared and computed are written there,
        because they may crash the process, and `run` raises if a batch fails.
        """
        self._send, self._status = send, status

        def computes(plan: StepPlan) -> None:
            if status:
                status.set_computing([int(sequence.id) for sequence, _ in plan.all_scheduled])

        self._step_loop = StepLoop(lambda events: send(Events(events)), status.heartbeat if status else lambda: None)
        self.engine = EngineCore(
            config,
            progress=progress,
            runtime=runtime,
            on_plan=computes if status else None,
            on_admitted=self._step_loop.output_thread.put,
            survives_failures=status is None,
            prepares_beside_steps=True,
        )
        self._input_threads = InputThreads()
        self._preparing: set[str] = set()
        self._cancelled: set[str] = set()  # requests cancelled during preparation

    def run(self) -> None:
        """Steps until `Stop` is handled. Raises the errors of steps."""
        self._step_loop.run(self.engine)

    def close(self) -> None:
        """Closes the engine, after `run`. Requests in preparation get no answer."""
        self.engine.inputs.close()  # a grammar may take half a minute to compile
        self._input_threads.close()  # these threads read the model
        self.engine.close()

    def handle(self, message: ToWorker) -> None:
        """Handles a message; its answer comes later. Only one thread calls this."""
        post, threads = self._step_loop.post, self._input_threads
        if isinstance(message, (Submit, Check)):
            prepare = partial(self._prepare_request, message, perf_counter(), patient=False)
            self._start(threads.for_request(self.engine, message.request), message, prepare)
        elif isinstance(message, Tokenize):
            self._start(threads.for_text(message.text), message, partial(self._tokenize, message))
        elif isinstance(message, SlotAction):
            self._start(threads.for_files(), message, lambda _: self._prepare_slot(message))
        elif isinstance(message, Update):
            self._preparing.add(message.id)
            post(lambda engine: self._answer_with(message.id, lambda: _update(engine, message)))
        elif isinstance(message, Cancel):
            if message.id in self._preparing:
                self._cancelled.add(message.id)
            post(lambda engine: self._cancel(engine, message.id))
        elif isinstance(message, GetStats):
            post(lambda engine: self._send(Stats(engine.stats())))
        elif isinstance(message, GetLive):
            post(lambda engine: self._send(Live(engine.live())))
        elif isinstance(message, LimitThreads):
            post(lambda engine: engine.limit_threads(message.n))
        elif isinstance(message, Stop):
            self._step_loop.stop()

    # --- on an input thread -----------------------------------------------------------------------------------------

    def _start(self, threads: ThreadPoolExecutor, message: Submit | Question, prepare: Prepare) -> None:
        self._preparing.add(message.id)
        threads.submit(self._prepare, message, prepare)

    def _prepare(self, message: Submit | Question, prepare: Prepare) -> None:
        """Records the request in the shared status meanwhile: some texts and grammars crash the process."""
        recorded = self._status.while_preparing(int(message.id)) if self._status else nullcontext(lambda: None)
        with recorded as progressed:

            def cancelled() -> bool:
                progressed()
                return message.id in self._cancelled

            def work() -> Command | None:
                if cancelled():
                    raise RequestCancelled("cancelled before it was prepared")
                return prepare(cancelled)

            self._post(message, work)

    def _post(self, message: Submit | Question, work: Callable[[], Command | None]) -> None:
        """Calls `work`, and runs the command that it returns between two steps. An error is the answer."""
        try:
            command = work()
        except EngineClosed:
            log.debug("request %s was being prepared when the engine closed", message.id)
            return
        except Exception as error:
            command = self._answer_now(message.id, _failure(message, error))
        if command:
            self._step_loop.post(command)

    def _prepare_request(
        self, message: Submit | Check, arrived_at: float, cancelled: IsCancelled, *, patient: bool
    ) -> Command | None:
        resume = message.resume if isinstance(message, Submit) else None
        try:
            sequence = self.engine.make_sequence(
                message.request, resume, cancelled=cancelled, arrived_at=arrived_at, patient=patient
            )
        except SlowGrammar:
            prepare = partial(self._prepare_request, message, arrived_at, patient=True)
            self._start(self._input_threads.for_slow_grammars(), message, prepare)
            return None
        if isinstance(message, Check):
            return self._answer_now(message.id, Checked(message.id))
        if message.request.report_acceptance:
            self._send(Events([GenerationEvent(request_id=message.id)]))
        return partial(self._add, sequence)

    def _tokenize(self, message: Tokenize, cancelled: IsCancelled) -> Command:
        tokens = self.engine.inputs.tokens(
            message.text,
            add_special=message.add_special,
            parse_special=message.parse_special,
            cancelled=cancelled,
        )
        pieces = list({token.id: token for token in tokens}.values())
        return self._answer_now(message.id, Tokenized(message.id, [token.id for token in tokens], pieces))

    def _answer_now(self, request_id: str, message: FromWorker) -> Command:
        """Sends the answer without waiting for the end of the step. Returns the command that forgets the request."""
        self._send(message)
        return lambda engine: self._forget(request_id)

    def _prepare_slot(self, message: SlotAction) -> Command:
        """Files are read and written here, and cells between two steps."""
        slots, path = self.engine.slots, Path(message.path)
        if message.action == "save":
            return lambda engine: self._take_slot(message)
        if message.action == "erase":
            change = partial(slots.erase, message.slot)
        else:
            change = partial(slots.put, message.slot, slots.read(path))
        return lambda engine: self._answer_with(message.id, lambda: SlotDone(message.id, change()))

    # --- between two steps ------------------------------------------------------------------------------------------

    def _take_slot(self, message: SlotAction) -> None:
        try:
            prefix = self.engine.slots.take(message.slot)
        except InvalidRequest as error:
            self._answer(message.id, refusal(message.id, error))
            return

        def write() -> Command:
            return self._answer_now(
                message.id, SlotDone(message.id, self.engine.slots.write(Path(message.path), prefix))
            )

        self._input_threads.for_files().submit(self._post, message, write)

    def _answer_with(self, request_id: str, change: Callable[[], Answer]) -> None:
        """Makes a change, and sends its answer or that it is refused."""
        try:
            answer: Answer | Refused = change()
        except InvalidRequest as error:
            answer = refusal(request_id, error)
        self._answer(request_id, answer)

    def _add(self, sequence: Seq, engine: EngineCore) -> None:
        self._preparing.discard(sequence.id)
        if sequence.id in self._cancelled:
            self._answer(sequence.id, _cancelled_event(sequence.id))
        else:
            engine.add(sequence, limited=False)

    def _cancel(self, engine: EngineCore, request_id: str) -> None:
        engine.cancel(request_id)
        if request_id not in self._preparing:  # the request is already in the engine, or has ended
            self._cancelled.discard(request_id)

    def _answer(self, request_id: str, message: FromWorker) -> None:
        self._forget(request_id)
        self._send(message)

    def _forget(self, request_id: str) -> None:
        self._preparing.discard(request_id)
        self._cancelled.discard(request_id)


def _update(engine: EngineCore, message: Update) -> Updated:
    return Updated(message.id, engine.update(message.request_id, message.tokens))


def _cancelled_event(request_id: str) -> Events:
    """The last event of a request cancelled before it was added to the engine."""
    return Events([GenerationEvent(request_id=request_id, finish_reason=FinishReason.CANCELLED)])


def _failure(message: Submit | Question, error: Exception) -> FromWorker:
    """The answer to a request or question that could not be prepared."""
    if isinstance(error, InvalidRequest):
        return refusal(message.id, error)
    if isinstance(error, RequestCancelled):
        return _cancelled_event(message.id)
    log.error("failed to prepare a request", exc_info=error)  # a bug; it changes nothing that other requests use
    why = f"it could not be prepared: {type(error).__name__}: {error}"
    if isinstance(message, Submit):
        return Events([GenerationEvent(request_id=message.id, finish_reason=FinishReason.ERROR, error=why)])
    return refusal(message.id, InvalidRequest("request", why))
