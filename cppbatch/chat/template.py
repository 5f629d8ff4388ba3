"""Rendering a conversation with a model's chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from cppbatch.chat.call_form import NAMED_ID
from cppbatch.chat.capabilities import PROBE_TOOL, ChatMessage, TemplateCapabilities, TemplateCaps, detect_capabilities
from cppbatch.chat.reasoning import ReasoningTags
from cppbatch.chat.sandbox import GivenList, HostFunction, default_variables
from cppbatch.chat.template_form import TemplateForm, learn
from cppbatch.chat.template_program import NeedsChild, TemplateStopped, program_of
from cppbatch.chat.turns import TurnRules, arrange, learn_turns, short_id, with_ids
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.json_bounds import excess

log = logging.getLogger("cppbatch.chat")

_TEMPLATE_FOLDER = resources.files("cppbatch.chat") / "templates"
"""Built-in templates. They do not write the BOS token: the engine adds it if the model uses it."""
_LEARNING_SECONDS = 1.0
"""For what a template supports, and again for its form, in a child process. Usual templates take 0.01 s."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a model's reasoning back. Templates read the first, some of them the second."""
_MAX_SCHEMA_DEPTH = 16
_CONTINUE = "continue_final_message"
_END_MARK = "END-OF-THE-UNFINISHED-MESSAGE "
"""Ends with a space, which shows whether the template trims messages."""


ApplyNamed = Callable[[str, list[tuple[str, str]], bool], str]
"""llama.cpp's templates: a template's name, pairs of a role and a text, and `add_generation_prompt` become a prompt."""
_NAMED = "llama_cpp_template"  # the function that applies them, in templates


def builtin_names() -> list[str]:
    """The names of the built-in templates, in alphabetical order."""
    names = (file.name for file in _TEMPLATE_FOLDER.iterdir())
    return sorted(name.removesuffix(".jinja") for name in names if name.endswith(".jinja"))


def find_template(value: str, llama_cpp_names: Callable[[], Sequence[str]] = tuple) -> str:
    """Returns the template given by `--chat-template`: a built-in name, the template's text, a file path, or one of
    llama.cpp's names, whose template calls llama.cpp. As in llama-server, text with spaces that is not a path is a
    template too, with a warning, because every prompt is then this text.

    Raises `ConfigError` if it is none of these, or not a Jinja template, or if compiling it takes too long.
    """
    source = _read_template(value, llama_cpp_names)
    if not source.strip():
        raise ConfigError(f"--chat-template {value}: the file is empty")
    try:
        program_of(source).check()
    except TemplateStopped as error:
        raise ConfigError(f"--chat-template {error.message}") from error
    return source


