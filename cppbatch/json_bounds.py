"""Limits on the size and depth of a JSON text, measured on its bytes before it is decoded.

Decoding a megabyte takes a millisecond if it is one string, but a hundred times as long if it is small values, with
the GIL held. Values nested hundreds of levels deep overflow the stack of code that walks them later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_NESTED = 128
"""Maximum depth of lists and objects. Python's own limit covers the whole stack: code that walks a decoded value with
more of the stack in use could fail where decoding did not."""

_MAX_MEMBERS = 100_000  # in all objects; decoding them takes about 60 ms, with the GIL held
_MAX_CONTAINERS = 100_000  # lists and objects
_MAX_VALUES = 500_000  # in all lists, for example token ids
_MEASURED_BYTES = 1 << 20  # bytes measured at once
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class JsonShape(NamedTuple):
    """Counts outside strings. For text that is not JSON, they are upper bounds."""

    depth: int
    """The depth of nested lists and objects."""
    containers: int
    """The number of lists and objects."""
    members: int
    """The number of members of all objects."""
    values: int
    """The number of values in all lists and objects, members included; an empty one counts as one value."""


def json_shape(text: bytes) -> JsonShape:
    """Measures a JSON text in one pass over its bytes. numpy releases the GIL meanwhile."""
    depth = deepest = containers = members = commas = 0
    in_string = escaped = False
    for start in range(0, len(text), _MEASURED_BYTES):
        data = np.frombuffer(text, np.uint8, min(_MEASURED_BYTES, len(text) - start), start)
        quotes = data == _QUOTE
        if escaped or b"\\" in text[start : start + _MEASURED_BYTES]:
            hidden = _find_escaped(data, escaped)
            quotes &= ~hidden[:-1]
            escaped = bool(hidden[-1])
        inside = np.logical_xor.accumulate(quotes)  # from an opening quote up to its closing one, exclusive
        if in_string:
            inside = ~inside
        in_string = bool(inside[-1])
        outside = data[~inside]
        opens = (outside == ord("[")) | (outside == ord("{"))
        closes = (outside == ord("]")) | (outside == ord("}"))
        level = depth + np.cumsum(opens.astype(np.int32) - closes)
        if len(level):
            deepest, depth = max(deepest, int(level.max())), int(level[-1])
        containers += int(np.count_nonzero(opens))
        members += int(np.count_nonzero(outside == _COLON))
        commas += int(np.count_nonzero(outside == _COMMA))
    return JsonShape(deepest, containers, members, commas + containers)


def _find_escaped(data: Bytes, first: bool) -> Mask:
    """Which bytes follow an odd number of backslashes: bool[n + 1]; the last entry is for the byte after `data`.

    `first`: whether byte 0 is escaped by a backslash before `data`.
    """
    n = len(data)
    slashes = data == _BACKSLASH
    if first:
        slashes[0] = False  # an escaped backslash escapes nothing
    index = np.arange(n, dtype=np.int32)
    before_run = np.maximum.accumulate(np.where(slashes, -1, index))  # the last byte that is not a backslash
    hidden = np.zeros(n + 1, np.bool_)
    hidden[1:] = slashes & ((index - before_run) % 2 == 1)
    hidden[0] = first
    return hidden


def excess(text: bytes) -> str | None:
    """Why a JSON text exceeds the limits, as the end of a sentence; None: it is within them."""
    # decoding up to 256 KiB is always fast enough
    if len(text) <= 1 << 18 and text.count(b"[") + text.count(b"{") <= MOST_NESTED:
        return None
    shape = json_shape(text)
    if shape.depth > MOST_NESTED:
        return f"is nested too deeply; the limit is {MOST_NESTED} levels"
    if shape.containers > _MAX_CONTAINERS:
        return f"has {shape.containers:,} lists and objects; the limit is {_MAX_CONTAINERS:,}"
    if shape.members > _MAX_MEMBERS:
        return f"has {shape.members:,} object members; the limit is {_MAX_MEMBERS:,}"
    if shape.values > _MAX_VALUES:
        return f"has {shape.values:,} values; the limit is {_MAX_VALUES:,}"
    return None
