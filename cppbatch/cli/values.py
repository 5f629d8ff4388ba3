"""Lists and ranges on the command line, read by callbacks of their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from cppbatch.bench.prompts import Lengths

Callback = Callable[[click.Context, click.Parameter, str], tuple[str, ...]]


def numbers(_context: click.Context, _option: click.Parameter, given: str) -> tuple[int, ...]:
    """`1,4,16`: numbers from 1, as a tuple."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{given!r}: write numbers from 1 with commas between them, like 1,4,16")
    return tuple(dict.fromkeys(map(int, parts)))


def names_of(known: Sequence[str]) -> Callback:
    """`one,other`: some of these names, as a tuple."""

    def names(_context: click.Context, _option: click.Parameter, given: str) -> tuple[str, ...]:
        parts = [part.strip() for part in given.split(",")]
        for part in parts:
            if part not in known:
                raise click.BadParameter(f"{part!r}: write some of {', '.join(known)}, with commas between them")
        return tuple(dict.fromkeys(parts))

    return names


def lengths(_context: click.Context, _option: click.Parameter, given: str | None) -> Lengths | None:
    """`128`, or `16-256`; None where nothing is given."""
    if given is None:
        return None
    parts = given.split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{given!r}: write a number, or two like 16-256")
    return Lengths(int(parts[0]), int(parts[-1]))
