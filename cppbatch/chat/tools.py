"""What a client says about tools: which there are, and whether one must be called."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


ToolChoiceMode = Literal["none", "auto", "required"]
TOOL_CHOICE_MODES: tuple[ToolChoiceMode, ...] = ("none", "auto", "required")


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tools are called."""

    mode: ToolChoiceMode = "auto"
    name: str | None = None
    """With `required`: this one."""
    parallel: bool = True
    """Several may be called in one message."""


def callable_tools(tools: list[Json], choice: ToolChoice) -> list[Json]:
    """The tools that may be called (OpenAI's objects, `{"type": "function", "function": {...}}`).

    Raises `InvalidRequest` for a name that is none, is there twice, or that no tool has, and when a call is required
    of no tools.
    """
    names = [tool["function"]["name"] for tool in tools]
    earlier: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"is {name!r:.80}; it must be 1 to 64 letters, digits, underscores or hyphens"
            raise InvalidRequest(f"tools[{i}].function.name", message)
        if name in earlier:
            raise InvalidRequest(f"tools[{i}].function.name", f"is {name!r}, as an earlier one is")
        earlier.add(name)
    if choice.mode == "none":
        return []
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice", "requires a call, but there are no tools")
    if choice.name is None:
        return tools
    if choice.name not in names:
        raise InvalidRequest("tool_choice", f"names {choice.name!r}, which is none of the tools ({', '.join(names)})")
    return [tool for tool in tools if tool["function"]["name"] == choice.name]
