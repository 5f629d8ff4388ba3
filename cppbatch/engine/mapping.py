"""Prompts taken as they are needed, results given as they are there: `BatchInferenceEngine.map`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from cppbatch.engine.collect import completion_of
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Completion, FinishReason, GenerationEvent, Mapped, Prompt, RequestUsage
from cppbatch.errors import InvalidRequest

if TYPE_CHECKING:
    from cppbatch.engine.calls import Calls
    from cppbatch.engine.output_processor import OutputProcessor

_AHEAD = 2  # times as many as run at once are in the engine: whoever ends has somebody to follow
_HELD_BACK = 8  # times as many as run at once may be taken and not given, where results keep the prompts' order
_END = object()


class _Taken:
    """A prompt that runs, and its events so far."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self.prompt = index, prompt
        self.events: list[GenerationEvent] = []


class Mapper:
    """What was taken from an iterable and has not been given back as a result: bounded, however long that is."""

    def __init__(
        self,
        engine: Calls,
        outputs: OutputProcessor,
        start: Callable[[Prompt, SamplingParams | None], str],
        prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]],
        *,
        ordered: bool,
    ) -> None:
        """`start` queues a prompt, with params of its own or those of all, and gives the request's id."""
        self._engine, self._outputs, self._start = engine, outputs, start
        self._prompts = iter(prompts)
        self._ordered = ordered
        self._most_running = _AHEAD * engine.config.n_parallel
        self._most_taken = _HELD_BACK * engine.config.n_parallel
        self._is_exhausted = False
        self._n_taken = self._n_given = 0
        self._running: dict[str, _Taken] = {}  # by the request's id
        self._ended: dict[int, Mapped] = {}  # by index

    def results(self) -> Generator[Mapped, None, None]:
        """Takes, steps and gives; cancels what is left when it is closed, or anything goes wrong."""
        try:
            while True:
                self._gather()
                if not self._is_ready:
                    self._take()
                if self._is_ready:
                    yield self._give()
                elif self._running:
                    self._engine.compute()
                else:
                    return
        finally:
            for request_id in self._running:
                self._engine.cancel(request_id)
            self._outputs.drop(self._running)

    @property
    def _next(self) -> int | None:
        """Which result is to be given next, of those that are there."""
        return self._n_given if self._ordered else next(iter(self._ended), None)

    @property
    def _is_ready(self) -> bool:
        return self._next in self._ended

    def _give(self) -> Mapped:
        assert self._next is not None
        result = self._ended.pop(self._next)
        self._n_given += 1
        return result

    def _take(self) -> None:
        """Starts prompts, until there are enough of them, or one that cannot run is a result."""
        while not (self._is_exhausted or self._is_full or self._is_ready):
            item = next(self._prompts, _END)
            if item is _END:
                self._is_exhausted = True
                return
            index, self._n_taken = self._n_taken, self._n_taken + 1
            self._try(index, item)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._most_running or self._n_taken - self._n_given >= self._most_taken

    def _try(self, index: int, item: Any) -> None:
        prompt, params = item, None
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams):
            prompt, params = item
        try:
            request_id = self._start(prompt, params)
        except InvalidRequest as error:
            self._ended[index] = Mapped(index, prompt, _refused(error))
            return
        self._running[request_id] = _Taken(index, prompt)
        self._outputs.reserve(request_id)

    def _gather(self) -> None:
        """Reads the events that have come, also in steps of others."""
        outputs = self._outputs
        outputs.keep()
        for request_id in [request_id for request_id in self._running if outputs.has_kept(request_id)]:
            taken = self._running[request_id]
            taken.events += outputs.take_request(request_id)
            if taken.events[-1].finish_reason:
                del self._running[request_id]
                self._ended[taken.index] = Mapped(taken.index, taken.prompt, completion_of(taken.events))


def _refused(error: InvalidRequest) -> Completion:
    usage = RequestUsage(
        prompt_tokens=0, completion_tokens=0, queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0
    )
    return Completion(text="", tokens=[], finish_reason=FinishReason.ERROR, usage=usage, seed=0, error=str(error))
