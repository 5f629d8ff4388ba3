"""`POST /api/chat`."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.engine.media.sources import source_of_data
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import ContentBlock, ContentBlocks, Json, respond
from cppbatch.server.api.ollama.builder import ERRORS, STATUSES, KeptLease, OllamaBuilder, load_or_unload, timestamp
from cppbatch.server.api.ollama.fields import sampling_of, schema_of, thinking_variables
from cppbatch.server.api.ollama.truncation import resolve_within_context
from cppbatch.server.api.ollama.types import (
    CalledFunction,
    DoneFields,
    OllamaCall,
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaMessage,
    RequestMessage,
)
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import ModelLease
from cppbatch.server.models.serving import ResolvedRequest

routes = Routes()


@routes.post("/api/chat", OllamaChatResponse, OllamaChatRequest, STATUSES, lines=True, **ERRORS)
async def chat(request: web.Request) -> web.StreamResponse:
    """Generate the next message of a conversation, in Ollama's API; without messages, load or unload the model."""
    body = await read_json(request, OllamaChatRequest)
    if not body.messages:
        reason = await load_or_unload(request, body)
        done = OllamaChatResponse(
            model=body.model, created_at=timestamp(), message=OllamaMessage(), done=True, done_reason=reason
        )
        return json_response(done)
    async with KeptLease(request, body) as lease:
        return await respond(request, lease, await _prepare_chat(body, lease))


async def _prepare_chat(body: OllamaChatRequest, lease: ModelLease) -> ChatBuilder:
    """Raises `InvalidRequest`."""
    serving = lease.serving
    sampling = sampling_of(body, serving)
    serving.limits.check(sampling)
    serving.check_size(body)
    turn = ChatTurn(
        conversation(body.messages or []),
        tools=[tool.as_dict(f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        schema=schema_of(body),
        variables=await thinking_variables(body, serving),
        field_names={"response_format": "format"},
    )
    resolved = await resolve_within_context(serving, turn, sampling, "chat-", truncate=body.truncate is not False)
    return ChatBuilder(resolved, body, lease.waited)


class ChatBuilder(OllamaBuilder):
    """Builds the response of `/api/chat`."""

    def __init__(self, resolved: ResolvedRequest, body: OllamaChatRequest, load_seconds: float) -> None:
        super().__init__(resolved, body, load_seconds)
        self._blocks = ContentBlocks()
        self._n_calls = 0

    def line(self, events: list[GenerationEvent], done: Json) -> OllamaChatResponse:
        """A message with the new text, reasoning and calls."""
        return OllamaChatResponse(message=self._message(events), **self.head(events, done))

    def _is_shown(self, line: DoneFields) -> bool:
        assert isinstance(line, OllamaChatResponse)
        return line.message != OllamaMessage()

    def _message(self, events: list[GenerationEvent]) -> OllamaMessage:
        """The text, reasoning and whole calls that the events add."""
        changes = [change for event in events for change in self._blocks.read(self._output.read(event))]
        if any(event.finish_reason for event in events):
            changes += self._blocks.close()
        texts = {"text": "", "reasoning": ""}
        calls = []
        for step, block, text in changes:
            if step == "delta" and block.kind in texts:
                texts[block.kind] += text
            elif step == "stop" and block.kind == "call" and (call := _call(block, self._n_calls)):
                self._n_calls += 1
                calls.append(call)
        return OllamaMessage(content=texts["text"], thinking=texts["reasoning"] or UNSET, tool_calls=calls or UNSET)


def _call(block: ContentBlock, index: int) -> OllamaCall | None:
    """A call; None: the text ended within its arguments."""
    try:
        arguments = msgspec.json.decode(block.text or "{}", type=Json)
    except msgspec.DecodeError:
        return None
    return OllamaCall(id=block.call_id, function=CalledFunction(index=index, name=block.name, arguments=arguments))


# --- messages -------------------------------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(messages: list[RequestMessage]) -> list[Json]:
    """The messages as chat templates expect them. A result without the id of its call answers the first call without
    a result: the one of its tool, if it names one. Raises `InvalidRequest`."""
    rendered: list[Json] = []
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    for i, message in enumerate(messages):
        field, role = f"messages[{i}]", message.role.lower()
        if role not in _ROLES:
            raise InvalidRequest(f"{field}.role", f"is {message.role!r:.80}; it must be one of {', '.join(_ROLES)}")
        shown: Json = {"role": role, "content": content_of(message.content or "", message.images, f"{field}.images")}
        if message.thinking and role == "assistant":
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call{i:03}{n:02}" for n, call in enumerate(message.tool_calls)]  # nine characters
            called = list(zip(ids, message.tool_calls, strict=True))
            shown["tool_calls"] = [
                {"id": call_id, "type": "function", "function": msgspec.to_builtins(call.function)}
                for call_id, call in called
            ]
            open_calls = [(call_id, call.function.name) for call_id, call in called]
        if role == "tool":
            answered = _answered_call(message, open_calls)
            open_calls = [each for each in open_calls if each != answered]
            shown |= {"tool_call_id": answered[0], **({"name": answered[1]} if answered[1] else {})}
        rendered.append(shown)
    return rendered


def _answered_call(message: RequestMessage, open_calls: list[tuple[str, str]]) -> tuple[str, str]:
    """The id and the name of the call that a tool's message answers."""
    if message.tool_call_id:
        name = next((name for call_id, name in open_calls if call_id == message.tool_call_id), message.tool_name)
        return message.tool_call_id, name or ""
    of_tool = [each for each in open_calls if message.tool_name in (None, "", each[1])]
    return (of_tool or open_calls or [("call00000", message.tool_name or "")])[0]


def content_of(text: str, images: list[str] | None, field: str) -> str | list[Json]:
    """The content of a message: images come before its text, as in Ollama. Raises `InvalidRequest`."""
    if not images:
        return text
    parts = [source_of_data(f"{field}[{i}]", image).part() for i, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]