def _read_template(value: str, llama_cpp_names: Callable[[], Sequence[str]]) -> str:
    if "{{" in value or "{%" in value:
        return value
    if value in builtin_names():
        return _read_builtin(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a valid path
        others = llama_cpp_names()
        if value in others:
            return f"{{{{ {_NAMED}({value!r}, messages, add_generation_prompt) }}}}"
        if " " in value and "/" not in value and not Path(value).suffix:
            log.warning("--chat-template contains no {{ }}, so every chat prompt is %r", value[:200])
            return value
        names = ", ".join(sorted({*builtin_names(), *others}))
        reason = getattr(error, "strerror", None) or error
        if "/" in value or Path(value).suffix:
            raise ConfigError(
                f"--chat-template: the file {value[:200]!r} cannot be read ({reason}); give a template file or a "
                "template name"
            ) from error
        raise ConfigError(
            f"chat template {value[:200]!r} not found: it must be one of {names}, a template file, or the source of a "
            f"template ({reason})"
        ) from error


def _read_builtin(name: str) -> str:
    return (_TEMPLATE_FOLDER / f"{name}.jinja").read_text("utf-8")


CHATML = _read_builtin("chatml")
"""The default for models without a template, as in llama.cpp."""

NO_TEMPLATE = (
    "this file has no chat template: it is a base model, which continues texts, or its template is missing; messages "
    "are sent in ChatML, which it may not know: use an instruct model, or set --chat-template"
)
"""A line for users of such a model."""


class ChatTemplate:
    """A Jinja template, compiled once. It runs in a sandbox, because it comes with a downloaded file.

    `apply_named`: for templates that call llama.cpp (`find_template`). Raises `InvalidRequest` if the template itself
    is broken, as all methods do, `TemplateStopped` if it takes too long, and `NeedsChild` (`quick_only`).
    """

    source: str
    """The template's text."""

    def __init__(self, source: str | None, *, bos: str, eos: str, apply_named: ApplyNamed | None = None) -> None:
        self.source = source or CHATML
        self._program = program_of(self.source)
        try:
            self._program.check()
        except ConfigError as error:
            raise InvalidRequest("messages", f"cannot be used with this model: {error}") from error
        self._has_known_tags = ReasoningTags.of_template(self.source) is not None
        self._is_learning = self._has_told = False
        self._learning_ends = 0.0  # of the program's `child_seconds`
        self._merges_results = "['tool_responses']" in self.source and "!= 'tool'" not in self.source
        self._fixed: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
        if apply_named:
            self._fixed[_NAMED] = HostFunction(
                lambda name, messages, add_generation_prompt: apply_named(
                    name,
                    [(message["role"], content_text(message)) for message in messages],
                    bool(add_generation_prompt),
                )
            )

    @property
    def is_quick(self) -> bool:
        """Whether it renders in this process, in bounded time."""
        return self._program.is_quick

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """The template's capabilities, detected on first use by rendering short conversations."""
        self._learning_ends = self._program.child_seconds + _LEARNING_SECONDS
        return detect_capabilities(self._probe)

    @cached_property
    def form(self) -> TemplateForm:
        """How the template writes the model's messages, learned on first use by rendering some."""

        def try_render(messages: list[ChatMessage], tools: list[dict[str, Any]], add_prompt: bool) -> str | None:
            try:
                return self.render(messages, tools=tools, add_generation_prompt=add_prompt)
            except TemplateStopped:
                raise
            except InvalidRequest:
                return None

        self._is_learning = True
        self._learning_ends = self._program.child_seconds + _LEARNING_SECONDS
        try:
            return learn(try_render)
        finally:
            self._is_learning = False

    @property
    def caps(self) -> TemplateCaps:
        """What the template supports, with llama-server's names."""
        found, source = self.capabilities, self.source
        return TemplateCaps(
            supports_tools=found.tools,
            supports_tool_calls=found.tool_calls,
            supports_parallel_tool_calls=found.tool_calls and self.turns.calls,
            supports_system_role=found.system,
            supports_string_content="user" in found.strings,
            supports_typed_content="user" in found.parts,
            supports_object_arguments=found.tool_calls and not found.string_arguments,
            supports_preserve_reasoning=self.form.thought is not None,
            supports_reasoning_effort="reasoning_effort" in source,
        )

    @cached_property
    def turns(self) -> TurnRules:
        """Which conversations the template writes as they are, learned on first use by rendering short ones."""
        self._learning_ends = self._program.child_seconds + _LEARNING_SECONDS

        def try_render(messages: list[ChatMessage]) -> str | None:
            adapted, tools = self._adapt(messages), [_complete_tool(PROBE_TOOL)]
            has_calls = any(message.get("tool_calls") for message in messages)
            return (None if has_calls else self._probe(adapted, None)) or self._probe(adapted, tools)

        return learn_turns(try_render, developer=self.capabilities.developer)

    def _reasons(self) -> bool:
        """Whether the model is known to reason. True while this is being learned."""
        if self._has_known_tags or "enable_thinking" not in self.source:
            return self._has_known_tags
        return self._is_learning or self.form.thought is not None

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt for the assistant's next message, or for the rest of the last message.

        `messages`, `tools`: OpenAI's objects, with text only. `kwargs`: further variables for the template, such as
        `enable_thinking` or `documents`. The prompt ends with the start of the assistant's message, unless
        `add_generation_prompt` is False or the last message is continued. Raises `InvalidRequest` if the template
        refuses the conversation, or if the last message cannot be continued.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                _CONTINUE,
                "and add_generation_prompt cannot be combined: the former continues the last message, the latter "
                "starts a new one",
            )
        if not self._is_learning:
            messages = self._arrange(messages)
        adapted = self._adapt(messages)
        tools = [_complete_tool(tool) for tool in tools or ()]
        unfinished = _mark_end(adapted) if continue_final_message else ""
        variables = self._variables(adapted, tools, kwargs)
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._render_leniently(variables, tools)
        except (TemplateStopped, NeedsChild):
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequest("messages", f"do not fit this model's chat template: {error!s:.1000}") from error
        return _cut_at_mark(unfinished, text) if continue_final_message else text

    def _arrange(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """The conversation in a form that the template writes completely (`turns`)."""
        arranged = arrange(messages, self.turns)
        if any(message.get("tool_calls") for message in messages) and (calls := self.form.calls):
            if calls.short_ids:
                arranged = with_ids(arranged, short_id)
            elif calls.named_ids:
                arranged = with_ids(arranged, lambda _, name, i: NAMED_ID.format(name=name, index=i))
        if arranged != messages and not self._has_told:
            self._has_told = True
            log.info(
                "the chat template does not write some conversations as they are; they are arranged by the rules %s",
                ", ".join(self.turns.changed) or "ids",
            )
        return arranged

    def _adapt(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """New messages in the form that the template supports."""
        if not self.capabilities.system:
            messages = _merge_system(messages)
        adapted = [adapt_message(message, self.capabilities) for message in messages]
        return _merge_results(adapted) if self._merges_results else adapted

    def _render_leniently(self, variables: dict[str, Any], tools: list[dict[str, Any]]) -> str:
        """Some templates iterate over `tools` without checking whether there are any, and some only support plain
        schemas."""
        seconds = self._learning_seconds() if self._is_learning else None
        try:
            return self._program.render(variables, seconds=seconds)
        except (TypeError, jinja2.UndefinedError, RecursionError):
            plain = {**variables, "tools": [_plain_tool(tool) for tool in tools]}
            return self._program.render(plain, seconds=seconds)

    def _probe(self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None) -> str | None:
        """Renders without adapting the messages. None: the template refuses them."""
        variables = self._variables(messages, tools, {"add_generation_prompt": True})
        try:
            return self._program.render(variables, seconds=self._learning_seconds())
        except (TemplateStopped, NeedsChild):
            raise
        except Exception:
            return None

    def _learning_seconds(self) -> float:
        """How long the next rendering may take while the template is learned."""
        if (left := self._learning_ends - self._program.child_seconds) > 0:
            return left
        raise self._program.stop("takes too long to render a few short messages")

    def _variables(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """All variables of a rendering. `given`: those of the request."""
        tools = tools or None
        return {
            **default_variables(tools, reasons=self._reasons()),
            **self._fixed,
            **given,
            "messages": GivenList(messages),
            "tools": tools and GivenList(tools),
        }


def _merge_results(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Moves tool results into the messages that called them, for Gemma 4's first templates."""
    merged: list[ChatMessage] = []
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool" and merged:
            name = names.get(message.get("tool_call_id") or "", message.get("name"))
            result = {"name": name or "unknown", "response": message["content"]}
            merged[-1] = {**merged[-1], "tool_responses": [*merged[-1].get("tool_responses", ()), result]}
        else:
            names |= {call.get("id") or "": call["function"]["name"] for call in message.get("tool_calls") or ()}
            merged.append(message)
    return merged


def _complete_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With the fields that templates expect of every tool, as in llama-server."""
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object"}
    if isinstance(parameters, dict) and "properties" not in parameters:
        parameters = {**parameters, "properties": {}}
    known = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": known | {key: value for key, value in function.items() if key not in known}}


def _plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With one type for each argument, and items of each array."""
    parameters = tool["function"]["parameters"]
    properties = {key: _plain_schema(schema) for key, schema in parameters["properties"].items()}
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": properties}}}


def _plain_schema(schema: Any, depth: int = 0) -> Any:
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return {"type": "string"}
    variants = schema.get("anyOf") or schema.get("oneOf") or [{"type": kind} for kind in _as_list(schema.get("type"))]
    known = [each for each in _as_list(variants) if isinstance(each, dict) and each.get("type") not in (None, "null")]
    plain = {**schema, **(known[0] if known else {"type": "string"})}
    if isinstance(plain["type"], list):
        return _plain_schema(plain, depth + 1)
    if plain["type"] == "array":
        plain["items"] = _plain_schema(plain.get("items"), depth + 1)
    if isinstance(plain.get("properties"), dict):
        plain["properties"] = {key: _plain_schema(each, depth + 1) for key, each in plain["properties"].items()}
    return plain


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def content_text(message: ChatMessage) -> str:
    """Returns a message's text; the texts of several parts are lines, as in llama-server."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return join_parts(content)


def join_parts(parts: list[dict[str, Any]], separator: str = "\n") -> str:
    """The texts of a message's parts, each on separate lines; an empty first text adds no line."""
    text = ""
    for part in parts:
        text += (separator if text else "") + (part.get("text") or "")
    return text


def adapt_message(message: ChatMessage, capabilities: TemplateCapabilities) -> ChatMessage:
    """Converts one of OpenAI's messages into the form that a template supports. Returns a new message.

    - The role `developer` becomes `system` if the template does not support it.
    - Text parts are joined, with line breaks between them, for roles whose content must be a string, and a string
      becomes a part for the others.
    - Arguments of tool calls, in OpenAI's API a JSON string, become an object, as almost all templates expect.
    - The content of a message with only tool calls becomes null or "", whichever the template renders correctly.
    - Fields that are null are dropped, since templates test whether fields are defined.
    """
    adapted = {key: value for key, value in message.items() if value is not None}
    if adapted["role"] == "developer" and not capabilities.developer:
        adapted["role"] = "system"
    calls = adapted.pop("tool_calls", None)
    if calls:
        adapted["tool_calls"] = [_adapt_call(call, capabilities) for call in calls]
    adapted["content"] = _adapt_content(adapted["role"], message.get("content"), capabilities)
    if calls and not adapted["content"]:
        adapted["content"] = None if capabilities.null_content else ""
    reasoning = next((adapted[name] for name in _REASONING_FIELDS if name in adapted), None)
    return adapted if reasoning is None else {"thinking": reasoning, **adapted, "reasoning_content": reasoning}


def _merge_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Merges an initial system message into the next message, for templates without that role."""
    if len(messages) < 2 or messages[0]["role"] not in ("system", "developer"):
        return messages
    text = content_text(messages[0]) + "\n" + content_text(messages[1])
    return [{**messages[1], "content": text}, *messages[2:]]


def _adapt_content(role: str, content: Any, capabilities: TemplateCapabilities) -> Any:
    if isinstance(content, list):
        return content if role in capabilities.parts else join_parts(content)
    if content and role in capabilities.parts and role not in capabilities.strings:
        return [{"type": "text", "text": content}]
    return content or ""


def _adapt_call(call: dict[str, Any], capabilities: TemplateCapabilities) -> dict[str, Any]:
    if "function" not in call:
        return call
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str) and not capabilities.string_arguments:
        arguments = decode_object(arguments)
    elif isinstance(arguments, dict) and capabilities.string_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def decode_object(text: str) -> Any:
    """Decodes a JSON object. Other text, which models sometimes write and many templates accept, is returned
    unchanged."""
    if excess(text.encode(errors="replace")):
        return text
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _mark_end(messages: list[ChatMessage]) -> str:
    """Appends a mark to the last message's text, in place. Returns the original text. Raises `InvalidRequest`."""
    content = messages[-1]["content"] if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK
        return content
    texts = [i for i, part in enumerate(content or []) if "text" in part]
    if not content or not texts:
        raise InvalidRequest(_CONTINUE, "requires a last message with text to continue")
    last = texts[-1]
    text: str = content[last]["text"]
    messages[-1]["content"] = [*content[:last], {**content[last], "text": text + _END_MARK}, *content[last + 1 :]]
    return text


def _cut_at_mark(text: str, rendered: str) -> str:
    """Returns the prompt up to the mark. Raises `InvalidRequest` if the template dropped or changed the message."""
    at = rendered.rfind(_END_MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise InvalidRequest(_CONTINUE, "is not supported: this model's chat template omits a part of the last message")
    before = rendered[:at]
    return before if rendered.startswith(_END_MARK, at) else before.rstrip()  # the template trims messages
