"""The thread that an engine lives on."""

from __future__ import annotations

import queue
from collections.abc import Callable

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.request import GenerationEvent

_IDLE_S = 1.0  # how often it shows that it is alive when there is nothing to do

Command = Callable[[BatchInferenceEngine], object]


class StepLoop:
    """Steps an engine on the thread that calls `run`. Others give it commands, which it does between two steps.

    `tell` gets the events of each step; `beat` is called before each, and every second when there is nothing to do.
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
        """Steps until `stop`, then does the commands that still wait for an answer."""
        while not self.stopping:
            self._beat()
            if not engine.has_work:
                self.wait(engine)
            self._do_all(engine)
            if engine.has_work and (events := engine.step()):
                self._tell(events)
        self._do_all(engine)

    def wait(self, engine: BatchInferenceEngine) -> None:
        """Does one command, if one comes soon."""
        try:
            command = self._commands.get(timeout=_IDLE_S)
        except queue.Empty:
            return
        command(engine)

    def _do_all(self, engine: BatchInferenceEngine) -> None:
        while not self._commands.empty():
            self._commands.get()(engine)
