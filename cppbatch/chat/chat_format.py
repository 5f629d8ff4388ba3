"""Converts a conversation to a prompt, a grammar and a parser of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from cppbatch.chat.call_form import NAME, CallForm
from cppbatch.chat.custom_tools import CustomCallParser, has_grammar
from cppbatch.chat.lark_grammar import LarkGrammar, LazyGrammar
from cppbatch.chat.media_parts import Placeholders, PlainText
from cppbatch.chat.output_parser import OutputParser, PlainTextParser, ToolSchemas
from cppbatch.chat.reasoning import UNLIMITED, ReasoningState, ReasoningTags, ThinkingBudget, effort_tokens
from cppbatch.chat.template import ChatTemplate, content_text, decode_object, join_parts
from cppbatch.chat.tool_formats.gemma4 import Gemma4Format
from cppbatch.chat.tool_formats.generic import GenericFormat, describe_tools_in_text
from cppbatch.chat.tool_formats.harmony import HarmonyFormat
from cppbatch.chat.tool_formats.json_calls import Llama3Format
from cppbatch.chat.tool_formats.learned import LearnedFormat
from cppbatch.chat.tool_formats.pythonic import OF_TEMPLATES, PythonicFormat
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tools import ToolChoice, callable_tools, check_satisfiable
from cppbatch.errors import client_name, client_names
from cppbatch.generation_schema.simplify import simplify

Json = dict[str, Any]

_NEW_LINES = r"/\n{1,2}/"


class ChatTurn(msgspec.Struct, frozen=True):
    """A request for the assistant's next message. The API families and the Python interface each create it from their
    own fields, in one function."""

    messages: list[Json]
    """OpenAI's objects; images and audio are parts as of `messages`."""
    tools: list[Json] = msgspec.field(default_factory=list)
    """OpenAI's objects."""
    choice: ToolChoice = msgspec.field(default_factory=ToolChoice)
    schema: Json | bool | None = None
    """JSON schema that the text must match, unless tools are called; an answer that must be a call has no text."""
    variables: Json = msgspec.field(default_factory=dict)
    """Passed to the template."""
    thinking_tokens: int | None = None
    """Maximum reasoning tokens; -1: no limit; None: derived from the variable `reasoning_effort` if the template does
    not support it, else no limit."""
    thinking_message: str | None = None
    """Text before the end of reasoning that has used up its tokens. None: none, unless the server has a default; so
    with the following fields."""
    reads_reasoning: bool | None = None
    """Separate reasoning from the content, in formats that mark it with tags. None: yes."""
    reads_answer: bool = True
    """Separate reasoning and tool calls from the content. False: all of the text is content, and calls are free."""
    continue_final_message: bool | None = None
    """Extend the last message instead of starting a new one; None: extend it if it is the assistant's."""
    add_generation_prompt: bool = True
    """Start the assistant's message, unless the last message is extended."""
    parse_special: bool | None = None
    """Read the texts of control tokens, such as `<|im_end|>`, in messages and tools as these tokens. None: no, unless
    the server does by default."""
    field_names: dict[str, str] = msgspec.field(default_factory=dict)
    """{part of a field name in OpenAI's chat completions: the client's name for it}, for errors (`client_names`)."""


class PreparedChat(msgspec.Struct, frozen=True):
    """A chat request as an engine request."""

    prompt: str
    """The prompt, without images and audio."""
    output_parser: Callable[[], OutputParser]
    """Creates the parser of a completion."""
    parts: list[Any] | None = None
    """The texts, images and audio of the prompt, in order; None: text only."""
    params: Json = msgspec.field(default_factory=dict)
    """Fields for `SamplingParams`: possibly a grammar, and the control tokens to include in the text."""
    field_names: dict[str, str] = msgspec.field(default_factory=dict)
    """{a field of `params`, or the prompt: the client's name for its source}, for errors (`client_names`)."""


