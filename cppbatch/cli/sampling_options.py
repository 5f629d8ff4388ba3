"""How texts are sampled, for commands that have prompts of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

Command = Callable[..., Any]

_OPTIONS = [
    click.option("-n", "--n-predict", "max_tokens", type=int, default=None, help="Most tokens for each prompt."),
    click.option("--temp", "temperature", type=float, default=None, help="Temperature; 0: greedy."),
    click.option("--top-k", type=int, default=None, help="Sample among this many likeliest tokens."),
    click.option("--top-p", type=float, default=None, help="Sample among tokens with this probability together."),
    click.option(
        "--min-p", type=float, default=None, help="Drop tokens less than this times as likely as the likeliest."
    ),
    click.option("--repeat-penalty", "repetition_penalty", type=float, default=None, help="Lowers recent tokens."),
    click.option(
        "-j", "--json-schema", metavar="JSON", default=None, help="The texts are JSON of this schema; {} for any."
    ),
    click.option("--grammar", metavar="TEXT", default=None, help="The texts follow this GBNF or Lark grammar."),
    click.option("-s", "--seed", type=int, default=None, help="Seed; the same one gives the same text."),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End a text where this comes; may be given several times."
    ),
]  # fmt: skip
_NAMES = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "json_schema", "grammar", "seed",
    "stop",
)  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds these options; the command gets `params`, those fields of `SamplingParams` that were given."""

    @wraps(command)
    def with_params(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in _NAMES}
        params = {name: value for name, value in given.items() if value is not None and value != ()}
        if stop := params.get("stop"):
            params["stop"] = list(stop)
        return command(params=params, **arguments)

    wrapped: Command = with_params
    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped
