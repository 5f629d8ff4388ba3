"""Which part of an input is worked on at once, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from cppbatch.jobs.job_request import JobRequest, RejectedLine

_FIRST = 64
"""Items of the first window: so few that the first results come soon. Each further one has twice as many."""
_ALIKE = 256
"""Letters with which two prompts must both begin for it to be worth while to have them stand together."""
_LETTERS_PER_TOKEN = 4
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Of all endpoints, in the order in which they come in a prompt."""
_ANSWER_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ANSWER_TOKENS = 256
"""Of an answer, if its item does not say how many it may have."""


def chunks(
    items: Iterable[JobRequest | RejectedLine], *, most_items: int = 2048, most_bytes: int = 32 << 20
) -> Iterator[list[JobRequest | RejectedLine]]:
    """Cuts what is read of an input into lists, in order, none empty.

    Each takes at most `most_bytes` of memory, and what its last item takes beyond that.
    """
    window: list[JobRequest | RejectedLine] = []
    n_bytes, n_items = 0, min(_FIRST, most_items)
    for item in items:
        window.append(item)
        n_bytes += _memory(item)
        if len(window) >= n_items or n_bytes >= most_bytes:
            yield window
            window = []
            n_bytes, n_items = 0, min(2 * n_items, most_items)
    if window:
        yield window


def order_requests(items: list[JobRequest], *, longest_first: bool) -> list[JobRequest]:
    """The items in the order in which they are best submitted.

    Items whose prompts begin alike stand together, so that their beginning is computed once and found in the prefix
    cache. Otherwise they stand as in their file; or by the length of what is to be computed, the longest first, so that
    no long one is left over at the end while the others are done.
    """
    groups: dict[tuple[str, str] | int, list[tuple[int, JobRequest]]] = {}
    for place, item in enumerate(items):
        beginning, letters = _prompt(item)
        alike = (item.url, beginning) if letters >= _ALIKE else place
        tokens = letters // _LETTERS_PER_TOKEN + _answer_tokens(item)
        groups.setdefault(alike, []).append((tokens, item))
    if not longest_first:
        return [item for group in groups.values() for _, item in group]
    for group in groups.values():
        group.sort(key=itemgetter(0), reverse=True)
    by_longest = sorted(groups.values(), key=lambda group: group[0][0], reverse=True)
    return [item for group in by_longest for _, item in group]


def _prompt(item: JobRequest) -> tuple[str, int]:
    """The letters with which a prompt begins, `_ALIKE` of them if it has so many, and how many it has in all."""
    beginning, letters = "", 0
    for field in _PROMPT_FIELDS:
        for text in _texts(item.body.get(field)):
            letters += len(text)
            if len(beginning) < _ALIKE:
                beginning = (beginning + text[:_ALIKE])[:_ALIKE]
    return beginning, letters


def _texts(value: object) -> Iterator[str]:
    """All strings in a value, in order. A token's id is written with four letters, which a token has on average."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):
        yield f"{value:04x}"
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)


def _answer_tokens(item: JobRequest) -> int:
    for field in _ANSWER_FIELDS:
        value = item.body.get(field)
        if isinstance(value, int):
            return value
    return _ANSWER_TOKENS


def _memory(item: JobRequest | RejectedLine) -> int:
    """Bytes that an item takes, roughly."""
    if isinstance(item, RejectedLine):
        return sys.getsizeof(item.message)
    size, left = 0, [item.custom_id, item.body]
    while left:
        value: Any = left.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return size
