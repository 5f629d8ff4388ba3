"""llama.cpp's built-in chat templates, which are written in C++ and selected by name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from cppbatch.errors import InvalidRequest, LlamaError
from cppbatch.llama.library import C


@cache
def builtin_template_names() -> tuple[str, ...]:
    """The names, in alphabetical order. Loads llama.cpp."""
    n = C.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    C.llama_chat_builtin_templates(names, n)
    return tuple(sorted((name or b"").decode() for name in names))


def apply_builtin_template(name: str, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
    """The prompt for a conversation, without the BOS token unless the template itself writes it.

    `messages`: pairs of a role and a text. Raises `InvalidRequest` for text with a null character, which would end it
    in C, and `LlamaError` for an unknown name.
    """
    pairs = [(role.encode(errors="replace"), text.encode(errors="replace")) for role, text in messages]
    for i, pair in enumerate(pairs):
        if any(b"\0" in part for part in pair):
            raise InvalidRequest(f"messages[{i}]", "contains a null character, which this chat template cannot render")
    chat = (C.llama_chat_message * len(pairs))(*pairs)
    size = 0
    while True:  # the first call returns the number of bytes of the prompt
        buffer = ctypes.create_string_buffer(size)
        needed = C.llama_chat_apply_template(name.encode(), chat, len(pairs), add_generation_prompt, buffer, size)
        if needed < 0:
            raise LlamaError(f"unknown llama.cpp chat template {name!r}")
        if needed <= size:
            return buffer.raw[:needed].decode(errors="replace")
        size = needed
