"""Sampling options, named as in llama.cpp: for commands that run prompts, and the server's defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from cppbatch.cli.engine_options import Command, Option, option, with_options
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, MOST_BIAS, PARAMS, SAMPLERS, SamplingParams
from cppbatch.errors import ConfigError

_DEFAULTS = SamplingParams()


def _sampler_names(_context: object, _option: object, given: str | None) -> list[str] | None:
    if given is None:
        return None
    from cppbatch.server.api.llama_server.fields import SAMPLER_NAMES, sampler_names

    is_letters = given not in SAMPLER_NAMES and all(letter in SAMPLER_NAMES for letter in given)
    return sampler_names(given if is_letters else [name for name in given.split(";") if name])


def _seed(_context: object, _option: object, given: int | None) -> int | None:
    return -1 if given == 2**32 - 1 else given  # llama.cpp stores -1 as this number


def _file_text(_context: object, _option: object, given: Path | None) -> str | None:
    if given is None:
        return None
    try:
        return given.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{given} cannot be read as text ({error})") from error


def _biases(_context: object, _option: object, given: tuple[str, ...]) -> dict[str, float] | None:
    found: dict[str, float] = {}
    for each in given:
        if not (parts := _BIAS.fullmatch(each.replace(" ", ""))):
            raise click.BadParameter(f"{each!r:.80} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043-1")
        token, bias = str(int(parts[1])), float(parts[2])
        found[token] = max(-MOST_BIAS, min(MOST_BIAS, found.get(token, 0.0) + bias))  # -inf is the least
    return found or None


def _unescape(text: str) -> str:
    """Replaces \\n, \\r, \\t, quotes, backslashes and \\xHH; others stay as they are."""
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1]) or chr(int(found[1][1:], 16)), text)


_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", re.IGNORECASE)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(r"\\([nrt'\"\\]|x[0-9a-fA-F]{2})")


def _breakers(_context: object, _option: object, given: tuple[str, ...]) -> list[str] | None:
    return [text for text in given if text != "none"] if given else None


_CONVERSIONS: dict[str, dict[str, Any]] = {
    "dry_sequence_breakers": {"multiple": True, "metavar": "TEXT", "show_default": False, "callback": _breakers},
    "samplers": {"metavar": "NAMES", "callback": _sampler_names, "show_default": ";".join(SAMPLERS)},
    "ignore_eos": {"is_flag": True, "show_default": False},
    "seed": {"type": int, "callback": _seed, "show_default": "random"},
}


def _sampling(field: str) -> Option:
    """The option for a field of `SamplingParams`. None: not given."""
    param, default = PARAMS[field], getattr(_DEFAULTS, field)
    return option(
        *(param.flags or f"--{field.replace('_', '-')}").split(), field, env=field.upper(),
        llama_env=param.llama_env, default=None, help=param.help,
        **_CONVERSIONS.get(field, {"type": type(default), "show_default": f"{default}"}),
    )  # fmt: skip


_SAMPLING = [_sampling(field) for field in PARAMS]
_GRAMMAR_OPTIONS = [
    click.option(
        "-j", "--json-schema", metavar="JSON", default=None, help="Constrain the output to JSON with this schema; {} "
        "for any JSON."
    ),
    click.option(
        "-jf", "--json-schema-file", metavar="FILE", default=None, type=click.Path(path_type=Path), callback=_file_text,
        help="As --json-schema, from a file.",
    ),
    click.option("--grammar", metavar="TEXT", default=None, help="Constrain the output to this GBNF or Lark grammar."),
    click.option(
        "--grammar-file", metavar="FILE", default=None, type=click.Path(path_type=Path), callback=_file_text,
        help="As --grammar, from a file.",
    ),
    click.option(
        "-l", "--logit-bias", multiple=True, metavar="TOKEN_ID+BIAS", callback=_biases,
        help="Add to the logit of a token, by its id: 15043+1, 15043-1, 15043-inf; may be repeated.",
    ),
]  # fmt: skip
_OUTPUT = [
    *_GRAMMAR_OPTIONS,
    click.option(
        "--compact-json/--no-compact-json", default=None,
        help="Write JSON of a schema without whitespace between its tokens.  [default: only in batch]",
    ),
    click.option(
        "--choice", "guided_choice", multiple=True, metavar="TEXT",
        help="Constrain the output to one of these texts; repeat for each text.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text; may be repeated."),
]  # fmt: skip
_SERVED = [
    *_GRAMMAR_OPTIONS,
    click.option(
        "-r", "--reverse-prompt", "stop", multiple=True, metavar="TEXT", help="Stop at this text; may be repeated."
    ),
    click.option(
        "-sp", "--special", "shows_special", is_flag=True,
        help="Return the texts of control tokens too.",
    ),
    click.option(
        "-e", "--escape/--no-escape", "escapes", default=True,
        help="Read \\n, \\t and other escapes in --reverse-prompt and --dry-sequence-breaker.",
    ),
]  # fmt: skip
_FILES = {"json_schema_file": "json_schema", "grammar_file": "grammar"}
_GRAMMAR_NAMES = ("json_schema", "grammar", "logit_bias", *_FILES)
_OUTPUT_NAMES = (*_GRAMMAR_NAMES, "compact_json", "guided_choice", "stop")


def _n_predict(help: str) -> Option:
    return option(
        "-n", "--predict", "--n-predict", "n_predict", env="N_PREDICT", llama_env="LLAMA_ARG_N_PREDICT",
        type=int, default=None,
        help=help,
    )  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds sampling options to a command that runs prompts.

    The command gets `params`, the given fields of `SamplingParams`, and `is_capped`: whether -n is not given, so that
    plain prompts get `DEFAULT_MAX_TOKENS`.
    """

    @wraps(command)
    def with_params(n_predict: int | None, **arguments: Any) -> Any:
        params = _pop_given(arguments, (*PARAMS, *_OUTPUT_NAMES))
        params |= {name: list(params[name]) for name in ("stop", "guided_choice") if name in params}
        _check_texts(params)
        if n_predict is not None and n_predict != -1 and n_predict < 1:
            raise ConfigError(f"max_tokens (-n) is {n_predict}; it must be at least 1, or -1 for no maximum")
        if n_predict not in (None, -1):
            params["max_tokens"] = n_predict
        return command(params=params, is_capped=n_predict is None, **arguments)

    n_predict = _n_predict(
        f"Maximum tokens per prompt; -1: until the context is full.  [default: {DEFAULT_MAX_TOKENS}]"
    )
    return with_options(with_params, [n_predict, *_SAMPLING, *_OUTPUT])


