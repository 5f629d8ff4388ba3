"""A model's chat template: conversations to prompts."""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from cppbatch.chat.capabilities import ChatMessage, TemplateCapabilities, detect_capabilities
from cppbatch.chat.continuation import cut_after, mark_end
from cppbatch.chat.message_adaptation import adapt_message
from cppbatch.chat.sandbox import compile_template, run
from cppbatch.errors import ConfigError, InvalidRequest

_TEMPLATE_FOLDER = resources.files("cppbatch.chat") / "templates"


def builtin_names() -> list[str]:
    """The names, in alphabetical order."""
    return sorted(
        file.name.removesuffix(".jinja") for file in _TEMPLATE_FOLDER.iterdir() if file.name.endswith(".jinja")
    )


def find_template(value: str) -> str:
    """The template that `--chat-template` means: a known name, the template's own text, or the path of a file.

    Raises `ConfigError` when it is none of these, or is no template.
    """
    source = _read_template(value)
    if not source.strip():
        raise ConfigError(f"--chat-template {value}: the file is empty")
    compile_template(source)
    return source


def _read_template(value: str) -> str:
    if "{{" in value or "{%" in value:
        return value
    if value in builtin_names():
        return _read_builtin(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        names, reason = ", ".join(builtin_names()), getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template is {value[:200]!r}: it must be one of {names}, or a template's text, or a file that has "
            f"one ({reason})"
        ) from error


def _read_builtin(name: str) -> str:
    return (_TEMPLATE_FOLDER / f"{name}.jinja").read_text("utf-8")


CHATML = _read_builtin("chatml")
"""For models that bring no template of their own, as llama.cpp does."""

_PROBE_SECONDS = 0.25


class ChatTemplate:
    """A Jinja template, compiled once and run in a sandbox because it comes with a downloaded file.

    Raises `InvalidRequest` when the template itself is broken.
    """

    source: str
    """As given; ChatML where none was."""

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        self.source = source or CHATML
        try:
            self._template = compile_template(self.source)
        except ConfigError as error:
            raise InvalidRequest("messages", f"cannot be used with this model: {error}") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """What the template supports. Found out at the first use, by rendering with it."""
        return detect_capabilities(self._try)

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for the assistant's next turn, or with `continue_final_message` for the rest of the last message.

        `messages` and `tools` are OpenAI's, with text only; `kwargs` are further variables for the template
        (`enable_thinking`, `documents`, ...), none of which may have the name of an argument here. The prompt ends
        with the beginning of the assistant's turn unless `add_generation_prompt` is False or the last message goes on.
        Raises `InvalidRequest`: the template's own complaint, or a last message that cannot be continued.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message",
                "and add_generation_prompt exclude each other: one goes on with the last message, one begins another",
            )
        wanted = [adapt_message(message, self.capabilities) for message in messages]
        end = mark_end(wanted) if continue_final_message else ""
        variables = {"documents": None, **self._tokens, **kwargs, "messages": wanted, "tools": tools or None}
        try:
            text = run(self._template, {**variables, "add_generation_prompt": add_generation_prompt})
        except Exception as error:  # a template is a program: it may fail in any way
            raise InvalidRequest("messages", f"do not fit this model's chat template: {error}") from error
        return cut_after(end, text) if continue_final_message else text

    def _try(self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None) -> str | None:
        variables = {"documents": None, **self._tokens, "messages": messages, "tools": tools}
        try:
            return run(self._template, {**variables, "add_generation_prompt": True}, seconds=_PROBE_SECONDS)
        except Exception:  # a refusal is an answer here
            return None
