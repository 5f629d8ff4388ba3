"""`POST /api/generate`."""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web
from msgspec import UNSET

from cppbatch.chat.chat_format import ChatTurn, PreparedChat
from cppbatch.chat.output_parser import ReasoningDelta, TextDelta
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.media.sources import prompt_of_chat
from cppbatch.engine.request import GenerationEvent, GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import Json, PreparedRequest, respond
from cppbatch.server.api.ollama.builder import ERRORS, STATUSES, KeptLease, OllamaBuilder, load_or_unload, timestamp
from cppbatch.server.api.ollama.chat import content_of
from cppbatch.server.api.ollama.fields import Options, sampling_of, schema_of, thinking_variables
from cppbatch.server.api.ollama.types import DoneFields, OllamaGenerateRequest, OllamaGenerateResponse
from cppbatch.server.api.openai.completions import fill_in_prompt
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import ModelLease
from cppbatch.server.models.serving import Serving, new_id

routes = Routes()


@routes.post("/api/generate", OllamaGenerateResponse, OllamaGenerateRequest, STATUSES, lines=True, **ERRORS)
async def generate(request: web.Request) -> web.StreamResponse:
    """Answer or complete one prompt, in Ollama's API; without a prompt, load or unload the model."""
    body = await read_json(request, OllamaGenerateRequest)
    _check(body)
    if not body.prompt and not body.suffix and not body.images:
        reason = await load_or_unload(request, body)
        done = OllamaGenerateResponse(
            model=body.model, created_at=timestamp(), response="", done=True, done_reason=reason
        )
        return json_response(done)
    async with KeptLease(request, body) as lease:
        return await respond(request, lease, await _prepare(body, lease))


def _check(body: OllamaGenerateRequest) -> None:
    """Raises `InvalidRequest` for fields that exclude each other."""
    if body.template:
        raise InvalidRequest("template", "is not supported; start the server with --chat-template, or use raw")
    if not (body.raw or body.suffix):
        return
    whole = "raw" if body.raw else "suffix"
    excluded = ("system", "context", "images", *(("suffix",) if body.raw else ()))
    if given := next((name for name in excluded if getattr(body, name)), None):
        raise InvalidRequest(given, f"cannot be combined with {whole}, whose prompt has no chat template")


class _Prompt(NamedTuple):
    """The request of the engine."""

    request: GenerationRequest
    chat: PreparedChat | None
    """Reads the text; None: it is not parsed."""
    tokens: list[int] | None
    """The prompt's tokens, for `context`; None: there is none in the response."""
    field_names: dict[str, str]


async def _prepare(body: OllamaGenerateRequest, lease: ModelLease) -> PreparedRequest:
    """Raises `InvalidRequest`."""
    serving = lease.serving
    sampling = sampling_of(body, serving)
    serving.limits.check(sampling)
    prompt = await (_plain if body.raw or body.suffix else _of_chat)(body, serving, sampling)
    builder = GenerateBuilder(body, lease.waited, prompt)
    return PreparedRequest([prompt.request], builder, stream=body.streams, field_names=prompt.field_names)


async def _plain(body: OllamaGenerateRequest, serving: Serving, sampling: Options) -> _Prompt:
    """The prompt as it is, or with the text that follows its completion."""
    text = fill_in_prompt(serving, body.prompt, body.suffix) if body.suffix else body.prompt
    schema = schema_of(body)
    required: Json = {} if schema is None else {"json_schema": schema}
    (request,) = serving.engine_requests(sampling, new_id("gen-"), [text], required)
    return _Prompt(request, None, None, sampling.field_names | {"json_schema": "format"})


async def _of_chat(body: OllamaGenerateRequest, serving: Serving, sampling: Options) -> _Prompt:
    """The prompt as a user's message, after the tokens of an earlier response."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    turn = ChatTurn(
        [*system, {"role": "user", "content": content_of(body.prompt, body.images, "images")}],
        schema=schema_of(body),
        variables=await thinking_variables(body, serving),
        field_names={"messages": "prompt", "response_format": "format"},
    )
    prepared = await serving.resolve(turn, sampling, "gen-")
    (request,) = prepared.requests
    if body.images:
        if body.context:
            raise InvalidRequest("context", "cannot be combined with images; send the messages to /api/chat")
        return _Prompt(request, prepared.chat, None, prepared.field_names)
    tokens = [piece.id for piece in await serving.chat_tokens(prepared.chat)]
    if body.context:
        own = await serving.client.tokenize(prompt_of_chat(prepared.chat), add_special=False)
        tokens = [*body.context, *(piece.id for piece in own)]
        (request,) = serving.engine_requests(sampling, prepared.id, [tokens], prepared.chat.params)
    names = prepared.field_names | ({"prompt": "context"} if body.context else {})
    return _Prompt(request, prepared.chat, tokens, names)


class GenerateBuilder(OllamaBuilder):
    """Builds the response of `/api/generate`."""

    def __init__(self, body: OllamaGenerateRequest, load_seconds: float, prompt: _Prompt) -> None:
        super().__init__(body, load_seconds)
        self._output = AssistantOutput(prompt.chat) if prompt.chat else None
        self._tokens = prompt.tokens

    def record(self, index: int, event: GenerationEvent) -> None:
        """Keeps the new tokens for `context`."""
        super().record(index, event)
        if self._tokens is not None:
            self._tokens.extend(event.tokens)

    def line(self, events: list[GenerationEvent], done: Json) -> OllamaGenerateResponse:
        """A line with text, reasoning, and at the end `context`."""
        text, thinking = self._read(events)
        context = UNSET if self._tokens is None or not done["done"] else self._tokens
        head = self.head(events, done)
        return OllamaGenerateResponse(response=text, thinking=thinking or UNSET, context=context, **head)

    def _is_shown(self, line: DoneFields) -> bool:
        assert isinstance(line, OllamaGenerateResponse)
        return bool(line.response or line.thinking)

    def _read(self, events: list[GenerationEvent]) -> tuple[str, str]:
        """The text and the reasoning that the events add."""
        if self._output is None:
            return "".join(event.text for event in events), ""
        deltas = [delta for event in events for delta in self._output.read(event)]
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        return text, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
