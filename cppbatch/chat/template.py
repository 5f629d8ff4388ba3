"""A model's chat template: conversations to prompts."""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from cppbatch.errors import InvalidRequest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models that bring no template of their own, as llama.cpp does."""


class ChatTemplate:
    """A Jinja template, run in a sandbox because it comes with a downloaded file.

    Raises `InvalidRequest` when the template itself is broken.
    """

    source: str
    """As given; ChatML where none was."""

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        self.source = source or CHATML
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                "messages", f"cannot be used: this model's chat template is broken ({error})"
            ) from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    @property
    def takes_tools(self) -> bool:
        """Whether it does something with tools."""
        return "tools" in self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for the assistant's next turn. Raises `InvalidRequest` with the template's own complaint.

        `messages` are OpenAI's; `kwargs` go to the template.
        """
        if continue_final_message:
            content = messages[-1]["content"]
            whole = self.render(messages, tools=tools, add_generation_prompt=False, **kwargs)
            return whole[: whole.rindex(content) + len(content)]
        if add_generation_prompt is None:
            add_generation_prompt = True
        variables = self._tokens | kwargs | {"messages": messages, "tools": tools}
        try:
            return self._template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: it may fail in any way
            raise InvalidRequest("messages", f"do not fit this model's chat template: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As the templates of the Hugging Face hub expect it: Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
