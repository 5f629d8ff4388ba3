"""The bodies of OpenAI's completion and chat requests, as this server reads them.

Unknown fields are ignored, as OpenAI does. Known ones that this server does not serve yet are refused when they are
set to anything that would change the answer (`_UNSUPPORTED`), so nothing is silently left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.sampling_fields import SamplingFields

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields with the values that ask for nothing."""


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to show with their log-probabilities, beside the one taken; to 20."""
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts: one text, one list of token ids, or several of either. Raises `InvalidRequest`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if not prompts or len(prompts) < len(self.prompt):
            raise InvalidRequest("prompt", "must be a string, token ids, or a list of those, and not empty")
        return prompts


_ROLES = ("system", "developer", "user", "assistant", "tool")


class ContentPart(msgspec.Struct):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def as_text(self, field: str) -> dict[str, str]:
        """The message as chat templates want it. Raises `InvalidRequest` for an unknown role, images and the like."""
        if self.role not in _ROLES:
            raise InvalidRequest(f"{field}.role", f"is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(f"{field}.content[{i}]", f"is of type {part.type!r}; only text can be read")
            return {"role": self.role, "content": "".join(part.text or "" for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "max_completion_tokens",  # OpenAI's newer name
        "logprobs": "top_logprobs",
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    wants_logprobs: bool | None = msgspec.field(default=None, name="logprobs")
    top_logprobs: int | None = None
    """How many of the likeliest tokens to show, to 20; `logprobs` must be true."""
    functions: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def params(self, **defaults: Any) -> SamplingParams:
        """As in `SamplingFields`."""
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest("top_logprobs", "is only of use when logprobs is true")
        wanted = {"logprobs": 0} if self.wants_logprobs else {}
        return super().params(**defaults, **wanted)

    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates want them. Raises `InvalidRequest`."""
        if not self.messages:
            raise InvalidRequest("messages", "is empty; give at least one message")
        return [message.as_text(f"messages[{i}]") for i, message in enumerate(self.messages)]


Body = TypeVar("Body", CompletionRequest, ChatRequest)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Reads a request's JSON. Raises `InvalidRequest` naming the field at fault."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error
    _refuse_unsupported(request)
    return request


def _refuse_unsupported(request: SamplingFields) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and not any(type(value) is type(none) and value == none for none in harmless):
            raise InvalidRequest(name, "is not supported by this server")


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec's "Expected `float`, got `str` - at `$.temperature`" with the field on its own."""
    message, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    if not field and (missing := re.search(r"missing required field `(\w+)`", message)):
        return InvalidRequest(missing[1], "is required")
    return InvalidRequest(field or "body", message[:1].lower() + message[1:])


def _not_json(body: bytes, error: Exception) -> InvalidRequest:
    """Python's json writes NaN and Infinity, which JSON does not have: name the field that is one."""
    with contextlib.suppress(ValueError):  # really not JSON
        fields = json.loads(body)
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                return InvalidRequest(name, f"is {value}; it must be a finite number")
    return InvalidRequest("body", f"is not valid JSON: {error}")
