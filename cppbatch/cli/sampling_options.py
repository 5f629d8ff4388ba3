"""Options of sampling, for commands that run prompts."""

from __future__ import annotations

from functools import wraps
from typing import Any

import click

from cppbatch.cli.engine_options import Command, with_options

DEFAULT_MAX_TOKENS = 512
"""Of a plain prompt, which few models end by themselves, without -n."""

_OPTIONS = [
    click.option(
        "-n", "--n-predict", "max_tokens", type=int, default=None,
        help=f"Maximum tokens per prompt; -1: as many as the context holds.  [default: {DEFAULT_MAX_TOKENS}]",
    ),
    click.option("--temp", "temperature", type=float, default=None, help="Temperature; 0: greedy."),
    click.option("--top-k", type=int, default=None, help="Sample from this many of the likeliest tokens."),
    click.option("--top-p", type=float, default=None, help="Sample from the likeliest tokens up to this probability."),
    click.option(
        "--min-p", type=float, default=None, help="Drop tokens less than this times as likely as the likeliest token."
    ),
    click.option("--repeat-penalty", "repetition_penalty", type=float, default=None, help="Penalty for recent tokens."),
    click.option(
        "-j", "--json-schema", metavar="JSON", default=None, help="Write JSON of this schema; {} for any JSON."
    ),
    click.option("--grammar", metavar="TEXT", default=None, help="Write text of this GBNF or Lark grammar."),
    click.option("-s", "--seed", type=int, default=None, help="Seed; the same seed gives the same text."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text; may be given several times."),
]  # fmt: skip
_NAMES = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "json_schema", "grammar", "seed",
    "stop",
)  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds the options of sampling.

    The command gets `params`, the given fields of `SamplingParams`, and `is_capped`: whether -n is not given, so that
    plain prompts get `DEFAULT_MAX_TOKENS`.
    """

    @wraps(command)
    def with_params(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in _NAMES}
        is_capped = given["max_tokens"] is None
        if given["max_tokens"] == -1:
            given["max_tokens"] = None
        params = {name: value for name, value in given.items() if value is not None and value != ()}
        if stop := params.get("stop"):
            params["stop"] = list(stop)
        return command(params=params, is_capped=is_capped, **arguments)

    return with_options(with_params, _OPTIONS)