def _check_texts(params: dict[str, Any]) -> None:
    """Raises `ConfigError` for texts that are not UTF-8: requests and ledgers are JSON."""
    for name, value in params.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise ConfigError(f"{name}: {text!r:.80} is not UTF-8 text") from None


def sampling_default_options(command: Command) -> Command:
    """Adds the server's sampling defaults.

    The command gets `sampling_defaults`, the given fields of `SamplingParams`.
    """

    @wraps(command)
    def with_defaults(n_predict: int | None, **arguments: Any) -> Any:
        sampling = _pop_given(arguments, (*PARAMS, *_GRAMMAR_NAMES, "stop"))
        if arguments.pop("shows_special"):
            sampling["skip_special_tokens"] = False
        read = _unescape if arguments.pop("escapes") else str
        for name in {"stop", "dry_sequence_breakers"} & sampling.keys():
            sampling[name] = [read(text) for text in sampling[name]]
        if n_predict is not None:
            sampling["max_tokens"] = n_predict
        return command(sampling_defaults=sampling, **arguments)

    n_predict = _n_predict(
        "Default maximum tokens of a completion; -1: until the context is full. If not given: 16 for /v1/completions, "
        "otherwise -1. This and the following options are defaults for requests that do not set the field."
    )
    return with_options(with_defaults, [n_predict, *_SAMPLING, *_SERVED])


def _pop_given(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Removes these options from `arguments`, and returns those that the user has given."""
    taken = {name: arguments.pop(name) for name in names}
    given = {name: value for name, value in taken.items() if value is not None and value != ()}
    for name, field in _FILES.items():
        if name in given:
            given[field] = given.pop(name)
    return given
