"""`POST /completion`, and what it shares with `/infill`: request fields, responses, and how they are built."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from time import perf_counter
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.cluster.engine_client import EngineClient
from cppbatch.engine.params import replaced
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, RequestUsage, TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.endpoint import Endpoint, generation_endpoint, json_content, schema_ref
from cppbatch.server.llama_server.llama_fields import LlamaFields, to_sampling_fields
from cppbatch.server.llama_server.llama_settings import GenerationSettings, generation_settings
from cppbatch.server.mixed_prompts import detokenize, prompts_of, tokenize
from cppbatch.server.parse import read_json
from cppbatch.server.response import Json, PreparedRequest, ResponseBuilder, ServerSentEvent, respond
from cppbatch.server.response_logprobs import LogprobEntry, logprob_entries
from cppbatch.server.run_requests import Event, run_requests
from cppbatch.server.serving import SERVING, Serving, new_id

routes = web.RouteTableDef()

_ALIASES = {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl"}
_NO_SLOT = -1


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """The body of `POST /completion`."""

    prompt: str | list[Any] | Json
    """A text, token ids, both mixed, or a list of any of these. `{"prompt_string": ...}` may replace a text."""


class GenerationSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of generated tokens."""

    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaTimings(GenerationSpeed, frozen=True, kw_only=True):
    """The speed of a prompt and its completion."""

    cache_n: int
    """Prompt tokens found in the prefix cache. The other fields do not count them."""
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    draft_n: int | UnsetType = UNSET
    """Draft tokens that were verified, if there were any."""
    draft_n_accepted: int | UnsetType = UNSET
    """Draft tokens that were accepted."""


class LlamaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that is not streamed, and the last event of a stream (with empty `content` and `tokens`)."""

    index: int
    content: str
    tokens: list[int]
    """With `return_tokens`."""
    id_slot: int
    """-1: requests have no slots of their own."""
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    """Prompt tokens."""
    generation_settings: GenerationSettings
    prompt: str
    """The prompt's tokens as text."""
    has_new_line: bool
    truncated: bool
    """Whether the completion ended because the context was full."""
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    """Tokens of prompt and completion whose keys and values the next request can use."""
    timings: LlamaTimings
    completion_probabilities: list[LogprobEntry] | UnsetType = UNSET
    """With `n_probs`."""


class LlamaChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream, except the last."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: GenerationSpeed | UnsetType = UNSET
    """With `timings_per_token`."""
    completion_probabilities: list[LogprobEntry] | UnsetType = UNSET
    """With `n_probs`."""


@routes.post("/completion")
@routes.post("/completions")
async def llama_completion(request: web.Request) -> web.StreamResponse:
    """Completes one or more prompts."""
    body = await read_json(request, LlamaCompletionRequest)
    return await respond_to_completion(request, body, await _prepare_completion(body, request.app[SERVING]))


async def respond_to_completion(
    request: web.Request, body: LlamaFields, prepared: PreparedRequest
) -> web.StreamResponse:
    """Runs the engine requests, with the body's time limit, and sends the response."""
    seconds = (body.t_max_predict_ms or 0) / 1000
    if seconds <= 0:
        return await respond(request, prepared)
    client = request.app[SERVING].client
    return await respond(request, prepared, _run_with_time_limit(client, prepared.requests, seconds))


async def _run_with_time_limit(
    client: EngineClient, requests: list[GenerationRequest], seconds: float
) -> AsyncGenerator[Event, None]:
    """As `run_requests`, but ends each completion at the first newline later than `seconds` after its first token."""
    first_token_at: dict[int, float] = {}
    out_of_time: set[int] = set()  # requests that were cancelled here
    async with contextlib.aclosing(run_requests(client, requests, check_first=True)) as events:
        async for index, event in events:
            if index in out_of_time and event.finish_reason is FinishReason.CANCELLED:
                yield index, msgspec.structs.replace(event, finish_reason=FinishReason.TIMEOUT)
                continue
            yield index, event
            now = perf_counter()
            is_late = now - first_token_at.setdefault(index, now) > seconds
            if is_late and "\n" in event.text and not event.finish_reason and index not in out_of_time:
                out_of_time.add(index)
                await client.cancel(requests[index].id)


