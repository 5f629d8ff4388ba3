"""The thread that an engine lives on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.request import GenerationEvent
from cppbatch.engine.sequence import StepOutput

_IDLE_S = 1.0  # how often it shows that it is alive when there is nothing to do
_MOST_BEHIND = 4  # steps

Command = Callable[[BatchInferenceEngine], object]


class StepLoop:
    """Steps an engine on the thread that calls `run`. Others give it commands, which it does between two steps.

    `tell` gets the events of each step, on a thread of its own: texts are made and sent while the next step computes.
    `beat` is called before each step, and every second when there is nothing to do.
    """

    def __init__(
        self, tell: Callable[[list[GenerationEvent]], None], beat: Callable[[], object] = lambda: None
    ) -> None:
        self._tell = tell
        self._beat = beat
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.stopping = False

    def do(self, command: Command) -> None:
        """Has this done between two steps. Any thread may call it."""
        self._commands.put(command)

    def stop(self) -> None:
        """Lets `run` return after the step it is in."""
        self.stopping = True
        self.do(lambda engine: None)  # wakes it

    def run(self, engine: BatchInferenceEngine) -> None:
        """Steps until `stop`, then does the commands that still wait for an answer. All is told when this returns."""
        with Talker(engine, self._tell, self._fail) as talker:
            while not self.stopping:
                self._beat()
                if not engine.has_work:
                    self.wait(engine)
                self._do_all(engine)
                if engine.has_work:
                    engine.compute()
                    talker.tell(engine.outputs.take_outputs())
            self._do_all(engine)
            talker.tell(engine.outputs.take_outputs())
        self._do_all(engine)  # perhaps the last of it could not be told

    def wait(self, engine: BatchInferenceEngine) -> None:
        """Does one command, if one comes soon."""
        try:
            command = self._commands.get(timeout=_IDLE_S)
        except queue.Empty:
            return
        command(engine)

    def _fail(self, error: BaseException) -> None:
        """What went wrong in the talker goes wrong in `run`."""

        def fail(engine: BatchInferenceEngine) -> None:
            raise error

        self.do(fail)

    def _do_all(self, engine: BatchInferenceEngine) -> None:
        while not self._commands.empty():
            self._commands.get()(engine)


class Talker:
    """A thread that makes events of news and sends them, one step's after the other. A context manager."""

    def __init__(
        self,
        engine: BatchInferenceEngine,
        send: Callable[[list[GenerationEvent]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._send, self._fail = engine, send, fail
        self._steps: queue.Queue[list[StepOutput] | None] = queue.Queue(_MOST_BEHIND)
        self._thread = threading.Thread(target=self._run, name="cppbatch-talker", daemon=True)

    def tell(self, news: list[StepOutput]) -> None:
        """Has these told; waits when it is some steps behind."""
        if news:
            self._steps.put(news)

    def _run(self) -> None:
        failed = False
        while news := self._steps.get():
            try:
                if not failed:
                    self._tell(news)
            except BaseException as error:
                failed = True  # it goes on taking, so that nobody waits for it
                self._fail(error)

    def _tell(self, news: list[StepOutput]) -> None:
        began = perf_counter()
        events = [self._engine.outputs.event(each) for each in news]
        made = perf_counter()
        self._send(events)
        self._engine.metrics.count_output(began, made, perf_counter())

    def __enter__(self) -> Talker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._steps.put(None)
        self._thread.join()
