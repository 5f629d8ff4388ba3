"""Conversations: from messages to requests, and from their events to deltas."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from time import monotonic
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.messages import (
    ChatMessage,
    Tool,
    ToolChoiceObject,
    check_variables,
    choice_of,
    conversation_of,
)
from cppbatch.chat.output_parser import (
    AssistantMessage,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolCall,
)
from cppbatch.chat.reasoning import check_budget, effort_variables
from cppbatch.chat.template import ApplyNamed, ChatTemplate, find_template
from cppbatch.chat.template_program import TemplateStopped
from cppbatch.engine.media.sources import local_media, prompt_of_chat, with_files
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import Params, SamplingParams, sampling_params
from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    RequestOptions,
    TokenPiece,
)
from cppbatch.errors import InvalidRequest, client_names
from cppbatch.text_patterns import any_of
from cppbatch.typed_json import convert

Json = dict[str, Any]
Result = TypeVar("Result")


Message = Mapping[str, object]
"""OpenAI's object: `{"role": "user", "content": "Hello"}`. Content may include image and audio parts, such as `{"type":
"image", "path": "cat.png"}` (docs/media.md)."""
Conversation = str | Sequence[Message]
"""A list of messages; a string is a single user message."""

PromptOrMessages = Prompt | Sequence[Message]
"""A prompt, or messages that the model's chat template renders to one."""

_CHAT_OPTIONS = (
    "chat_template", "system", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "chat_template_kwargs", "continue_final_message", "thinking_budget", "parse_special",
)  # fmt: skip


class ChatOptions(RequestOptions, total=False):
    """Keyword arguments of `chat` and `chat_stream`, with the names and meanings of the server's chat completions."""

    chat_template: str | None
    """The name of a built-in template, a template's text, or its file. None: the model's own."""
    system: str | None
    """A system message to put before each conversation."""
    tools: Sequence[Mapping[str, object]]
    """OpenAI's objects: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""
    tool_choice: str | Mapping[str, object]
    """`none`, `auto` (default), `required`, or an object that names a tool."""
    parallel_tool_calls: bool
    """False: at most one call per message."""
    reasoning_effort: str | None
    thinking_budget: int | None
    """Maximum reasoning tokens; then the reasoning is closed and the answer starts. -1: no limit."""
    chat_template_kwargs: Mapping[str, object]
    """Chat template variables, such as `enable_thinking`."""
    continue_final_message: bool | None
    """Extend the last message instead of starting a new one. None: extend it if it is the assistant's."""
    parse_special: bool
    """Read the texts of control tokens in messages and tools as these tokens."""


class ChatRequests:
    """Creates requests from conversations with the same options. Raises `InvalidRequest` for invalid options."""

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
            variables=check_variables(effort | dict(given.get("chat_template_kwargs") or {})),
            thinking_tokens=check_budget(thinking_budget=given.get("thinking_budget")),
            continue_final_message=given.get("continue_final_message"),
            parse_special=given.get("parse_special"),
            field_names={"response_format": "json_schema"},
        )

    def request(
        self, request_id: str, conversation: Conversation, params: Params
    ) -> tuple[GenerationRequest, PreparedChat]:
        """The request for a conversation, and its rendered form, which creates the parser of the answer.

        A JSON schema in `params` applies to the answer: the model may reason before it, or call tools instead. Raises
        `InvalidRequest`.
        """
        params = sampling_params(params)
        messages = convert(with_files(self._messages(conversation)), list[ChatMessage], "messages")
        turn = replace(
            self._turn,
            messages=local_media(conversation_of(messages)),
            schema=None if params.json_schema is None else json.loads(str(params.json_schema)),
        )
        chat = self._format.render(turn)
        params = _params_of_chat(params, chat)
        return GenerationRequest(id=request_id, prompt=prompt_of_chat(chat), params=params, **self._options), chat

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
    """The params plus the requirements of the chat: possibly a grammar, and control tokens to include in the text."""
    visible = (*params.visible_tokens, *chat.params.get("visible_tokens", ()))
    required = {"json_schema": None} | chat.params | {"visible_tokens": visible}
    with client_names(chat.field_names):
        return replace(params, **required)


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
    """The chat formats of a model: for its own template, and for others. Each is created once."""

    def __init__(self, info: ModelInfo, apply_named: ApplyNamed | None = None) -> None:
        """`apply_named`: renders with a template that calls llama.cpp."""
        self._info, self._apply_named = info, apply_named
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-chat")
        self.made: dict[str | ChatTemplate | None, ChatFormat] = {}
        """Formats by template; None: the model's own."""

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        """Finds the model's control tokens. Thousands of them take 0.1 s, so not on an event loop."""
        return any_of(self._info.control_tokens)

    def get(self, template: str | ChatTemplate | None = None) -> ChatFormat:
        """The format of a template (a string: as for `find_template`), else of the model's own, else of ChatML.

        A new one lacks the token ids of its markers (`add_tokens`). Raises `ConfigError` for an unknown template,
        `InvalidRequest` if the model's own is broken.
        """
        with self._making:  # learning a template renders it
            if template not in self.made:
                found, info = template, self._info
                if not isinstance(found, ChatTemplate):
                    source = info.chat_template if found is None else find_template(found)
                    found = ChatTemplate(source, bos=info.bos, eos=info.eos, apply_named=self._apply_named)
                self.made[template] = ChatFormat(found, control_tokens=self._control_tokens)
            return self.made[template]

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function that waits for a template on one of the model's own threads. Raises `TemplateStopped` if it
        has waited for others too long."""
        began = monotonic()

        def run() -> Result:
            if monotonic() - began > 5.0:
                raise TemplateStopped("is slow, and other conversations were rendered first")
            return function()

        return self._threads.submit(run)

    @staticmethod
    def add_tokens(chat: ChatFormat, tokens: Mapping[str, Sequence[TokenPiece]]) -> None:
        """Adds the tokens of each of the format's markers."""
        chat.token_ids = {marker: pieces[0].id for marker, pieces in tokens.items() if len(pieces) == 1}


FinishReasonName = Literal["stop", "length", "tool_calls", "timeout"]

_FINISH_REASONS: dict[FinishReason, FinishReasonName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "timeout",
}
"""Cancelled and failed messages have no finish reason."""


class AssistantOutput:
    """The output of one chat completion."""

    def __init__(self, chat: PreparedChat) -> None:
        self._output_parser: OutputParser = chat.output_parser()
        self._is_reasoning = False
        self.message = AssistantMessage()
        """The message so far."""
        self.reasoning_tokens = 0
        """Reasoning tokens. Counted per event; an event with both reasoning and other text is split in proportion to
        its characters, so the number is then an estimate."""
        self.finish_reason: FinishReasonName | None = None
        """None until the message ends, and if it was cancelled or failed."""
        self.has_cut_call = False
        """Whether a stop string ended the message within the arguments of a call."""

    def read(self, event: GenerationEvent) -> list[Delta]:
        """The deltas for an event."""
        deltas = self._output_parser.push(event.text) if event.text else []
        if event.finish_reason:
            deltas = [*deltas, *self._output_parser.close()]
        self.message.add(deltas)
        self._count_reasoning(len(event.tokens), deltas)
        if event.finish_reason:
            self.has_cut_call = event.stop is not None and bool(self.message.calls) and _is_cut(self.message.calls[-1])
            has_called = self.message.calls and event.finish_reason is FinishReason.STOP and not self.has_cut_call
            self.finish_reason = "tool_calls" if has_called else _FINISH_REASONS.get(event.finish_reason)
        return deltas

    def _count_reasoning(self, n_tokens: int, deltas: list[Delta]) -> None:
        sizes = [(len(getattr(delta, "text", "")), isinstance(delta, ReasoningDelta)) for delta in deltas]
        if total := sum(n for n, _ in sizes):
            self._is_reasoning = sizes[-1][1]
            self.reasoning_tokens += round(n_tokens * sum(n for n, is_reasoning in sizes if is_reasoning) / total)
        elif self._is_reasoning:
            self.reasoning_tokens += n_tokens


def _is_cut(call: ToolCall) -> bool:
    """Whether the arguments are not a whole JSON value. False for a custom tool, whose text may be anything."""
    if call.is_custom:
        return False
    try:
        msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return True
    return False