async def _prepare_completion(body: LlamaCompletionRequest, serving: Serving) -> PreparedRequest:
    """Raises `InvalidRequest`."""
    prompts, most = prompts_of(body.prompt), serving.limits.max_prompts_per_batch
    if len(prompts) > most:
        raise InvalidRequest(
            "prompt", f"has {len(prompts)} prompts; this server takes {most} (--max-prompts-per-batch)"
        )
    fields = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
    tokens = [await tokenize(serving, prompt, field) for prompt, field in zip(prompts, fields, strict=True)]
    return await prepare_llama_completion(body, serving, tokens)


async def prepare_llama_completion(
    body: LlamaFields, serving: Serving, prompts: list[list[TokenPiece]]
) -> PreparedRequest:
    """The engine requests and the builder for these prompts. Raises `InvalidRequest`."""
    serving.check_model(body.model)
    is_unlimited = body.n_predict == -1
    field_names = {ours: theirs for ours, theirs in _ALIASES.items() if getattr(body, theirs) is not None}
    field_names |= body.constraint_names
    try:
        body = await to_sampling_fields(body, serving)
        serving.limits.check(body)
        params = serving.params(body, _form(body))
        if is_unlimited:  # also where the server has a default
            params = replaced(params, max_tokens=serving.limits.default_tokens(None))
        ids = [[token.id for token in prompt] for prompt in prompts]
        requests = serving.engine_requests(body, new_id("llama-"), ids, params)
    except InvalidRequest as error:
        raise error.renamed(field_names.get(error.field, error.field)) from error
    builder = LlamaCompletionBuilder(body, requests, prompts, serving)
    return PreparedRequest(requests, builder, stream=bool(body.stream), field_names=field_names)


def _form(body: LlamaFields) -> Json:
    """The sampling parameters that follow from `response_format` and `n_predict`."""
    schema = body.schema()
    form: Json = {} if schema is None else {"json_schema": schema}
    return form | ({"echo": True} if body.n_predict == 0 else {})  # max_tokens=0 is only valid with echo


