"""Conversations as requests: the model's template, tools, the schema of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.message_types import (
    ChatMessage,
    Tool,
    ToolChoiceObject,
    checked_variables,
    choice_of,
    conversation_of,
)
from cppbatch.chat.reasoning_effort import effort_variables
from cppbatch.chat.template import ApplyNamed, ChatTemplate, find_template
from cppbatch.chat.thinking_budget import given_budget
from cppbatch.engine.media_sources import local_media, prompt_of_chat, with_files
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import Params, SamplingParams, sampling_params
from cppbatch.engine.request import GenerationRequest, Prompt, RequestOptions, TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.typed_json import convert

Json = dict[str, Any]
Message = Mapping[str, object]
"""OpenAI's object: `{"role": "user", "content": "Hello"}`. Content may include image and audio parts, such as `{"type":
"image", "path": "cat.png"}` (docs/media.md)."""
Conversation = str | Sequence[Message]
"""A list of messages; a string is a single user message."""

PromptOrMessages = Prompt | Sequence[Message]
"""A prompt, or messages that the model's chat template makes one of."""

_CHAT_OPTIONS = (
    "chat_template", "system", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "chat_template_kwargs", "continue_final_message", "thinking_budget",
)  # fmt: skip


class ChatOptions(RequestOptions, total=False):
    """Keyword arguments of `chat` and `chat_stream`, with the names and meanings of the server's chat completions."""

    chat_template: str | None
    """A built-in template by its name, a template's text or its file. None: the model's own."""
    system: str | None
    """A system message before those of each conversation."""
    tools: Sequence[Mapping[str, object]]
    """OpenAI's objects: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""
    tool_choice: str | Mapping[str, object]
    """none, auto (the default), required, or an object that names a tool."""
    parallel_tool_calls: bool
    """False: at most one call per message."""
    reasoning_effort: str | None
    thinking_budget: int | None
    """Maximum reasoning tokens before the closing marker is inserted and the answer follows. -1: no limit."""
    chat_template_kwargs: Mapping[str, object]
    """Variables for the chat template, such as `enable_thinking`."""
    continue_final_message: bool | None
    """Extend the last message instead of starting a new one. None: if it is the assistant's."""


class ChatRequest(NamedTuple):
    """A conversation in the engine's terms."""

    request: GenerationRequest
    chat: PreparedChat
    """Makes the parser of the answer."""

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The engine's error with the field of the conversation in place of that of the prompt."""
        return error.renamed(self.chat.renames.get(error.field, error.field))


class ChatRequests:
    """Makes the requests of conversations with the same options. Raises `InvalidRequest` for wrong options."""

    def __init__(self, chat_format: ChatFormat, options: ChatOptions) -> None:
        given: Json = {name: value for name, value in options.items() if name in _CHAT_OPTIONS}
        self._format = chat_format
        self._options: Json = {name: value for name, value in options.items() if name not in _CHAT_OPTIONS}
        self._system = given.get("system")
        if not isinstance(self._system, str | None):
            raise InvalidRequest("system", f"is {self._system!r:.80}; it must be a string")
        tools = convert(list(given.get("tools") or ()), list[Tool], "tools")
        wanted: Any = convert(given.get("tool_choice") or "auto", str | ToolChoiceObject, "tool_choice")  # type: ignore[arg-type]
        effort = effort_variables("reasoning_effort", given.get("reasoning_effort"))
        self._turn = ChatTurn(
            [],
            tools=[tool.as_dict(f"tools[{i}]") for i, tool in enumerate(tools)],
            choice=choice_of(wanted, parallel=given.get("parallel_tool_calls", True)),
            variables=checked_variables(effort | dict(given.get("chat_template_kwargs") or {})),
            thinking_tokens=given_budget(thinking_budget=given.get("thinking_budget")),
            continue_final_message=given.get("continue_final_message"),
            field_names={"response_format": "json_schema"},
        )

    def request(self, request_id: str, conversation: Conversation, params: Params) -> ChatRequest:
        """The request of a conversation. A JSON schema of `params` is that of the answer: the model may reason before
        it, or call tools instead. Raises `InvalidRequest`."""
        params = sampling_params(params)
        messages = convert(with_files(self._messages(conversation)), list[ChatMessage], "messages")
        turn = replace(
            self._turn,
            messages=local_media(conversation_of(messages)),
            schema=None if params.json_schema is None else json.loads(str(params.json_schema)),
        )
        with turn.client_names():
            chat = self._format.prepare(turn)
        prompt_params = _params_of_chat(params, chat)
        return ChatRequest(
            GenerationRequest(id=request_id, prompt=prompt_of_chat(chat), params=prompt_params, **self._options), chat
        )

    def _messages(self, conversation: Conversation) -> list[Message]:
        if isinstance(conversation, str):
            messages: list[Message] = [{"role": "user", "content": conversation}]
        else:
            messages = list(conversation)
        if self._system is None:
            return messages
        if messages and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer"):
            raise InvalidRequest(
                "system", "cannot be combined with a system message at the start of the conversation; give only one"
            )
        return [{"role": "system", "content": self._system}, *messages]


def _params_of_chat(params: SamplingParams, chat: PreparedChat) -> SamplingParams:
    """The params with what the chat requires: perhaps a grammar, and control tokens that must appear in the text."""
    visible = (*params.visible_tokens, *chat.params.get("visible_tokens", ()))
    required = {"json_schema": None} | chat.params | {"visible_tokens": visible}
    try:
        return msgspec.structs.replace(params, **required)
    except InvalidRequest as error:
        raise error.renamed(chat.renames.get(error.field, error.field)) from error


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def several_conversations(given: Conversation | Sequence[Conversation]) -> tuple[list[Conversation], bool]:
    """The conversations, and whether `given` is a single one. Raises `InvalidRequest` for anything else."""
    if isinstance(given, str) or is_conversation(given):
        return [given], True  # type: ignore[list-item]  # checked
    if not isinstance(given, Sequence):
        raise InvalidRequest(
            "conversations", f"is {given!r:.80}; it must be a string, a list of messages, or a list of these"
        )
    for i, each in enumerate(given):
        if not isinstance(each, str) and not is_conversation(each):
            message = f"is {each!r:.80}; a conversation is a string or a list of messages"
            raise InvalidRequest(f"conversations[{i}]", message)
    return list(given), False  # type: ignore[arg-type]  # checked


class ChatFormats:
    """The formats of a model's chats: of its own template, and of others. Each is made once."""

    def __init__(self, info: ModelInfo, apply_named: ApplyNamed | None = None) -> None:
        """`apply_named`: as in `ChatTemplate`."""
        self._info, self._apply_named = info, apply_named
        self.made: dict[str | ChatTemplate | None, ChatFormat] = {}
        """By template; None: the model's own."""

    def get(self, template: str | ChatTemplate | None = None) -> ChatFormat:
        """The format of a template (a string: as `find_template` takes it), else of the model's own, else of ChatML.

        A new one lacks the token ids of its markers (`add_tokens`). Raises `ConfigError` if there is no such template,
        `InvalidRequest` if the model's own is broken.
        """
        if template not in self.made:
            found, info = template, self._info
            if not isinstance(found, ChatTemplate):
                source = info.chat_template if found is None else find_template(found)
                found = ChatTemplate(source, bos=info.bos, eos=info.eos, apply_named=self._apply_named)
            self.made[template] = ChatFormat(found)
        return self.made[template]

    @staticmethod
    def add_tokens(chat: ChatFormat, tokens: Mapping[str, Sequence[TokenPiece]]) -> None:
        """Adds the tokens of each of the format's markers."""
        chat.token_ids = {marker: pieces[0].id for marker, pieces in tokens.items() if len(pieces) == 1}
