"""Prompts that end in the middle of the last message, for the model to go on with it."""

from __future__ import annotations

from cppbatch.chat.capabilities import ChatMessage
from cppbatch.errors import InvalidRequest

_FIELD = "continue_final_message"
_MARK = "END-OF-THE-UNFINISHED-MESSAGE "
"""Ends with a space, so that one can see whether the template trims messages."""


def mark_end(messages: list[ChatMessage]) -> str:
    """Puts a mark after the last message's text, in place, and returns that text. Raises `InvalidRequest`."""
    content = messages[-1]["content"] if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    texts = [i for i, part in enumerate(content or []) if "text" in part]
    if not content or not texts:
        raise InvalidRequest(_FIELD, "needs a last message that has text to go on with")
    last = texts[-1]
    text: str = content[last]["text"]
    messages[-1]["content"] = [*content[:last], {**content[last], "text": text + _MARK}, *content[last + 1 :]]
    return text


def cut_after(text: str, rendered: str) -> str:
    """The prompt up to the mark. Raises `InvalidRequest` when the template left out, or changed, the last message."""
    at = rendered.rfind(_MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise InvalidRequest(
            _FIELD, "cannot be served: this model's chat template leaves out a part of the last message"
        )
    before = rendered[:at]
    return before if rendered.startswith(_MARK, at) else before.rstrip()  # it trims messages: so do we
