"""Messages that are rendered to learn a template's form, and the text around what is found in the renderings.

Names, ids, keys and values occur nowhere else, so that what surrounds them is the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json], bool], str | None]
"""Renders messages and tools, with or without a generation prompt; None: the template refuses them."""

QUESTION, TEXT, THOUGHT = "probe-question", "probe-text", "probe-thought"
NAMES, IDS = ("probe_one", "probe_two"), ("probe0001", "probe0002")
KEYS = ("probe_ka", "probe_kb")
TYPED: Json = {"integer": 471147, "boolean": True, "object": {"probe_i": 1}, "array": ["probe-i"]}
TAG = re.compile(r"<[^<>\n]{1,64}>|\[/?[A-Z][A-Z_ ]*\]")


class Probe:
    """Renders messages after a question, and has the text around a plain answer."""

    def __init__(self, render: Render) -> None:
        self._render = render
        text = self.answer(message_of(content=TEXT)) or ""
        self.before_text, found, self.text_end = text.partition(TEXT)
        if not found:
            self.before_text = ""
        prompts = [render([{"role": "user", "content": QUESTION}], [], add) or "" for add in (True, False)]
        self.header = prompts[0].rpartition(QUESTION)[2]
        self.always_prompts = prompts[0] == prompts[1] and self.text_end.endswith(self.header)
        if self.always_prompts:  # regardless of the argument
            self.text_end = self.text_end.removesuffix(self.header)

    def answer(self, message: Json) -> str | None:
        """The rendering after the question."""
        whole = self._render([{"role": "user", "content": QUESTION}, message], _TOOLS, False)
        return whole.rpartition(QUESTION)[2] if whole else None


def message_of(*calls: Json, **fields: Any) -> Json:
    """A message of the assistant."""
    return {"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {}), **fields}


def call_of(i: int, arguments: Json, call_id: str | None = None) -> Json:
    """A call of the first or second tool."""
    function = {"name": NAMES[i], "arguments": arguments}
    return {"id": call_id or IDS[i], "type": "function", "function": function}


_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "A word."} for key in KEYS}
                | {f"probe_k{kind}": {"type": kind, "description": "A value."} for kind in TYPED},
                "required": [KEYS[0]],
            },
        },
    }
    for name in NAMES
]


def _in_tag(text: str, at: int) -> bool:
    return any(tag.start() < at < tag.end() for tag in TAG.finditer(text))


def _n_common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_start(a: str, b: str) -> str:
    """The longest common start that ends within no tag."""
    n = _n_common(a, b)
    while _in_tag(a, n) or _in_tag(b, n):
        n -= 1
    return a[:n]


def common_end(a: str, b: str) -> str:
    """The longest common end that begins within no tag."""
    n = _n_common(a[::-1], b[::-1])
    while _in_tag(a, len(a) - n) or _in_tag(b, len(b) - n):
        n -= 1
    return a[len(a) - n :]


def without_last_tag(text: str) -> str:
    """What is before the last tag, which is the token that ends the turn."""
    tags = list(TAG.finditer(text))
    return text[: tags[-1].start()].strip() if tags else ""
