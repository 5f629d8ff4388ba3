"""The threads around an engine: one steps it, one converts step outputs to events, some prepare requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter

from cppbatch.engine.core import EngineCore
from cppbatch.engine.request import GenerationEvent, GenerationRequest, MediaPrompt, is_long
from cppbatch.engine.sequence import StepOutput

_IDLE_S = 1.0  # between two heartbeats of an idle engine

Command = Callable[[EngineCore], object]


class StepLoop:
    """Steps an engine on the thread that calls `run`. Other threads post commands, which run between two steps.

    `on_events` gets the events of each step, on the output thread: text is created and sent while the next step
    computes. `heartbeat` is called before each step, and every second while the engine is idle. The engine is created
    with `prepares_beside_steps`, and with `output_thread.put` as its `on_admitted`.
    """

    def __init__(
        self, on_events: Callable[[list[GenerationEvent]], None], heartbeat: Callable[[], object] = lambda: None
    ) -> None:
        self.output_thread = OutputThread(on_events, self._raise_in_run)
        self._heartbeat = heartbeat
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.stopping = False

    def post(self, command: Command) -> None:
        """Runs a command between two steps. Any thread may call this."""
        self._commands.put(command)

    def stop(self) -> None:
        """Makes `run` return after the current step."""
        self.stopping = True
        self.post(lambda engine: None)  # wakes the loop

    def run(self, engine: EngineCore) -> None:
        """Steps until `stop`, then runs the remaining commands. When it returns, all events have been sent.

        Raises the errors of steps, commands and `on_events`.
        """
        with self.output_thread.run_for(engine):
            while not self.stopping:
                self._heartbeat()
                if not engine.has_work:
                    self.wait_for_command(engine, engine.idle())
                elif seconds := engine.collecting_s():
                    self.wait_for_command(engine, seconds)
                self._run_commands(engine)
                if engine.has_work:
                    if not engine.collecting_s():
                        engine.step()
                    self.output_thread.put(engine.outputs.take_outputs())
            self._run_commands(engine)
            self.output_thread.put(engine.outputs.take_outputs())
        self._run_commands(engine)  # raises the final error of the output thread

    def wait_for_command(self, engine: EngineCore, seconds: float = _IDLE_S) -> None:
        """Waits up to this long for a command and runs it."""
        try:
            command = self._commands.get(timeout=min(seconds, _IDLE_S))
        except queue.Empty:
            return
        command(engine)

    def _raise_in_run(self, error: BaseException) -> None:
        def fail(engine: EngineCore) -> None:
            raise error

        self.post(fail)

    def _run_commands(self, engine: EngineCore) -> None:
        while not self._commands.empty():
            self._commands.get()(engine)


class OutputThread:
    """A thread that converts the outputs of steps to events and sends them, in order.

    `on_error` gets an exception of this thread; later outputs are dropped.
    """

    def __init__(
        self, on_events: Callable[[list[GenerationEvent]], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._on_events, self._on_error = on_events, on_error
        # at most 4 steps with unsent events: then the next step waits
        self._steps: queue.Queue[list[StepOutput] | None] = queue.Queue(4)

    def put(self, outputs: list[StepOutput]) -> None:
        """Queues the outputs of a step; waits while this thread is 4 steps behind."""
        if outputs:
            self._steps.put(outputs)

    @contextmanager
    def run_for(self, engine: EngineCore) -> Iterator[None]:
        """Runs the thread for this engine. On exit, all events have been sent."""
        thread = threading.Thread(target=self._run, args=(engine,), name="cppbatch-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._steps.put(None)
            thread.join()

    def _run(self, engine: EngineCore) -> None:
        failed = False
        while outputs := self._steps.get():
            try:
                if not failed:
                    self._send(engine, outputs)
            except BaseException as error:
                failed = True  # the queue is still emptied, so that `put` never waits forever
                self._on_error(error)

    def _send(self, engine: EngineCore, outputs: list[StepOutput]) -> None:
        began = perf_counter()
        events = [engine.outputs.event(output) for output in outputs]
        made = perf_counter()
        self._on_events(events)
        engine.metrics.count_output(began, made, perf_counter())


class InputThreads:
    """Threads that prepare requests: tokenise the prompt, compile the grammar.

    Slow ones have separate threads, so that short texts do not wait for them: 2 threads for short texts, 1 for long
    texts, 2 for grammars, 1 for grammars that take more than a second, 2 for images and audio (one decodes a file while
    the other encodes), and 1 for slot files.
    """

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-input")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-long-input")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-grammars")
        self._slow_grammars = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-slow-grammars")
        self._media = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-media")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-files")

    def for_files(self) -> ThreadPoolExecutor:
        """The thread that reads and writes slot files."""
        return self._files

    def for_slow_grammars(self) -> ThreadPoolExecutor:
        """The thread that prepares the requests for which `SlowGrammar` was raised."""
        return self._slow_grammars

    def for_request(self, engine: EngineCore, request: GenerationRequest) -> ThreadPoolExecutor:
        """The threads that prepare this request."""
        if engine.inputs.is_quick(request):
            return self._quick
        if isinstance(request.prompt, MediaPrompt):
            return self._media
        return self._long_texts if is_long(request.prompt) else self._grammars

    def for_text(self, text: str | list[int] | MediaPrompt) -> ThreadPoolExecutor:
        """The threads that tokenise this text."""
        return self._long_texts if is_long(text) else self._quick

    def close(self) -> None:
        """Waits for the requests being prepared and drops the queued ones."""
        pools = self._quick, self._long_texts, self._grammars, self._slow_grammars, self._media, self._files
        for threads in pools:
            threads.shutdown(cancel_futures=True)