class LlamaCompletionBuilder(ResponseBuilder):
    """Builds the responses of `/completion` and `/infill`."""

    def __init__(
        self, body: LlamaFields, requests: list[GenerationRequest], prompts: list[list[TokenPiece]], serving: Serving
    ) -> None:
        super().__init__(n_candidates=body.n_candidates)
        self._body = body
        self._params = [request.params for request in requests]
        self._prompts = prompts
        self._model = serving.name
        self._max_sequence = serving.info.max_sequence
        self._prompt_only = body.n_predict == 0  # the events contain the echoed prompt, which is not shown
        self._n_predicted = [0] * len(requests)
        self._has_new_line = [False] * len(requests)
        self._first_token_at = [0.0] * len(requests)

    def record(self, index: int, event: GenerationEvent) -> None:
        """As in `ResponseBuilder`."""
        super().record(index, event)
        if not self._prompt_only:
            self._first_token_at[index] = self._first_token_at[index] or perf_counter()
            self._n_predicted[index] += len(event.tokens)
            if event.finish_reason and event.usage:  # with the end token
                self._n_predicted[index] = event.usage.completion_tokens
            self._has_new_line[index] |= "\n" in event.text

    def build(self, completions: list[list[GenerationEvent]]) -> LlamaResponse | Json | list[LlamaResponse | Json]:
        """As in `ResponseBuilder`: an object for one completion, otherwise a list."""
        responses = [self._response(index, events) for index, events in enumerate(completions)]
        return responses[0] if len(responses) == 1 else responses

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        events = []
        if not self._prompt_only and (event.text or event.tokens or event.logprobs):
            events.append(ServerSentEvent(self._chunk(index, event)))
        if event.finish_reason:
            events.append(ServerSentEvent(self._response(index, ())))
        return events

    def _chunk(self, index: int, event: GenerationEvent) -> LlamaChunk:
        n_predicted = self._n_predicted[index]
        return LlamaChunk(
            index=index,
            content=event.text,
            tokens=event.tokens,
            stop=False,
            id_slot=_NO_SLOT,
            tokens_predicted=n_predicted,
            tokens_evaluated=len(self._prompts[index // self.n_candidates]),
            timings=_generation_speed(n_predicted, perf_counter() - self._first_token_at[index])
            if self._body.timings_per_token
            else UNSET,
            completion_probabilities=logprob_entries(event.logprobs) if event.logprobs else UNSET,
        )

    def _response(self, index: int, events: Sequence[GenerationEvent]) -> LlamaResponse | Json:
        """The response with the content of these events; with `response_fields` an object of those fields."""
        last, params = self.last_events[index], self._params[index]
        assert last.usage
        n_prompt, n_predicted = last.usage.prompt_tokens, self._n_predicted[index]
        shown = () if self._prompt_only else events
        logprobs = [entry for event in shown for entry in event.logprobs]
        stop_type = _stop_type(last)
        n_tokens = n_prompt + n_predicted
        response = LlamaResponse(
            index=index,
            content="".join(event.text for event in shown),
            tokens=[token for event in shown for token in event.tokens] if self._body.return_tokens else [],
            id_slot=_NO_SLOT,
            stop=True,
            model=self._model,
            tokens_predicted=n_predicted,
            tokens_evaluated=n_prompt,
            generation_settings=generation_settings(params, self._body, last.seed),
            prompt=detokenize(self._prompts[index // self.n_candidates]),
            has_new_line=self._has_new_line[index],
            truncated=stop_type == "limit" and n_tokens >= self._max_sequence and n_predicted != params.max_tokens,
            stop_type=stop_type,
            stopping_word=last.stop or "",
            tokens_cached=n_tokens - (n_predicted > 0),  # the last token was not computed
            timings=_timings(last.usage, n_predicted),
            completion_probabilities=logprob_entries(logprobs) if logprobs else UNSET,
        )
        return response if self._body.response_fields is None else _select(self._body.response_fields, response)


def _stop_type(last: GenerationEvent) -> Literal["eos", "limit", "word"]:
    if last.finish_reason is not FinishReason.STOP:
        return "limit"
    return "eos" if last.stop is None else "word"


def _timings(usage: RequestUsage, n_predicted: int) -> LlamaTimings:
    prompt_end = usage.first_token_seconds or usage.total_seconds
    prompt_n, prompt_seconds = usage.prompt_tokens - usage.cached_tokens, prompt_end - usage.queue_seconds
    return LlamaTimings(
        cache_n=usage.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=prompt_seconds * 1000,
        prompt_per_token_ms=prompt_seconds * 1000 / prompt_n if prompt_n else 0.0,
        prompt_per_second=prompt_n / prompt_seconds if prompt_seconds > 0 else 0.0,
        draft_n=usage.drafted_tokens or UNSET,
        draft_n_accepted=usage.accepted_tokens if usage.drafted_tokens else UNSET,
        **msgspec.structs.asdict(_generation_speed(n_predicted, usage.total_seconds - prompt_end)),
    )


def _generation_speed(n: int, seconds: float) -> GenerationSpeed:
    """`seconds`: since the first token, which the prompt's computation yields, so n - 1 tokens took this time."""
    n_steps = max(0, n - 1)
    return GenerationSpeed(
        predicted_n=n,
        predicted_ms=seconds * 1000,
        predicted_per_token_ms=seconds * 1000 / n_steps if n_steps else 0.0,
        predicted_per_second=n_steps / seconds if seconds > 0 else 0.0,
    )


def _select(paths: list[str], response: LlamaResponse) -> Json:
    """The fields at these paths (`a/b` is field b of field a), by path; paths that do not exist are skipped."""
    selected: Json = {}
    fields = msgspec.to_builtins(response)
    for path in paths:
        value: object = fields
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            selected[path] = value
    return selected


def llama_endpoint(summary: str, body: type[LlamaFields]) -> Endpoint:
    """The description of an endpoint with the responses of `/completion`."""
    selected = {"type": "object", "description": "With `response_fields`: only these fields"}
    one = {"anyOf": [schema_ref(LlamaResponse), selected]}
    several = {"type": "array", "description": "Of several completions", "items": one}
    endpoint = generation_endpoint(summary, body, LlamaResponse)
    return endpoint._replace(content=endpoint.content | json_content({"anyOf": [*one["anyOf"], several]}))


ENDPOINTS = {
    ("post", "/completion"): llama_endpoint("Completes one or more prompts", LlamaCompletionRequest),
    ("post", "/completions"): llama_endpoint("As /completion", LlamaCompletionRequest),
}
