"""How wide and how deep a JSON text is, measured on its bytes before anybody makes objects of it.

A megabyte of text in one string is decoded in a millisecond, a megabyte of small values takes a hundred times as long,
with Python's lock held; and values nested hundreds deep overflow the stack of the code that walks them later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_NESTED = 128
"""Lists and objects within each other. Python's own limit is for the whole stack, so code that walks a value later,
with more of the stack in use, would fail where decoding did not."""

_MOST_MEMBERS = 100_000  # of all objects; decoding them takes some 60 ms, with Python's lock held
_MOST_CONTAINERS = 100_000  # lists and objects
_MOST_VALUES = 500_000  # in all lists, as token ids
_SMALL = 1 << 18  # bytes, of which not enough values can be made to hold up anybody
_CHUNK = 1 << 20  # bytes at once
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class JsonShape(NamedTuple):
    """Counts of what stands outside strings. Of a text that is no JSON they are upper bounds at most."""

    depth: int
    """Lists and objects within each other."""
    containers: int
    """Lists and objects in all."""
    members: int
    """Of all objects together."""
    values: int
    """Of all lists and objects together, members included; one for an empty one."""


def json_shape(text: bytes) -> JsonShape:
    """Measures a JSON text in one pass over its bytes; numpy lets other threads run meanwhile."""
    depth = deepest = containers = members = commas = 0
    in_string = escaped = False
    for start in range(0, len(text), _CHUNK):
        data = np.frombuffer(text, np.uint8, min(_CHUNK, len(text) - start), start)
        quotes = data == _QUOTE
        if escaped or b"\\" in text[start : start + _CHUNK]:
            hidden = _escaped(data, escaped)
            quotes &= ~hidden[:-1]
            escaped = bool(hidden[-1])
        inside = np.logical_xor.accumulate(quotes)  # from an opening quote to before its closing one
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


def _escaped(data: Bytes, first: bool) -> Mask:
    """Which bytes stand behind an odd number of backslashes: bool[n + 1], the last one for the byte that follows.

    `first`: whether byte 0 does.
    """
    n = len(data)
    slashes = data == _BACKSLASH
    if first:
        slashes[0] = False  # it is escaped itself and escapes nothing
    place = np.arange(n, dtype=np.int32)
    before_run = np.maximum.accumulate(np.where(slashes, -1, place))  # the last byte that is no backslash
    hidden = np.zeros(n + 1, np.bool_)
    hidden[1:] = slashes & ((place - before_run) % 2 == 1)
    hidden[0] = first
    return hidden


def excess(text: bytes) -> str | None:
    """What a JSON text has too much of, as the end of a sentence; None: it may be decoded."""
    if len(text) <= _SMALL and text.count(b"[") + text.count(b"{") <= MOST_NESTED:
        return None
    shape = json_shape(text)
    if shape.depth > MOST_NESTED:
        return f"has lists and objects nested more than {MOST_NESTED} deep"
    if shape.containers > _MOST_CONTAINERS:
        return f"has {shape.containers:,} lists and objects; {_MOST_CONTAINERS:,} may be"
    if shape.members > _MOST_MEMBERS:
        return f"has {shape.members:,} members of objects; {_MOST_MEMBERS:,} may be"
    if shape.values > _MOST_VALUES:
        return f"has {shape.values:,} values; {_MOST_VALUES:,} may be"
    return None
