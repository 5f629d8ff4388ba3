"""Puts together a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from cppbatch.chat.tool_formats.tool_format import MAX_TOOL_CALLS

_WHITE_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between JSON's parts, as for `json_schema`: a weak model would never stop adding more."""


class LarkGrammar:
    """Rules, and ways to write expressions. `token_ids`: of markers that are one token, which must come as that."""

    def __init__(self, token_ids: dict[str, int]) -> None:
        self._ids = token_ids
        self._marker = re.compile("|".join(f"({re.escape(marker)})" for marker in token_ids)) if token_ids else None
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """This text; markers in it as tokens."""
        parts = self._marker.split(text) if self._marker else [text]
        written = [f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts if part]
        return " ".join(written)

    def one_of(self, expressions: list[str]) -> str:
        """Any one of them."""
        return f"({' | '.join(expressions)})"

    def rule(self, expression: str) -> str:
        """A name for an expression."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def terminal(self, regex: str) -> str:
        """A name for what matches an expression of terminals, such as a regular expression between slashes."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {regex}")
        return name

    def json(self, schema: dict[str, Any] | bool) -> str:
        """JSON of a schema."""
        given = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
        return self.rule(f"%json {json.dumps(given | options)}")

    def up_to(self, marker: str, *, ending: str | None = None, least: int = 0, most: int | None = None) -> str:
        """Text of `least` to `most` letters without this marker, and then the marker.

        `ending`: that with what stands around it, where it is always text.
        """
        inside = re.escape(marker).replace("/", r"\/")
        length = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        body = f"(/(?s:.{length})/ & ~/(?s:.*{inside}.*)/)"
        if ending is None and marker in self._ids:
            return f"{self.terminal(body)} {self.text(marker)}"
        return self.terminal(f"{body} {json.dumps(ending or marker)}")  # one terminal: else the text would eat the end

    def repeated(self, expression: str, separator: str, *, several: bool) -> str:
        """Once, or up to `MAX_TOOL_CALLS` times with a text in between."""
        if not several:
            return expression
        again = f"{self.text(separator)} {expression}" if separator else expression
        return f"{expression} ({again}){{0,{MAX_TOOL_CALLS - 1}}}"

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])
