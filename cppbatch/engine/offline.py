"""Offline inference, and its progress line."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import closing
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.engine.chat_results import chat_completion
from cppbatch.engine.chats import (
    ChatOptions,
    ChatRequests,
    Conversation,
    PromptOrMessages,
    is_conversation,
)
from cppbatch.engine.embeddings import Vector, check_dimensions, normalise_vectors, vector_of
from cppbatch.engine.params import Params, SamplingParams, sampling_params
from cppbatch.engine.request import (
    Completion,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Mapped,
    Prompt,
    RequestOptions,
    RequestUsage,
    Task,
    completion,
    expand,
    likeliest,
    n_candidates,
)
from cppbatch.engine.request_engine import RequestEngine
from cppbatch.engine.sequence import Seq
from cppbatch.errors import GenerationFailed, InvalidRequest, client_names

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Offline inference: `generate`, `stream`, `map`, `embed` and others of `BatchInferenceEngine`.
#
# Each of these methods queues sequences, steps until they have ended, and collects their events. Other requests of the
# engine, including those of other threads, advance in the same steps; their events are kept for their own callers.


_END = object()

Value = TypeVar("Value")
Logits = npt.NDArray[np.float32]
OnEvent = Callable[[int, GenerationEvent], object]


class _EmbedOptions(RequestOptions):
    task: Task


def generate(
    engine: RequestEngine,
    prompts: Sequence[PromptOrMessages],
    params: Params | Sequence[SamplingParams] = None,
    *,
    n: int = 1,
    best_of: int | None = None,
    progress: bool | None = None,
    on_event: OnEvent | None = None,
    **options: Unpack[RequestOptions],
) -> list[Completion]:
    """Continues all prompts, batched together. Returns the completions in the order of the prompts.

    `prompts`: texts, token ids, or lists of messages, whose completions are `ChatCompletion`s, as from `chat`.
    `params`: one for all prompts, or a list with one per prompt. `n`: completions per prompt, consecutive in the
    result; `best_of`: generate this many per prompt, and return the `n` with the highest mean log-probability.
    `progress`: show the speed on stderr; None: if it is a terminal, for several prompts without `on_event`. `on_event`:
    called with the index of a completion and each of its events when created (completion i belongs to prompt i, unless
    `n` or `best_of` is given). `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...) for all
    prompts.

    Raises `InvalidRequest` naming the invalid prompt, before any of them runs. Ctrl-C cancels all of them.
    """
    of = n_candidates(n, best_of)
    wanted = expand(params_for_each("prompts", prompts, params), of, ranked=of > n)
    every = [prompt for prompt in prompts for _ in range(of)]
    prepared = _prepare_all(engine, every, wanted, options, field="prompts", of=of)
    results = complete(engine, prepared, "generating", progress=progress, on_event=on_event)
    return likeliest(results, n, of) if of > n else results


def generate_grid(
    engine: RequestEngine,
    prompts: Sequence[PromptOrMessages],
    settings: Sequence[SamplingParams],
    *,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> list[list[Completion]]:
    """Continues every prompt with each of the settings, batched together: `result[prompt][setting]`.

    A prompt of at least 25 tokens is computed once for all its settings. `progress`, `options` and exceptions: as in
    `generate`.
    """
    every = [prompt for prompt in _several("prompts", prompts) for _ in settings]
    params = [*settings] * len(prompts)
    prepared = _prepare_all(engine, every, params, options, field="prompts", of=len(settings))
    results = iter(complete(engine, prepared, "generating", progress=progress))
    return [list(islice(results, len(settings))) for _ in prompts]


def forward_batch(
    engine: RequestEngine, token_lists: Sequence[Sequence[int]], **options: Unpack[RequestOptions]
) -> Logits:
    """The logits of the next token after each list of token ids: float32[len(token_lists), n_vocab].

    The lists may have different lengths. On an idle engine, up to n_parallel lists with n_ubatch tokens in total are
    computed in one pass, and more in several. The logits are the model's own, before biases, penalties and filters.
    `options`: those of `generate`, but every token is computed, unless `cache_prompt=True` is given.

    Raises `InvalidRequest` naming the invalid list before any of them runs: an empty list, unknown token ids, or enough
    tokens to fill the context; `GenerationFailed`.
    """
    if not _is_list(token_lists) or not all(map(_is_list, token_lists)):
        wanted = "give lists of token ids, like [engine.tokens(text)]"
        raise InvalidRequest("token_lists", f"is {token_lists!r:.80}; {wanted}")
    logits = np.empty((len(token_lists), engine.info.n_vocab), np.float32)

    def keep(i: int, _tokens: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> None:
        logits[i] = row

    prompts = [list(tokens) for tokens in token_lists]
    params = [
        SamplingParams(max_tokens=1, temperature=0, logits_processor=partial(keep, i)) for i in range(len(prompts))
    ]
    prepared = _prepare_all(engine, prompts, params, {"cache_prompt": False, **options}, field="token_lists")
    with closing(run(engine, [each.sequence for each in prepared])) as events:
        for event in events:
            if event.error:
                raise GenerationFailed(f"the logits were not computed: {event.error}")
    return logits


def _is_list(value: object) -> bool:
    return isinstance(value, Sized) and not isinstance(value, str)


def stream(
    engine: RequestEngine, prompt: PromptOrMessages, params: Params = None, **options: Unpack[RequestOptions]
) -> Generator[GenerationEvent, None, None]:
    """Continues one prompt and yields its events as they are created. Other requests advance in the same steps.

    `prompt`: a text, token ids, or messages; `chat_stream` also separates reasoning and tool calls from the answer.
    `options`: fields of `GenerationRequest`. Closing the iterator cancels the request. Raises `InvalidRequest`, and at
    the first event `QueueFull`.
    """
    return run(engine, [_prepare(engine, prompt, params, options).sequence], limited=True)


def embed(
    engine: RequestEngine,
    texts: Sequence[Prompt],
    *,
    normalise: bool = True,
    dimensions: int | None = None,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> Vector:
    """The vectors of all texts in order, float32[n, dimensions]; with a reranker, the scores of each `Pair`.

    `normalise`: scale vectors to length 1 (not scores). `dimensions`: keep the first numbers of each vector; see
    `cppbatch.engine.embeddings.normalise_vectors`. `progress`, `options`: those of `generate`.

    Raises `InvalidRequest` naming the invalid text, before any of them runs; `GenerationFailed` if a text gets no
    vector.
    """
    info = engine.info
    check_dimensions(dimensions, info.n_embd)
    if info.pooling == "none":
        message = "is none, so a text has no single vector. Use `add_request` to get the vectors of its tokens"
        raise InvalidRequest("pooling", message)
    params = params_for_each("texts", texts, None)
    embed_options: _EmbedOptions = {**options, "task": "embed"}
    sequences = [each.sequence for each in _prepare_all(engine, texts, params, embed_options, field="texts")]
    events = _gather(engine, sequences, "embedding", progress=progress)
    vectors = np.empty((len(sequences), info.n_embd), np.float32)
    for i, sequence in enumerate(sequences):
        last = events[sequence.id][-1]
        if last.embedding is None:
            assert last.finish_reason is not None
            raise GenerationFailed(f"texts[{i}] has no vector: {last.error or last.finish_reason.value}")
        vectors[i] = vector_of(last.embedding)
    is_score = info.pooling == "rank"
    return normalise_vectors(vectors, dimensions) if normalise and not is_score else vectors[:, :dimensions]


def map_prompts(
    engine: RequestEngine,
    prompts: Iterable[PromptOrMessages | tuple[PromptOrMessages, SamplingParams]],
    params: Params = None,
    *,
    ordered: bool = False,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> Generator[Mapped, None, None]:
    """Continues prompts of an iterable, which may be endless, and yields each result as soon as it is complete.

    `prompts`: texts, token ids or media prompts, or pairs of a prompt and its own `SamplingParams`. They are consumed
    only as fast as the engine computes: at most 2 * n_parallel of them are in the engine. `ordered`: results in prompt
    order; at most 8 * n_parallel prompts are then pending, so one slow prompt can hold up the others. `progress`: as in
    `generate`, with the remaining time if `prompts` has a length. `options`: fields of `GenerationRequest` (priority,
    timeout, cache_salt ...) for all prompts.

    This is a generator: the engine steps while waiting for the next result, and may be used between results. Other
    requests advance in the same steps; their events are kept for their own callers. Closing the generator, or an
    exception from the iterable, cancels the running prompts.

    A prompt that cannot run becomes a result with an error, and the others continue. Raises `InvalidRequest`
    immediately for options that are invalid for every prompt; `EngineClosed`.
    """
    if isinstance(prompts, str):
        raise InvalidRequest("prompts", "is a single string; give an iterable of strings, such as [prompt]")
    if is_conversation(prompts):
        raise InvalidRequest(
            "prompts", "is a single conversation; give an iterable of conversations, such as [messages]"
        )
    if not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", f"is {prompts!r:.80}; give an iterable of strings")
    if engine.info.pooling or "task" in options:
        raise InvalidRequest("task", "`map` requires a model that generates text; for vectors, use `embed`")
    if isinstance(params, Sequence):
        raise InvalidRequest("params", f"is {params!r:.200}; give one SamplingParams, or pairs with the prompts")
    params = sampling_params(params)
    GenerationRequest(id="", prompt="", **options)  # raises for options that are invalid for every prompt
    line = ProgressLine("generating", len(prompts) if isinstance(prompts, Sized) else None, shown=progress)
    return _Mapper(engine, prompts, params, ordered=ordered, line=line, options=options).results()


def params_for_each(
    field: str, prompts: Sequence[object], params: Params | Sequence[SamplingParams]
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt. Raises `InvalidRequest` if the counts differ."""
    _several(field, prompts)
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [sampling_params(params)] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest(
            "params", f"has {len(params)} entries for {len(prompts)} {field}; give one entry, or one for each"
        )
    return [sampling_params(each) for each in params]


def _several(field: str, prompts: Sequence[Value]) -> Sequence[Value]:
    if isinstance(prompts, str):
        raise InvalidRequest(field, "is a single string; give a list of strings, such as [prompt]")
    if is_conversation(prompts):
        raise InvalidRequest(field, "is a single conversation; give a list of conversations, such as [messages]")
    if not isinstance(prompts, Sized):
        raise InvalidRequest(field, f"is {prompts!r:.80}; give a list of strings")
    return prompts


class Prepared(NamedTuple):
    """A prompt that is ready to run."""

    sequence: Seq
    chat: PreparedChat | None = None
    """Set for a conversation."""

    def result(self, events: Sequence[GenerationEvent]) -> Completion:
        """All events as one result; for a conversation, a `ChatCompletion`."""
        return chat_completion(events, self.chat) if self.chat else completion(events)


def _prepare(engine: RequestEngine, prompt: PromptOrMessages, params: Params, options: RequestOptions) -> Prepared:
    request_id = engine.new_request_id()
    if is_conversation(prompt):
        chats = ChatRequests(engine.chat_format(), cast(ChatOptions, options))
        return prepare_chat(engine, *chats.request(request_id, cast(Conversation, prompt), params))
    plain = cast(Prompt, prompt)
    request = GenerationRequest(id=request_id, prompt=plain, params=sampling_params(params), **options)
    return Prepared(engine.prepare(request))


def prepare_chat(engine: RequestEngine, request: GenerationRequest, chat: PreparedChat) -> Prepared:
    """A conversation's request as a sequence. Raises `InvalidRequest`."""
    with client_names(chat.field_names):
        return Prepared(engine.prepare(request), chat)


def _prepare_all(
    engine: RequestEngine,
    prompts: Sequence[PromptOrMessages],
    params: list[SamplingParams],
    options: RequestOptions,
    *,
    field: str,
    of: int = 1,
) -> list[Prepared]:
    """Prepares all prompts, or raises `InvalidRequest` for the first refused one.

    `field`, `of`: an `InvalidRequest` names the prompt `field[i // of]`, since each prompt occurs `of` times.
    """
    prepared = []
    for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        try:
            prepared.append(_prepare(engine, prompt, its, options))
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}[{i // of}]", str(error), error.overflow) from error
    return prepared


def complete(
    engine: RequestEngine,
    prepared: Sequence[Prepared],
    verb: str,
    *,
    progress: bool | None,
    on_event: OnEvent | None = None,
) -> list[Completion]:
    """Runs the prompts together, and returns their results in order."""
    sequences = [each.sequence for each in prepared]
    events = _gather(engine, sequences, verb, progress=progress, on_event=on_event)
    return [each.result(events[each.sequence.id]) for each in prepared]


def run(
    engine: RequestEngine, sequences: Sequence[Seq], *, limited: bool = False
) -> Generator[GenerationEvent, None, None]:
    """Queues sequences when iteration starts, and yields their events until they have ended."""
    requests = _Requests(engine)
    try:
        requests.add(sequences, limited=limited)
        while requests.running:
            yield requests.next_event()
    finally:
        requests.close()


class _Requests:
    """The requests of one call. Receives their events, whichever thread steps the engine."""

    def __init__(self, engine: RequestEngine) -> None:
        self._core, self._access = engine.core, engine.access
        self._inbox: deque[GenerationEvent] = deque()
        self.running: set[str] = set()
        """Ids of the requests whose last event has not been returned yet."""

    def add(self, sequences: Sequence[Seq], *, limited: bool = False) -> None:
        """Queues sequences between two steps. `limited`: raise `QueueFull` if the queue is full; for a single one.

        Raises `RuntimeError` if called within a step.
        """
        self._access.check_outside()

        def add() -> None:
            for sequence in sequences:
                self._core.add(sequence, limited=limited)
                self._core.outputs.reserve(sequence.id, self._inbox)
                self.running.add(sequence.id)

        self._access.run(add)

    def next_event(self) -> GenerationEvent:
        """The next event of any of the requests. Steps the engine, or waits while another thread does."""
        self._access.until(lambda: bool(self._inbox), self._step)
        event = self._inbox.popleft()
        if event.finish_reason:
            self.running.discard(event.request_id)
        return event

    @property
    def has_events(self) -> bool:
        """Whether `next_event` returns immediately."""
        return bool(self._inbox)

    def close(self) -> None:
        """Cancels the unfinished requests."""
        if self.running:
            self._access.soon(self._cancel)

    def _step(self) -> None:
        self._core.step()
        self._core.outputs.keep()

    def _cancel(self) -> None:
        for request_id in self.running:
            self._core.cancel(request_id)
        self._core.outputs.drop(self.running)
        self.running = set()


def _gather(
    engine: RequestEngine,
    sequences: Sequence[Seq],
    verb: str,
    *,
    progress: bool | None,
    on_event: OnEvent | None = None,
) -> dict[str, list[GenerationEvent]]:
    """Runs these sequences. Returns their events by request id. `progress`: the
    progress line; `on_event`: called with each event."""
    gathered: dict[str, list[GenerationEvent]] = {sequence.id: [] for sequence in sequences}
    indices = {sequence.id: i for i, sequence in enumerate(sequences)}
    shown = False if progress is None and on_event else progress  # the caller shows them
    line = ProgressLine(verb, len(sequences), shown=shown)
    with line, closing(run(engine, sequences)) as events:  # an exception in `on_event` cancels the rest
        for event in events:
            gathered[event.request_id].append(event)
            if on_event:
                on_event(indices[event.request_id], event)
            line.add(event)
    return gathered


class _Started:
    """A prompt of `map` in the engine, with its events so far."""

    def __init__(self, index: int, prompt: PromptOrMessages, prepared: Prepared) -> None:
        self.index, self.prompt, self.prepared = index, prompt, prepared
        self.events: list[GenerationEvent] = []


class _Mapper:
    """The state of a `map` call: prompts taken from the iterable whose results have not been returned.

    Their number is bounded, however long the iterable is. The caller may use the engine between results.
    """

    def __init__(
        self,
        engine: RequestEngine,
        prompts: Iterable[PromptOrMessages | tuple[PromptOrMessages, SamplingParams]],
        params: Params,
        *,
        ordered: bool,
        line: ProgressLine,
        options: RequestOptions,
    ) -> None:
        self._engine = engine
        self._prompts = iter(prompts)
        self._params = params
        self._ordered = ordered
        self._line = line
        self._options = options
        self._max_running = 2 * engine.config.n_parallel  # so that a finished request has a successor in the engine
        self._max_taken = 8 * engine.config.n_parallel  # with `ordered`: prompts taken whose results are not returned
        self._is_exhausted = False
        self._n_taken = self._n_returned = 0
        self._requests = _Requests(engine)
        self._running: dict[str, _Started] = {}  # by request id
        self._ended: dict[int, Mapped] = {}  # by index

    def results(self) -> Generator[Mapped, None, None]:
        """Starts prompts, steps, and yields results. Cancels the rest when closed, and on any exception."""
        with self._line, closing(self._requests):
            while True:
                self._gather()
                if not self._is_ready:
                    self._start()
                if self._is_ready:
                    yield self._pop()
                elif self._running:
                    self._take(self._requests.next_event())
                else:
                    return

    @property
    def _next(self) -> int | None:
        """Index of the result to return next; None: no result is available."""
        return self._n_returned if self._ordered else next(iter(self._ended), None)

    @property
    def _is_ready(self) -> bool:
        return self._next in self._ended

    def _pop(self) -> Mapped:
        assert self._next is not None
        result = self._ended.pop(self._next)
        self._n_returned += 1
        return result

    def _start(self) -> None:
        """Starts prompts until enough are running, or one is refused, which is a result."""
        sequences: list[Seq] = []
        while not (self._is_exhausted or self._is_full or self._is_ready):
            item = next(self._prompts, _END)
            if item is _END:
                self._is_exhausted = True
                break
            index, self._n_taken = self._n_taken, self._n_taken + 1
            sequences += self._prepare_item(index, item)
        if sequences:
            self._requests.add(sequences)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._max_running or self._n_taken - self._n_returned >= self._max_taken

    def _prepare_item(self, index: int, item: Any) -> list[Seq]:
        """The sequence of a prompt; empty if the prompt is refused."""
        prompt, params = item, self._params
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams):
            prompt, params = item
        try:
            prepared = _prepare(self._engine, prompt, params, self._options)
        except InvalidRequest as error:
            self._ended[index] = Mapped(index, prompt, _error_completion(error))
            self._line.refused()
            return []
        self._running[prepared.sequence.id] = _Started(index, prompt, prepared)
        return [prepared.sequence]

    def _gather(self) -> None:
        """Takes the events that have arrived, including those from other callers' steps."""
        while self._requests.has_events:
            self._take(self._requests.next_event())

    def _take(self, event: GenerationEvent) -> None:
        started = self._running[event.request_id]
        started.events.append(event)
        self._line.add(event)
        if event.finish_reason:
            del self._running[event.request_id]
            self._ended[started.index] = Mapped(started.index, started.prompt, started.prepared.result(started.events))


def _error_completion(error: InvalidRequest) -> Completion:
    usage = RequestUsage(
        prompt_tokens=0, completion_tokens=0, queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0
    )
    return Completion(text="", tokens=[], finish_reason=FinishReason.ERROR, usage=usage, seed=0, error=str(error))


class ProgressLine:
    """Finished prompts, tokens, speed, and remaining time. A context manager."""

    _n_shown = 0  # a terminal has room for one

    def __init__(self, verb: str, total: int | None, *, shown: bool | None) -> None:
        """`total`: prompts; None: unknown. `shown`: None: if stderr is a terminal, unless there is a single prompt, or
        another line is shown."""
        from rich.console import Console  # imported here, so that workers start faster without it
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[speed]:.1f} tok/s"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._shown, self._total = shown, total
        self._task = self._progress.add_task(verb, total=total, start=False, tokens=0, speed=0.0)
        self._n_tokens = 0

    def __enter__(self) -> ProgressLine:
        is_shown = self._shown
        if is_shown is None:
            is_shown = self._total != 1 and not ProgressLine._n_shown and sys.stderr is not None and sys.stderr.isatty()
        self._progress.disable = not is_shown
        ProgressLine._n_shown += is_shown
        self._progress.start()
        self._progress.start_task(self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ProgressLine._n_shown -= not self._progress.disable
        self._progress.stop()

    def add(self, event: GenerationEvent) -> None:
        """Counts an event."""
        self._n_tokens += event.usage.prompt_tokens if event.embedding and event.usage else len(event.tokens)
        speed = self._n_tokens / (self._progress.tasks[0].elapsed or 1e9)
        has_ended = event.finish_reason is not None
        self._progress.update(self._task, advance=has_ended, tokens=self._n_tokens, speed=speed)

    def refused(self) -> None:
        """Counts a refused prompt."""
        self._progress.update(self._task, advance=1)
