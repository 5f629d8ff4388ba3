"""Chat templates by name, for models that bring none or a broken one.

None of them writes the BOS token: the engine adds it where the model wants one.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from cppbatch.chat.sandbox import compile_template
from cppbatch.errors import ConfigError

_FOLDER = resources.files("cppbatch.chat") / "templates"


def known_names() -> list[str]:
    """The names, in alphabetical order."""
    return sorted(file.name.removesuffix(".jinja") for file in _FOLDER.iterdir() if file.name.endswith(".jinja"))


def find_template(value: str) -> str:
    """The template that `--chat-template` means: a known name, the template's own text, or the path of a file.

    Raises `ConfigError` when it is none of these, or is no template.
    """
    source = _read(value)
    if not source.strip():
        raise ConfigError(f"--chat-template {value}: the file is empty")
    compile_template(source)
    return source


def _read(value: str) -> str:
    if "{{" in value or "{%" in value:
        return value
    if value in known_names():
        return _known(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        names, reason = ", ".join(known_names()), getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template is {value[:200]!r}: it must be one of {names}, or a template's text, or a file that has "
            f"one ({reason})"
        ) from error


def _known(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text("utf-8")


CHATML = _known("chatml")
"""For models that bring no template of their own, as llama.cpp does."""
