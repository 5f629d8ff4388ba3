"""The tools of `POST /v1/responses`: functions and custom tools, perhaps in namespaces, and those that are not used.

A namespace is a group of the client's own tools. The model gets them by their plain names, or with the namespace before
the name if another tool has the same one. Tools that OpenAI's servers run (`web_search` ...) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cppbatch.chat.tools import ToolChoice, allowed_choice, tool_choice_of
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_CALLABLE = ("function", "custom")
_NAMESPACE = "namespace"


class CustomToolFormat(msgspec.Struct, omit_defaults=True):
    """The text format of a custom tool."""

    type: str
    """`text` or `grammar`."""
    syntax: str | None = None
    """`lark` or `regex`."""
    definition: str | None = None
    """The grammar."""


class ResponsesTool(msgspec.Struct):
    """A function that the assistant may call, a custom tool, which takes text, or a namespace of such tools. Tools of
    other types are left out."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None
    """The JSON schema of the arguments."""
    strict: bool | None = None
    format: CustomToolFormat | None = None
    """For a custom tool."""
    tools: list[ResponsesTool] | None = None
    """For a namespace."""

    def as_tool(self, field: str, name: str, description: str | None) -> Json:
        """OpenAI's chat object, with this name and description. `field`: the tool's name in errors. Raises
        `InvalidRequest`."""
        if not self.name:
            raise InvalidRequest(f"{field}.name", "is required")
        if self.type == "custom":
            return {"type": "custom", "custom": self._custom(field, name, description)}
        given = {"description": description, "parameters": self.parameters, "strict": self.strict}
        function = {"name": name, **{key: value for key, value in given.items() if value is not None}}
        return {"type": "function", "function": function}

    def _custom(self, field: str, name: str, description: str | None) -> Json:
        custom: Json = {"name": name, "description": description}
        if self.format is None:
            return custom
        custom["format"] = {"type": self.format.type}
        if self.format.type == "grammar":
            for key in ("syntax", "definition"):
                if getattr(self.format, key) is None:
                    raise InvalidRequest(f"{field}.format.{key}", "is required")
            grammar = {"syntax": self.format.syntax, "definition": self.format.definition}
            custom["format"]["grammar"] = grammar
        return custom


class NamedTool(msgspec.Struct, omit_defaults=True):
    """A tool by its name."""

    type: str
    name: str = ""
    namespace: str | None = None


class ResponsesToolChoice(msgspec.Struct, omit_defaults=True):
    """`tool_choice`: the tool to call, or the allowed tools (type `allowed_tools`)."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: str | None = None
    """For `allowed_tools`: `auto` or `required`."""
    tools: list[NamedTool] | None = None
    """For `allowed_tools`."""


# --- in the response -------------------------------------------------------------------------------------------------


class ResponsesFunction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function of the request."""

    name: str
    description: str | None
    parameters: Json | None
    strict: bool | None


class ResponsesCustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A custom tool of the request."""

    name: str
    description: str | None
    format: CustomToolFormat


class ResponsesNamespace(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """A namespace of the request."""

    name: str
    description: str | None
    tools: list[ResponsesFunction | ResponsesCustomTool]


# --- the tools that are used -----------------------------------------------------------------------------------------


class UsedTools:
    """The tools of a request that the model gets."""

    def __init__(self, tools: list[ResponsesTool], added: Mapping[str, list[ResponsesTool]]) -> None:
        """`added`: {the name of a field: further tools in it}; a tool replaces an earlier one of its name there. Raises
        `InvalidRequest`."""
        found = {field: (tool, group) for field, tool, group in _callable("tools", tools)}
        for name, more in added.items():
            for field, tool, group in _callable(name, more):
                known = (key for key, (each, its) in found.items() if _name(each, its) == _name(tool, group))
                found.pop(next(known, ""), None)
                found[field] = tool, group
        names = Counter(tool.name for tool, _ in found.values())
        self._model_names: dict[tuple[str | None, str], str] = {}
        self.functions: list[Json] = []
        """OpenAI's chat objects."""
        self.fields = {f"tools[{i}]": field for i, field in enumerate(found)}
        """{the name of one of `functions` in errors: the client's name for it}."""
        described: set[str] = set()
        for field, (tool, group) in found.items():
            is_plain = group is None or names[tool.name] == 1
            name = tool.name if is_plain or group is None else f"{group.name.rstrip('_')}__{tool.name}"
            self._model_names[_name(tool, group)] = name
            parts = [tool.description]
            if group and group.name not in described:
                parts.insert(0, group.description)
                described.add(group.name)
            description = "\n\n".join(filter(None, parts)) or tool.description
            self.functions.append(tool.as_tool(field, name, description))
        self._client_names = {name: key for key, name in self._model_names.items()}
        self.echo = [shown for tool in tools if (shown := _echo(tool))]
        """The request's tools in the response."""
        self.left_out = tuple(
            field
            for name, each in (("tools", tools), *added.items())
            for field, tool in _numbered(name, each)
            if tool.type not in (*_CALLABLE, _NAMESPACE)
        )
        """The fields of tools that are not used."""

    def model_name(self, namespace: str | None, name: str) -> str:
        """The name by which the model gets a tool, also one that is not among the tools."""
        return self._model_names.get((namespace, name), name)

    def client_name(self, name: str) -> tuple[str | None, str]:
        """The namespace and the name of the tool that the model calls."""
        return self._client_names.get(name, (None, name))


def choice_of(wanted: str | ResponsesToolChoice, tools: UsedTools, *, parallel: bool) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest`."""
    if isinstance(wanted, str):
        return tool_choice_of(wanted, parallel=parallel)
    if wanted.type in _CALLABLE:
        name = tools.model_name(wanted.namespace, wanted.name)
        return ToolChoice(mode="required", name=name, parallel=False)
    if wanted.type != "allowed_tools":
        raise InvalidRequest(
            "tool_choice", f"demands {wanted.type!r:.80}, which this server does not have; name a function"
        )
    mode = wanted.mode or "auto"
    names = [tools.model_name(tool.namespace, tool.name) for tool in wanted.tools or [] if tool.type in _CALLABLE]
    if wanted.tools and not names and mode == "auto":  # it allows only tools that this server does not have
        return ToolChoice(mode="none")
    return allowed_choice("tool_choice.mode", mode, names, parallel=parallel)


def _numbered(field: str, tools: list[ResponsesTool]) -> Iterator[tuple[str, ResponsesTool]]:
    return ((f"{field}[{i}]", tool) for i, tool in enumerate(tools))


def _callable(field: str, tools: list[ResponsesTool]) -> Iterator[tuple[str, ResponsesTool, ResponsesTool | None]]:
    """The tools that the client runs: the names of their fields, the tools, their namespaces."""
    for place, tool in _numbered(field, tools):
        if tool.type in _CALLABLE:
            yield place, tool, None
        elif tool.type == _NAMESPACE:
            for inner, each in _numbered(f"{place}.tools", tool.tools or []):
                if each.type in _CALLABLE:
                    yield inner, each, tool


def _name(tool: ResponsesTool, group: ResponsesTool | None) -> tuple[str | None, str]:
    return group.name if group else None, tool.name


def _echo(tool: ResponsesTool) -> ResponsesFunction | ResponsesCustomTool | ResponsesNamespace | None:
    if tool.type == _NAMESPACE:
        inner = [_echo_callable(each) for each in tool.tools or [] if each.type in _CALLABLE]
        return ResponsesNamespace(name=tool.name, description=tool.description, tools=inner)
    return _echo_callable(tool) if tool.type in _CALLABLE else None


def _echo_callable(tool: ResponsesTool) -> ResponsesFunction | ResponsesCustomTool:
    if tool.type == "custom":
        form = tool.format or CustomToolFormat("text")
        return ResponsesCustomTool(name=tool.name, description=tool.description, format=form)
    return ResponsesFunction(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
