"""What `/api/chat` and `/api/generate` have in common: leases, lines of a stream, durations, the reason of the end."""

from __future__ import annotations

from abc import abstractmethod
from datetime import datetime, timezone
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.errors import Conflict
from cppbatch.server.answer.logprobs import chat_token_logprobs
from cppbatch.server.answer.response import Json, ResponseBuilder
from cppbatch.server.api.ollama.fields import keep_alive_of, name_of
from cppbatch.server.api.ollama.types import DoneFields, DoneReason, GenerationFields, ModelFields
from cppbatch.server.auth.keys import KEY
from cppbatch.server.http.api_errors import api_error
from cppbatch.server.http.endpoint import GENERATION_ERRORS
from cppbatch.server.http.error_formats import OllamaErrorResponse, ollama_error
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.served import MODELS, ModelLease, lease_model
from cppbatch.server.models.serving import ResolvedRequest

ERRORS: Json = {"error": OllamaErrorResponse, "unavailable": OllamaErrorResponse}
"""The error type of all routes, for `Routes`."""
STATUSES = (*GENERATION_ERRORS, 409)
"""The error statuses of routes that use the engine: 409 if the only model cannot be unloaded."""


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339, in UTC. `seconds`: since 1970; None: now."""
    time = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    """A duration as a whole number, 0 or more."""
    return max(0, round(seconds * 1_000_000_000))


# --- leases ---------------------------------------------------------------------------------------------------------


class KeptLease:
    """A lease of the request's model, after which its `keep_alive` applies: `async with KeptLease(request, body)`.

    Raises `InvalidRequest`, and the errors of `lease_model`.
    """

    def __init__(self, request: web.Request, body: ModelFields) -> None:
        self._request, self._seconds = request, keep_alive_of(body)
        self._models = request.app[MODELS]
        self._named = msgspec.structs.replace(body, model=name_of(self._models, body.model))

    async def __aenter__(self) -> ModelLease:
        self._lease = await lease_model(self._request, self._named)
        try:
            self._lease.serving.check_model(self._named.model)
        except BaseException:
            self._lease.release()
            raise
        return self._lease

    async def __aexit__(self, *exc: object) -> None:
        self._lease.release()
        self._models.keep(self._lease.serving.name, self._seconds)


async def load_or_unload(request: web.Request, body: ModelFields) -> DoneReason:
    """For a request without a prompt: loads the model, or with `keep_alive` 0 unloads it.

    Raises as `KeptLease`, and `Conflict` for the only model of a server without worker processes.
    """
    if keep_alive_of(body) != 0:
        async with KeptLease(request, body):
            return "load"
    models = request.app[MODELS]
    if models.router:
        entry = await models.entry(name_of(models, body.model), request.get(KEY))
        models.keep(entry.name, 0)
        return "unload"
    lease = KeptLease(request, body)
    async with lease as found:
        if not models.keep(found.serving.name, 0):
            raise Conflict("keep_alive", "is 0, but the only model of this server stays loaded (--in-process)")
    return "unload"


# --- responses ------------------------------------------------------------------------------------------------------


class OllamaBuilder(ResponseBuilder):
    """Builds the responses of one completion: an object, or lines of JSON."""

    streams_lines = True

    def __init__(self, resolved: ResolvedRequest, body: GenerationFields, load_seconds: float) -> None:
        """`load_seconds`: the time for which the request has waited for its model."""
        super().__init__(resolved, stream=body.streams)
        self._output = AssistantOutput(resolved.chat)
        self._model = body.model
        self._load_seconds = load_seconds
        self._wants_logprobs = bool(body.logprobs)

    @abstractmethod
    def line(self, events: list[GenerationEvent], done: Json) -> DoneFields:
        """The response with the new text of these events. `done`: further fields of `DoneFields`."""

    def build(self, completions: list[list[GenerationEvent]]) -> DoneFields:
        return self.line(completions[0], self._end())

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Returns a line with the new text."""
        if event.is_report:
            return []
        line = self.line([event], {"done": False})
        return [ServerSentEvent(line)] if self._is_shown(line) or event.logprobs else []

    def stream_end(self) -> list[ServerSentEvent]:
        """Returns a line with the durations."""
        return [ServerSentEvent(self.line([], self._end()))]

    def stream_ping(self) -> ServerSentEvent:
        """Returns a line without text."""
        return ServerSentEvent(self.line([], {"done": False}))

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        return [ServerSentEvent(ollama_error(api_error(error)))]

    @abstractmethod
    def _is_shown(self, line: DoneFields) -> bool:
        """Whether a line has new text."""

    def head(self, events: list[GenerationEvent], done: Json) -> Json:
        """The fields of `DoneFields`."""
        entries: list[TokenLogprob] = [entry for event in events for entry in event.logprobs]
        logprobs: Any = chat_token_logprobs(entries) if entries and self._wants_logprobs else UNSET
        return {"model": self._model, "created_at": timestamp(), "logprobs": logprobs, **done}

    def _end(self) -> Json:
        """The fields of a finished completion. A text that ran out of time ends like one that ran out of tokens."""
        last = self.last_events[0]
        fields: Json = {"done": True, "done_reason": "stop" if last.finish_reason is FinishReason.STOP else "length"}
        if usage := last.usage:
            first = usage.first_token_seconds or usage.total_seconds
            fields |= {
                "total_duration": nanoseconds(usage.total_seconds),
                "load_duration": nanoseconds(self._load_seconds),
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": nanoseconds(first - usage.queue_seconds),
                "eval_count": usage.completion_tokens,
                "eval_duration": nanoseconds(usage.total_seconds - first),
            }
        return fields
