"""Building a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from cppbatch.chat.escaped_lark import escaped_lark, input_grammar
from cppbatch.closed_objects import GUIDANCE, closed_objects

MAX_TOOL_CALLS = 8
"""In one message, where a tool call is required: a weak model could write calls forever."""

_WHITE_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between the tokens of JSON, as for `json_schema`. Unbounded, a weak model could write white space forever."""


class LazyGrammar(msgspec.Struct, frozen=True):
    """A grammar that a text follows from a marker on, and only as far as it can."""

    start: int
    """The token id of the marker. The grammar begins with it; white space before it does not count."""
    grammar: str
    """llguidance's Lark."""
    thought: tuple[int, int] | None = None
    """The token ids of the tags around reasoning, in which a marker begins nothing."""
    in_thought: bool = False
    """The prompt ends within reasoning."""


class LarkGrammar:
    """Collects rules; its methods return expressions. `token_ids`: of markers that are a single token each.

    The grammar demands those markers as tokens, not as text. `most_calls`: in one message; None: any number.
    """

    def __init__(self, token_ids: dict[str, int], *, most_calls: int | None = MAX_TOOL_CALLS) -> None:
        self._token_ids, self._most_calls = token_ids, most_calls
        self._marker = re.compile("|".join(f"({re.escape(marker)})" for marker in token_ids)) if token_ids else None
        self._rules: list[str] = []

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
        """JSON text that matches a schema."""
        if isinstance(schema, dict) and (source := input_grammar(schema)):
            inner = self.rule(f"%lark {{\n{escaped_lark(source)}\n}}")
            return " ".join([self.literal('{"input": "'), inner, self.literal('"}')])
        given = closed_objects(schema) if isinstance(schema, dict) else {} if schema else {"not": {}}
        options = {GUIDANCE: {"whitespace_pattern": _WHITE_SPACE}}
        return self.rule(f"%json {json.dumps(options | given)}")

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
        if marker in self._token_ids:  # white space before it is part of the text then
            return f"{self.terminal(body)} {self.literal((ending or marker).lstrip())}"
        # A single terminal: otherwise the text would include the ending.
        return self.terminal(f"{body} {json.dumps(ending or marker)}")

    def text_without(self, markers: tuple[str, ...], prefixes: tuple[str, ...]) -> str:
        """Any text that contains none of the markers, and begins with none of the prefixes."""
        refused = [rf"(?s:.*{re.escape(marker)}.*)" for marker in markers]
        refused += [rf"(?s:\s*{re.escape(prefix)}.*)" for prefix in prefixes]
        parts = ["/(?s:.*)/", *(f"~/{regex.replace('/', chr(92) + '/')}/" for regex in refused)]
        return self.terminal(" & ".join(parts))

    def repeated(self, expression: str, separator: str, *, several: bool) -> str:
        """Once; with `several` up to `most_calls` times, with the separator in between."""
        if not several:
            return expression
        following = f"{self.literal(separator)} {expression}" if separator else expression
        return f"{expression} ({following})" + (f"{{0,{self._most_calls - 1}}}" if self._most_calls else "*")

    def source(self, start: str) -> str:
        """The grammar's text. `start`: the expression that the whole text must match."""
        return "\n".join([f"start: {start}", *self._rules])
