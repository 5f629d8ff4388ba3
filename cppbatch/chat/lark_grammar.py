"""Building a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from cppbatch.chat.escaped_lark import UnsupportedGrammar, escape_lark, input_grammar
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema.close import close_objects
from cppbatch.json_schema import GUIDANCE

MAX_TOOL_CALLS = 8
"""Per message, if a tool call is required: a weak model could write calls forever."""

_WHITE_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between the tokens of JSON, as for `json_schema`. Bounded, because a weak model could write whitespace forever."""


OF_TOOL = " // arguments of "
"""After the schema of a tool's arguments or a part of them, before the tool's name: they may be any JSON instead."""


class LazyGrammar(msgspec.Struct, frozen=True):
    """A grammar that applies to a text from a marker on, and is abandoned if it cannot be followed."""

    start: int
    """The token id of the marker, with which the grammar starts; whitespace before it is ignored."""
    grammar: str
    """llguidance's Lark."""
    thought: tuple[int, int] | None = None
    """The token ids of the tags around reasoning, in which markers are ignored."""
    in_thought: bool = False
    """Whether the prompt ends within reasoning."""


class LarkGrammar:
    """Collects rules; its methods return expressions. `token_ids`: of markers that are single tokens.

    The grammar requires these markers as tokens, not as text. `most_calls`: per message; None: any number. `strict`:
    the tools whose arguments must match their schemas; those of others may be any JSON if a schema does not compile.
    """

    def __init__(
        self,
        token_ids: dict[str, int],
        *,
        most_calls: int | None = MAX_TOOL_CALLS,
        strict: Collection[str] = (),
    ) -> None:
        self._token_ids, self._most_calls, self._strict = token_ids, most_calls, strict
        self._tool: str | None = None  # whose arguments come now, if they may be any JSON
        self._marker = re.compile("|".join(f"({re.escape(marker)})" for marker in token_ids)) if token_ids else None
        self._rules: list[str] = []

    def each(self, tools: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The names and schemas of tools. Until the next one, `json` is about their arguments."""
        for name, schema in tools.items():
            self._tool = None if name in self._strict else name
            yield name, schema
        self._tool = None

    def literal(self, text: str) -> str:
        """Exactly this text, with markers as tokens."""
        parts = self._marker.split(text) if self._marker else [text]
        ids = self._token_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

    def one_of(self, expressions: list[str]) -> str:
        """Any one of these expressions."""
        return f"({' | '.join(expressions)})"

    def rule(self, expression: str) -> str:
        """Defines a rule. Returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def terminal(self, regex: str) -> str:
        """Defines a terminal: an expression of terminals, such as a regular expression between slashes."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {regex}")
        return name

    def json(self, schema: dict[str, Any] | bool) -> str:
        """JSON text that matches a simplified schema."""
        if isinstance(schema, dict) and (source := input_grammar(schema)):
            try:
                inner = self.rule(f"%lark {{\n{escape_lark(source)}\n}}")
            except UnsupportedGrammar as error:
                raise InvalidRequest("tools", f"has a property with a Lark grammar that {error}") from error
            return " ".join([self.literal('{"input": "'), inner, self.literal('"}')])
        given = close_objects(schema) if isinstance(schema, dict) else {} if schema else {"not": {}}
        options = {GUIDANCE: {"whitespace_pattern": _WHITE_SPACE}}
        whose = f"{OF_TOOL}{self._tool}" if self._tool else ""
        return self.rule(f"%json {json.dumps(options | given)}{whose}")

    def text_until(
        self, marker: str, *, ending: str | None = None, min_length: int = 0, max_length: int | None = None
    ) -> str:
        """`min_length` to `max_length` characters without this marker, and then the marker.

        `ending`: the marker with the white space around it.
        """
        escaped = re.escape(marker).replace("/", r"\/")
        unbounded = (min_length, max_length) == (0, None)
        length = "*" if unbounded else f"{{{min_length},{'' if max_length is None else max_length}}}"
        body = f"(/(?s:.{length})/ & ~/(?s:.*{escaped}.*)/)"
        if marker in self._token_ids:  # then whitespace before it is part of the text
            return f"{self.terminal(body)} {self.literal((ending or marker).lstrip())}"
        # A single terminal: otherwise the text would include the ending.
        return self.terminal(f"{body} {json.dumps(ending or marker)}")

    def text_without(self, markers: tuple[str, ...], prefixes: tuple[str, ...]) -> str:
        """Any text that does not contain the markers or start with the prefixes."""
        refused = [rf"(?s:.*{re.escape(marker)}.*)" for marker in markers]
        refused += [rf"(?s:\s*{re.escape(prefix)}.*)" for prefix in prefixes]
        parts = ["/(?s:.*)/", *(f"~/{regex.replace('/', chr(92) + '/')}/" for regex in refused)]
        return self.terminal(" & ".join(parts))

    def repeat(self, expression: str, separator: str, *, several: bool) -> str:
        """Once; with `several` up to `most_calls` times, with the separator in between."""
        if not several:
            return expression
        following = f"{self.literal(separator)} {expression}" if separator else expression
        return f"{expression} ({following})" + (f"{{0,{self._most_calls - 1}}}" if self._most_calls else "*")

    def source(self, start: str) -> str:
        """The grammar's text. `start`: the expression that the whole text must match."""
        return "\n".join([f"start: {start}", *self._rules])
