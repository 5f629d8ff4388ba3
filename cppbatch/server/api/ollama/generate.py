"""`POST /api/generate`."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.output_parser import ReasoningDelta, TextDelta
from cppbatch.engine.media.sources import prompt_of_chat
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import Json, respond
from cppbatch.server.api.ollama.builder import ERRORS, STATUSES, KeptLease, OllamaBuilder, load_or_unload, timestamp
from cppbatch.server.api.ollama.chat import content_of
from cppbatch.server.api.ollama.fields import Options, sampling_of, schema_of, thinking_variables
from cppbatch.server.api.ollama.types import DoneFields, OllamaGenerateRequest, OllamaGenerateResponse
from cppbatch.server.api.openai.completions import fill_in_prompt
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import ModelLease
from cppbatch.server.models.serving import ResolvedRequest, Serving, new_id

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


async def _prepare(body: OllamaGenerateRequest, lease: ModelLease) -> GenerateBuilder:
    """Raises `InvalidRequest`."""
    serving = lease.serving
    sampling = sampling_of(body, serving)
    serving.limits.check(sampling)
    resolve = _resolve_plain if body.raw or body.suffix else _resolve_chat
    return GenerateBuilder(*await resolve(body, serving, sampling), body, lease.waited)


_Resolved = tuple[ResolvedRequest, list[int] | None]
"""A request, and the tokens of its prompt for `context`; None: there is none in the response."""


async def _resolve_plain(body: OllamaGenerateRequest, serving: Serving, sampling: Options) -> _Resolved:
    """The prompt as it is, or with the text that follows its completion."""
    text = fill_in_prompt(serving, body.prompt, body.suffix) if body.suffix else body.prompt
    schema = schema_of(body)
    required: Json = {} if schema is None else {"json_schema": schema}
    requests = serving.engine_requests(sampling, name := new_id("gen-"), [text], required)
    return ResolvedRequest(name, requests, sampling.field_names | {"json_schema": "format"}), None


async def _resolve_chat(body: OllamaGenerateRequest, serving: Serving, sampling: Options) -> _Resolved:
    """The prompt as a user's message, after the tokens of an earlier response."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    turn = ChatTurn(
        [*system, {"role": "user", "content": content_of(body.prompt, body.images, "images")}],
        schema=schema_of(body),
        variables=await thinking_variables(body, serving),
        field_names={"messages": "prompt", "response_format": "format"},
    )
    resolved = await serving.resolve(turn, sampling, "gen-")
    if body.images:
        if body.context:
            raise InvalidRequest("context", "cannot be combined with images; send the messages to /api/chat")
        return resolved, None
    tokens = [piece.id for piece in await serving.chat_tokens(resolved.chat)]
    if body.context:
        own = await serving.client.tokenize(prompt_of_chat(resolved.chat), add_special=False)
        tokens = [*body.context, *(piece.id for piece in own)]
        requests = serving.engine_requests(sampling, resolved.id, [tokens], resolved.chat.params)
        resolved = resolved._replace(requests=requests, field_names=resolved.field_names | {"prompt": "context"})
    return resolved, tokens


class GenerateBuilder(OllamaBuilder):
    """Builds the response of `/api/generate`."""

    def __init__(
        self, resolved: ResolvedRequest, tokens: list[int] | None, body: OllamaGenerateRequest, load_seconds: float
    ) -> None:
        super().__init__(resolved, body, load_seconds)
        self._tokens = tokens

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
        deltas = [delta for event in events for delta in self._output.read(event)]
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        return text, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
