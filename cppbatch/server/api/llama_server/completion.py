"""`POST /completion` and `POST /infill`: request fields, responses, and how they are built."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from cppbatch.cluster.engines.client import EngineClient
from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    MediaPrompt,
    TokenPiece,
    detokenize,
)
from cppbatch.errors import InvalidRequest, client_names
from cppbatch.server.answer.llama_result import LlamaResponse, LlamaResults, StreamTimings
from cppbatch.server.answer.mixed_prompts import (
    MAX_TEXTS,
    MarkedPrompt,
    MixedPrompt,
    engine_prompt,
    prompts_of,
    tokenize,
)
from cppbatch.server.answer.response import Json, ResponseBuilder, generation
from cppbatch.server.api.llama_server.fields import LlamaFields, to_sampling_fields
from cppbatch.server.http.endpoint import Routes, json_content, schema_ref
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.served import ModelLease
from cppbatch.server.models.serving import Prompt, ResolvedRequest, Serving, new_id
from cppbatch.server.run_requests import Event

routes = Routes()


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """The body of `POST /completion`."""

    prompt: str | list[Any] | Json
    """A text, token ids, a mix of both, or a list of any of these. `{"prompt_string": ...}` may replace a text; with
    `multimodal_data`, base64 images and audio replace each `media_marker` (see `GET /props`) in it."""


_ONE = [
    schema_ref(LlamaResponse),
    {"type": "object", "description": "With `response_fields`: only these fields"},
]
_SEVERAL = {"type": "array", "description": "Of several completions", "items": {"anyOf": _ONE}}
COMPLETION: Json = {
    "answer": json_content({"anyOf": [*_ONE, _SEVERAL]}),
    "types": (LlamaResponse,),
    "streams": True,
}
"""The response of `/completion`, for `Routes.post`."""


async def _limit_time(
    client: EngineClient, requests: list[GenerationRequest], running: AsyncGenerator[Event, None], seconds: float
) -> AsyncGenerator[Event, None]:
    """The events, with each completion ended at the first newline more than `seconds` after its first token."""
    first_token_at: dict[int, float] = {}
    out_of_time: set[int] = set()  # requests cancelled here
    async with contextlib.aclosing(running) as events:
        async for index, event in events:
            if index in out_of_time and event.finish_reason is FinishReason.CANCELLED:
                yield index, msgspec.structs.replace(event, finish_reason=FinishReason.TIMEOUT)
                continue
            yield index, event
            now = perf_counter()
            is_late = bool(event.tokens) and now - first_token_at.setdefault(index, now) > seconds
            if is_late and "\n" in event.text and not event.finish_reason and index not in out_of_time:
                out_of_time.add(index)
                await client.cancel(requests[index].id)


@generation(routes, "/completion", LlamaCompletionRequest, also=("/completions",), **COMPLETION)
async def prepare_completion(body: LlamaCompletionRequest, serving: Serving) -> LlamaCompletionBuilder:
    """Complete one or more prompts.

    Raises `InvalidRequest`.
    """
    prompts, most = prompts_of(body.prompt), serving.limits.max_prompts_per_batch
    if len(prompts) > most:
        raise InvalidRequest(
            "prompt", f"has {len(prompts)} prompts; the limit of this server is {most} (--max-prompts-per-batch)"
        )
    fields = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
    read = [await _llama_prompt(serving, prompt, field) for prompt, field in zip(prompts, fields, strict=True)]
    return await prepare_llama_completion(body, serving, read)


class LlamaPrompt(NamedTuple):
    """A prompt with its tokens."""

    tokens: list[TokenPiece]
    with_media: MediaPrompt | None = None
    """The prompt, if it has images or audio, whose tokens have no text."""

    def for_engine(self) -> Prompt:
        """In the form that the engine takes."""
        return self.with_media or [token.id for token in self.tokens]


async def _llama_prompt(serving: Serving, prompt: MixedPrompt, field: str) -> LlamaPrompt:
    if not isinstance(prompt, MarkedPrompt):
        return LlamaPrompt(await tokenize(serving, prompt, field))
    loaded = await engine_prompt(serving, prompt, field)
    assert isinstance(loaded, MediaPrompt)
    return LlamaPrompt(await serving.client.tokenize(loaded), loaded)


async def prepare_llama_completion(
    body: LlamaFields, serving: Serving, prompts: Sequence[LlamaPrompt]
) -> LlamaCompletionBuilder:
    """The engine requests and the builder for these prompts. Raises `InvalidRequest`."""
    serving.check_model(body.model)
    choices = {} if body.n_cmpl is None else {"n": "n_cmpl"}
    field_names = body.field_names | choices
    with client_names(field_names):
        body = await to_sampling_fields(body, serving)
    with client_names(choices):  # the check names each field for the maximum of tokens itself
        serving.limits.check(body)
    with client_names(field_names):
        for_engine = [prompt.for_engine() for prompt in prompts]
        texts = [detokenize(prompt.tokens) for prompt in prompts if serving.settings.prompts_dir]
        requests = serving.engine_requests(body, name := new_id("llama-"), for_engine, texts=texts)
    resolved = ResolvedRequest(name, requests, field_names)
    return LlamaCompletionBuilder(resolved, body, [prompt.tokens for prompt in prompts], serving)


class LlamaCompletionBuilder(ResponseBuilder):
    """Builds the responses of `/completion` and `/infill`."""

    def __init__(
        self, resolved: ResolvedRequest, body: LlamaFields, prompts: list[list[TokenPiece]], serving: Serving
    ) -> None:
        super().__init__(resolved, stream=body.stream, n_candidates=body.n_candidates)
        self._fields = body.response_fields or []
        self._prompt_only = body.n_predict == 0  # the events contain the echoed prompt, which is omitted
        self._results = LlamaResults(body, self.requests, prompts, serving, return_tokens=bool(body.return_tokens))
        self._timings = StreamTimings(body)
        self._seconds = (body.t_max_predict_ms or 0) / 1000

    def run(self, lease: ModelLease) -> AsyncGenerator[Event, None]:
        """The events of the requests, with the body's time limit."""
        events = super().run(lease)
        if self._seconds <= 0:
            return events
        return _limit_time(lease.serving.client, self.requests, events, self._seconds)

    def record(self, index: int, event: GenerationEvent) -> None:
        """Records the result without an echoed prompt."""
        super().record(index, event)
        self._results.record(index, self._omit_prompt(event))

    def build(self, completions: list[list[GenerationEvent]]) -> LlamaResponse | Json | list[LlamaResponse | Json]:
        """Returns an object for one completion, otherwise a list."""
        responses = [
            self._response(index, [*map(self._omit_prompt, events)]) for index, events in enumerate(completions)
        ]
        return responses[0] if len(responses) == 1 else responses

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns the new text without an echoed prompt, and the progress of the prompt."""
        events, event, results = [], self._omit_prompt(event), self._results
        progress, per_token = self._timings.progress(index, event), self._timings.per_token(event)
        if progress is not UNSET:
            empty = GenerationEvent(request_id=event.request_id)
            events.append(ServerSentEvent(results.chunk(index, empty, timings=per_token, prompt_progress=progress)))
        if event.text or event.tokens or event.logprobs:
            chunks = [results.chunk(index, part, timings=per_token) for part in _by_token(event)]
            events += map(ServerSentEvent, chunks)
        if event.finish_reason:
            events.append(ServerSentEvent(self._response(index, [])))
        return events

    def _omit_prompt(self, event: GenerationEvent) -> GenerationEvent:
        return msgspec.structs.replace(event, text="", tokens=[], logprobs=[]) if self._prompt_only else event

    def _response(self, index: int, events: list[GenerationEvent]) -> LlamaResponse | Json:
        """The response with the content of these events; with `response_fields`, only those fields."""
        response = self._results.response(index, self.last_events[index], events)
        return _select(self._fields, response) if self._fields else response


def _by_token(event: GenerationEvent) -> list[GenerationEvent]:
    """With log-probabilities, one event per token, as in llama-server; otherwise the event unchanged."""
    if len(event.logprobs) < 2:
        return [event]
    texts = event.token_texts if "".join(event.token_texts) == event.text else [event.text]  # parts may be held back
    return [
        GenerationEvent(
            request_id=event.request_id,
            text="".join(texts[i : i + 1]),
            tokens=event.tokens[i : i + 1],
            logprobs=[logprob],
        )
        for i, logprob in enumerate(event.logprobs)
    ]


def _select(paths: list[str], response: LlamaResponse) -> Json:
    """The fields at these paths (`a/b` is field b of field a), by path; skips missing paths."""
    selected: Json = {}
    fields = msgspec.to_builtins(response)
    for path in paths:
        value: object = fields
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            selected[path] = value
    return selected


# --- infill ----------------------------------------------------------------------------------------------------------
# `POST /infill`: completes the text between a prefix and a suffix.


_REPOSITORY = "project"  # the repository name in the prompt, for which llama-server's API has no field


class ExtraText(msgspec.Struct):
    """Text for context, for example another file of the project."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """The body of `POST /infill`."""

    input_prefix: str
    """The text before the cursor."""
    input_suffix: str
    """The text after the cursor."""
    prompt: str = ""
    """The start of the completion."""
    input_extra: list[ExtraText] | None = None


@generation(routes, "/infill", InfillRequest, **COMPLETION)
async def prepare_infill(body: InfillRequest, serving: Serving) -> LlamaCompletionBuilder:
    """Complete the text between a prefix and a suffix.

    Raises `InvalidRequest`.
    """
    return await prepare_llama_completion(body, serving, [LlamaPrompt(await _infill_prompt(serving, body))])


async def _infill_prompt(serving: Serving, body: InfillRequest) -> list[TokenPiece]:
    """The prompt for the text at the cursor, in the model's own format. Raises `InvalidRequest`.

    A prompt that is too long is truncated furthest from the cursor: first the extra texts, then prefix and suffix. The
    suffix keeps at least a quarter of the remaining tokens, if it has that many.
    """
    fill_in = serving.info.fill_in
    if fill_in is None:
        raise InvalidRequest(
            "input_prefix", f"is not supported: {serving.info.name} was not trained for fill-in-the-middle"
        )

    async def read(text: str, field: str) -> list[TokenPiece]:
        return await tokenize(serving, text, field, add_special=False, parse_special=False)

    async def control(text: str) -> list[TokenPiece]:
        return await serving.client.tokenize(text, add_special=False)

    if len(body.input_extra or []) > MAX_TEXTS:
        raise InvalidRequest("input_extra", f"has more than {MAX_TEXTS} texts; merge some of them")
    prompt = await read(body.prompt, "prompt")
    prefix = await read(body.input_prefix, "input_prefix")
    suffix = await read(body.input_suffix, "input_suffix")
    extra: list[TokenPiece] = []
    for i, chunk in enumerate(body.input_extra or []):
        separator = await control(fill_in.file) if fill_in.file else []
        extra += [*separator, *await read(f"{chunk.filename}\n{chunk.text}\n", f"input_extra[{i}].text")]
    if extra and fill_in.file:
        extra += [*await control(fill_in.file), *await read("current\n", "input_extra")]

    marks = [await control(mark) for mark in (fill_in.prefix, fill_in.suffix, fill_in.middle)]
    begin = await serving.client.tokenize("", add_special=True)
    if extra and fill_in.repository:
        begin += [*await control(fill_in.repository), *await read(f"{_REPOSITORY}\n", "input_extra")]
    max_sequence = serving.info.max_sequence
    n_predict = body.n_predict if body.n_predict is not None and body.n_predict >= 0 else max_sequence // 4
    n_fixed = len(prompt) + len(begin) + sum(map(len, marks))
    n_left = max(0, max_sequence - min(n_predict, max_sequence // 2) - n_fixed)
    suffix = suffix[: max(n_left // 4, n_left - len(prefix))]
    prefix = _last(prefix, n_left - len(suffix))
    extra = _last(extra, n_left - len(suffix) - len(prefix))
    before, after = [*marks[0], *prefix, *prompt], [*marks[1], *suffix]
    return [*begin, *extra, *([*after, *before] if serving.settings.spm_infill else [*before, *after]), *marks[2]]


def _last(tokens: list[TokenPiece], n: int) -> list[TokenPiece]:
    """The last `n` tokens; none if `n` is negative."""
    return tokens[len(tokens) - n :] if 0 < n < len(tokens) else tokens if n > 0 else []