class ChatForms(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes tool calls and reasoning, in readable form: `/props`, `cppbatch models inspect`."""

    tool_calls: str
    """A call of the function NAME."""
    tools_described_by: Literal["template", "message"]
    """`message`: the template does not render tools, so the system message describes them."""
    thoughts: str | None
    """None: the model is not known to reason."""

    def __str__(self) -> str:
        told = "" if self.tools_described_by == "template" else ", and a message describes the tools to the model"
        return f"tool calls are {self.tool_calls!r}{told}; reasoning is {self.thoughts or 'unknown'}"


class ChatFormat:
    """A model's chat template and the formats of its tool calls and its reasoning."""

    def __init__(
        self,
        template: ChatTemplate,
        token_ids: dict[str, int] | None = None,
        control_tokens: re.Pattern[str] | None = None,
    ) -> None:
        """`control_tokens`: finds the texts of the model's control tokens; None: it has none."""
        self.template = template
        self._control_tokens = control_tokens
        self.tool_format = detect_tool_format(template)
        self.token_ids = token_ids
        """The token ids of the `markers` that are single tokens; None: not known yet."""
        self.reasoning_tags = None if self.tool_format.parses_reasoning else self._find_tags()

    @property
    def forms(self) -> ChatForms:
        """The tool call and reasoning formats, learned from the template or known in advance."""
        has_tools = self.tool_format.template_has_tools and self.template.capabilities.tools
        tags = self.reasoning_tags
        known = "<|channel|>analysis<|message|> ... <|end|>" if self.tool_format.parses_reasoning else None
        return ChatForms(
            tool_calls=self.tool_format.example,
            tools_described_by="template" if has_tools else "message",
            thoughts=f"{tags.start} ... {tags.end}" if tags else known,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that delimit reasoning and tool calls in this model's text."""
        return (*self._tag_markers, *self.tool_format.markers)

    def _find_tags(self) -> ReasoningTags | None:
        """The tags that the template writes, or else known tags that it contains."""
        learned = self.template.form.thought
        return ReasoningTags(*learned) if learned else ReasoningTags.of_template(self.template.source)

    @property
    def _tag_markers(self) -> tuple[str, ...]:
        return self.reasoning_tags.markers if self.reasoning_tags else ()

    def render(self, turn: ChatTurn) -> PreparedChat:
        """Renders the prompt of the assistant's next message. Raises `InvalidRequest` with the client's field name."""
        with client_names(turn.field_names):
            return self._render_turn(turn)

    def _render_turn(self, turn: ChatTurn) -> PreparedChat:
        choice, variables = turn.choice, turn.variables
        functions, schemas, custom = callable_tools(turn.tools, choice)
        last, continue_final_message = turn.messages[-1], turn.continue_final_message
        if continue_final_message is None:
            continue_final_message = last["role"] == "assistant" and not last.get("tool_calls")
        placeholders = Placeholders(None if turn.parse_special else self._control_tokens)
        hidden = [self._hide_control_tokens(placeholders, message) for message in turn.messages]
        if continue_final_message:
            hidden[-1] = last  # the client's start of the model's text
        messages = placeholders.hide_media(hidden)
        last = messages[-1]
        if continue_final_message and isinstance(last.get("content"), list):
            last = {**last, "content": join_parts(last["content"], "\n\n")}  # as in llama-server
            messages = [*messages[:-1], last]
        prompt = self._render(
            messages,
            placeholders.hide_control_tokens(functions),
            placeholders.hide_control_tokens(variables),
            continue_final_message=continue_final_message,
            add_generation_prompt=turn.add_generation_prompt and not continue_final_message,
        )
        parts = placeholders.parts(prompt)
        state = ReasoningState.of_prompt(
            prompt, self.reasoning_tags, content_text(last) if continue_final_message else None
        )
        params: Json = {}
        if visible := self.markers if functions or self.tool_format.parses_reasoning else self._tag_markers:
            params["visible_tokens"] = visible
        thinking_tokens = turn.thinking_tokens
        if thinking_tokens is None and "reasoning_effort" not in self.template.source:
            thinking_tokens = effort_tokens(variables)
        if thinking_tokens is not None and thinking_tokens != UNLIMITED:
            budget = self._thinking_budget(thinking_tokens, prompt, state, has_tools=bool(functions))
            if budget and turn.thinking_message:
                budget = msgspec.structs.replace(budget, closing=turn.thinking_message + budget.closing)
            params["reasoning_budget"] = budget
        names = {"prompt": client_name("messages", turn.field_names)}
        strict = frozenset(each["name"] for tool in functions if (each := tool["function"]).get("strict"))
        lark = LarkGrammar(self.token_ids or {}, strict=strict)
        read = schemas if turn.reads_answer else {}
        if choice.mode == "required" and turn.reads_answer:
            params["grammar"] = self._calls_grammar(lark, schemas, state, several=choice.parallel)
            names["grammar"] = "tools"
        elif turn.schema is not None:
            params |= self._answer_params(lark, turn.schema, read, state, several=choice.parallel)
            names |= dict.fromkeys(("grammar", "json_schema"), client_name("response_format", turn.field_names))
        elif read and (any(map(has_grammar, custom.values())) or (strict and not self.tool_format.start_prefixes)):
            # Not strict if calls have no marker, because text could then not start with a bracket or a fence.
            params["grammar"] = self._text_or_calls_grammar(lark, schemas, state, several=choice.parallel)
            names["grammar"] = "tools"
        elif read:
            params["lazy_grammar"] = self._lazy_grammar(schemas, state, several=choice.parallel)

        def output_parser() -> OutputParser:
            if not turn.reads_answer:
                return PlainTextParser()
            tags, its_state = (
                (self.reasoning_tags, state) if turn.reads_reasoning is not False else (None, ReasoningState.NONE)
            )
            parser = self.tool_format.output_parser(prompt, schemas, tags, its_state, self.template.form.dropped)
            return CustomCallParser(parser, frozenset(custom)) if custom else parser

        return PreparedChat(
            prompt=prompt if parts is None else "".join(map(_text_of, parts)),
            output_parser=output_parser,
            parts=parts,
            params=params,
            field_names=names,
        )

    def _hide_control_tokens(self, placeholders: Placeholders, message: Json) -> Json:
        """The message with placeholders for control tokens. The marks of reasoning and tool calls in the text of
        system and assistant messages remain: models write them, and templates look for them."""
        hide, kept = placeholders.hide_control_tokens, () if message["role"] in ("user", "tool") else self.markers
        hidden: Json = hide(
            {name: value for name, value in message.items() if name not in ("role", "tool_calls")}, kept
        )
        if calls := message.get("tool_calls"):
            decodes = not self.template.capabilities.string_arguments
            hidden["tool_calls"] = [hide(_with_decoded_arguments(call, hide) if decodes else call) for call in calls]
        return {"role": message["role"], **hidden}

    def _thinking_budget(
        self, n_tokens: int, prompt: str, state: ReasoningState, *, has_tools: bool
    ) -> ThinkingBudget | None:
        """None for a model that is not known to reason, and if the reasoning has ended."""
        if budget := self.tool_format.thinking_budget(n_tokens, prompt, has_tools=has_tools):
            return budget
        if self.reasoning_tags is None or state in (ReasoningState.NONE, ReasoningState.ENDED):
            return None
        is_open = state is not ReasoningState.POSSIBLE
        start, end = self.reasoning_tags.start, self.reasoning_tags.end
        return ThinkingBudget(n_tokens=n_tokens, start=start, end=end, closing=end, is_open=is_open)

    def _render(self, messages: list[Json], tools: list[Json], variables: Json, **end: bool) -> str:
        """`end`: `continue_final_message`, `add_generation_prompt`."""
        capabilities = self.template.capabilities
        write_calls = self.tool_format.write_calls if self.tool_format.writes_calls else None
        if not self.tool_format.template_has_tools or (write_calls and not capabilities.tools):
            in_user_message = bool(tools) and not capabilities.system
            messages = describe_tools_in_text(messages, tools, in_user_message=in_user_message, form=write_calls)
            tools = []
        elif write_calls and not capabilities.tool_calls:
            messages = [self._with_written_calls(message) for message in messages]
        return self.template.render(messages, tools=tools or None, **end, **variables)

    def _with_written_calls(self, message: Json) -> Json:
        """The message for a template that does not render calls, with the calls in its text."""
        if not message.get("tool_calls"):
            return message
        text = content_text(message) + self.tool_format.write_calls(message["tool_calls"])
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}

    def _calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, state: ReasoningState, *, several: bool) -> str:
        """A grammar for one tool call, or with `several` up to `MAX_TOOL_CALLS`, optionally after reasoning."""
        return lark.source(self._after_reasoning(lark, self._calls(lark, tools, several=several), state))

    def _text_or_calls_grammar(
        self, lark: LarkGrammar, tools: ToolSchemas, state: ReasoningState, *, several: bool
    ) -> str:
        """A grammar for tool calls, or for text that the parser does not read as a call."""
        text = self.tool_format.text_grammar(lark)
        calls = lark.rule(self._calls(lark, tools, several=several))
        either = lark.one_of([calls, text, f"{text} {calls}"])
        return lark.source(self._after_reasoning(lark, either, state))

    def _lazy_grammar(self, tools: ToolSchemas, state: ReasoningState, *, several: bool) -> LazyGrammar | None:
        """A grammar for tool calls from their marker on. None if the markers of calls or reasoning are not single
        tokens, or if calls may start without them."""
        formats, ids = self.tool_format, self.token_ids or {}
        start = ids.get(next(iter(formats.start_markers), ""))
        thought = [ids[tag] for tag in self._tag_markers if tag in ids]
        if start is None or formats.start_prefixes or formats.parses_reasoning:
            return None
        if self.reasoning_tags and len(thought) < 2:
            return None
        lark = LarkGrammar(ids, most_calls=None)
        in_thought = state not in (ReasoningState.NONE, ReasoningState.ENDED, ReasoningState.POSSIBLE)
        source = lark.source(self._calls(lark, tools, several=several))
        return LazyGrammar(start, source, (thought[0], thought[1]) if thought else None, in_thought)

    def _answer_params(
        self, lark: LarkGrammar, schema: Json | bool, tools: ToolSchemas, state: ReasoningState, *, several: bool
    ) -> Json:
        """The fields of `SamplingParams` for an answer that is JSON matching the schema, or tool calls if there are
        tools.

        Raises `InvalidRequest` for a schema that no JSON satisfies.
        """
        may_reason = state not in (ReasoningState.NONE, ReasoningState.ENDED) or self.tool_format.parses_reasoning
        if not may_reason and not tools:
            return {"json_schema": schema}
        check_satisfiable("response_format", schema)
        answer = self.tool_format.answer_grammar(lark, lark.json(simplify(schema)))
        if tools:
            answer = lark.one_of([self._calls(lark, tools, several=several), answer])
        return {"grammar": lark.source(self._after_reasoning(lark, answer, state))}

    def _calls(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        return self.tool_format.calls_grammar(lark, tools, several=several and self.tool_format.parallel_calls)

    def _after_reasoning(self, lark: LarkGrammar, expression: str, state: ReasoningState) -> str:
        if self.reasoning_tags is None or state in (ReasoningState.NONE, ReasoningState.ENDED):
            return expression
        reasoning = f"{lark.text_until(self.reasoning_tags.end)} {lark.terminal(_NEW_LINES)}?"
        if state is ReasoningState.POSSIBLE:
            reasoning = f"({lark.literal(self.reasoning_tags.start)} {reasoning})?"
        return f"{reasoning} {expression}"


def _text_of(part: Any) -> str:
    return part.text if isinstance(part, PlainText) else part if isinstance(part, str) else ""


def _with_decoded_arguments(call: Json, hide: Callable[[Any], Any]) -> Json:
    """The call with an object for arguments whose JSON text contains control tokens, perhaps in escape sequences."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    decoded = decode_object(arguments) if isinstance(arguments, str) else arguments
    return call if hide(decoded) == decoded else {**call, "function": {**function, "arguments": decoded}}


_TOLD = {
    "<|tool_call|> followed by a JSON list": CallForm(
        begin="<|tool_call|>[", open="", head=f'{{"name": "{NAME}", "arguments": ', tail="}", close="", separator=", ",
        end="]", is_json=True,
    ),
}  # fmt: skip
"""The words with which templates describe the format if they do not render calls: Granite 3."""


def detect_tool_format(template: ChatTemplate) -> ToolCallFormat:
    """Returns the format of the calls that the template renders; `GenericFormat` if it does not render calls."""
    source, has_tools = template.source, template.capabilities.tools
    if all(marker in source for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return HarmonyFormat()
    if has_tools and "<|tool_call>call:" in source:
        return Gemma4Format()
    if has_tools and any(mark in source for mark in OF_TEMPLATES):
        return PythonicFormat()
    form = template.form.calls or next((form for words, form in _TOLD.items() if words in source), None)
    learned = LearnedFormat(form) if form else None
    if learned and learned.start_markers:
        return learned
    if form and has_tools:
        return Llama3Format("parameters" if "parameters" in form.head else "arguments")
    return GenericFormat()
