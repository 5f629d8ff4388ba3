"""Options of sampling, named as in llama.cpp: of commands that run prompts, and the server's defaults."""

from __future__ import annotations

from functools import wraps
from typing import Any

import click

from cppbatch.cli.engine_options import Command, Option, option, with_options
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, SAMPLERS, SamplingParams
from cppbatch.errors import ConfigError

_RANDOM_SEED = 2**32 - 1  # llama.cpp's -1
_DEFAULTS = SamplingParams()


def _sampler_names(_context: object, _option: object, given: str | None) -> list[str] | None:
    if given is None:
        return None
    from cppbatch.server.llama_server.llama_fields import sampler_names

    return sampler_names([name for name in given.split(";") if name])


def _seed(_context: object, _option: object, given: int | None) -> int | None:
    return -1 if given == _RANDOM_SEED else given


def _sampling(*names: str, llama_env: str = "", help: str, **settings: Any) -> Option:
    """An option for a field of `SamplingParams`, which is the last of the names. None: not given."""
    field = names[-1]
    default = getattr(_DEFAULTS, field)
    if default is not None and "is_flag" not in settings and "callback" not in settings:
        settings = {"type": type(default), "show_default": f"{default}", **settings}
    return option(*names, env=field.upper(), llama_env=llama_env, default=None, help=help, **settings)


_SAMPLING = [
    _sampling(
        "--temp", "--temperature", "temperature", llama_env="LLAMA_ARG_TEMPERATURE",
        help="Temperature; 0: greedy.",
    ),
    _sampling(
        "--top-k", "top_k", llama_env="LLAMA_ARG_TOP_K",
        help="Sample from this many most likely tokens; 0: all.",
    ),
    _sampling(
        "--top-p", "top_p", llama_env="LLAMA_ARG_TOP_P",
        help="Sample from the most likely tokens up to this cumulative probability.",
    ),
    _sampling(
        "--min-p", "min_p", llama_env="LLAMA_ARG_MIN_P",
        help="Drop tokens whose probability is less than this fraction of the most likely token's.",
    ),
    _sampling("--typical", "--typical-p", "typical_p", help="Locally typical sampling; 1: off."),
    _sampling("--top-nsigma", "--top-n-sigma", "top_n_sigma", help="Drop tokens more than n standard deviations below "
    "the maximum logit; -1: off."),
    _sampling("--xtc-probability", "xtc_probability", help="Probability of XTC; 0: off."),
    _sampling("--xtc-threshold", "xtc_threshold", help="XTC excludes all but the least likely of the tokens above this "
    "probability."),
    _sampling("--dynatemp-range", "dynatemp_range", help="Range of the dynamic temperature around --temp; 0: off."),
    _sampling("--dynatemp-exp", "dynatemp_exponent", help="Exponent of the dynamic temperature."),
    _sampling(
        "--repeat-penalty", "repetition_penalty", llama_env="LLAMA_ARG_REPEAT_PENALTY",
        help="Repetition penalty for recent tokens; 1: off.",
    ),
    _sampling("--repeat-last-n", "penalty_last_n", help="Recent tokens to penalise; -1: all, 0: no penalties."),
    _sampling(
        "--presence-penalty", "presence_penalty", llama_env="LLAMA_ARG_PRESENCE_PENALTY",
        help="Subtracted from the logit of each recent token.",
    ),
    _sampling(
        "--frequency-penalty", "frequency_penalty", llama_env="LLAMA_ARG_FREQUENCY_PENALTY",
        help="Subtracted for each occurrence of a recent token.",
    ),
    _sampling("--dry-multiplier", "dry_multiplier", help="Strength of DRY, a penalty for repetitions; 0: off."),
    _sampling("--dry-base", "dry_base", help="Base of DRY's penalty, which grows with the repetition."),
    _sampling("--dry-allowed-length", "dry_allowed_length", help="Length of a repetition, in tokens, that DRY does not "
    "penalise."),
    _sampling("--dry-penalty-last-n", "dry_penalty_last_n", help="Number of tokens that DRY searches for repetitions; "
    "-1: all."),
    _sampling(
        "--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, metavar="TEXT", show_default=False,
        callback=lambda _context, _option, given: [text for text in given if text != "none"] if given else None,
        help="Text that a repetition does not extend across for DRY; may be repeated; none: no such text.",
    ),
    _sampling("--adaptive-target", "adaptive_target", help="Adaptive-p: prefer tokens of this probability; -1: off."),
    _sampling("--adaptive-decay", "adaptive_decay", help="Decay of adaptive-p, 0 to 0.99; higher adapts more slowly."),
    _sampling("--mirostat", "mirostat", help="Mirostat version, 1 or 2; 0: off."),
    _sampling("--mirostat-lr", "mirostat_eta", help="Mirostat's learning rate."),
    _sampling("--mirostat-ent", "mirostat_tau", help="Mirostat's target surprise, in bits."),
    _sampling(
        "--samplers", "samplers", metavar="NAMES", callback=_sampler_names, show_default=";".join(SAMPLERS),
        help="Samplers to apply, in this order, separated by semicolons.",
    ),
    _sampling("--ignore-eos", "ignore_eos", is_flag=True, show_default=False, help="Never sample an end token."),
    _sampling(
        "-s", "--seed", "seed", type=int, callback=_seed, show_default="random",
        help="Seed; the same seed gives the same text; -1: random.",
    ),
]  # fmt: skip
_SAMPLING_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent", "repetition_penalty", "penalty_last_n", "presence_penalty",
    "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "adaptive_target", "adaptive_decay", "mirostat", "mirostat_eta", "mirostat_tau",
    "samplers", "ignore_eos", "seed",
)  # fmt: skip
_OUTPUT = [
    click.option(
        "-j", "--json-schema", metavar="JSON", default=None, help="Constrain the output to JSON with this schema; {} "
        "for any JSON."
    ),
    click.option(
        "--compact-json/--no-compact-json", default=None,
        help="Write JSON of a schema without whitespace between its tokens.  [default: only in batch]",
    ),
    click.option(
        "--choice", "guided_choice", multiple=True, metavar="TEXT",
        help="Constrain the output to one of these texts; repeat for each text.",
    ),
    click.option("--grammar", metavar="TEXT", default=None, help="Constrain the output to this GBNF or Lark grammar."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text; may be repeated."),
]  # fmt: skip
_OUTPUT_NAMES = ("json_schema", "compact_json", "guided_choice", "grammar", "stop")


def _n_predict(help: str) -> Option:
    return option(
        "-n", "--predict", "--n-predict", "n_predict", env="N_PREDICT", llama_env="LLAMA_ARG_N_PREDICT",
        type=int, default=None,
        help=help,
    )  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds the options of sampling for commands that run prompts.

    The command gets `params`, the given fields of `SamplingParams`, and `is_capped`: whether -n is not given, so that
    plain prompts get `DEFAULT_MAX_TOKENS`.
    """

    @wraps(command)
    def with_params(n_predict: int | None, **arguments: Any) -> Any:
        params = _given(arguments, (*_SAMPLING_NAMES, *_OUTPUT_NAMES))
        params |= {name: list(params[name]) for name in ("stop", "guided_choice") if name in params}
        if n_predict is not None and n_predict != -1 and n_predict < 1:
            raise ConfigError(f"max_tokens (-n) is {n_predict}; it must be at least 1, or -1 for no maximum")
        if n_predict not in (None, -1):
            params["max_tokens"] = n_predict
        return command(params=params, is_capped=n_predict is None, **arguments)

    n_predict = _n_predict(
        f"Maximum tokens per prompt; -1: until the context is full.  [default: {DEFAULT_MAX_TOKENS}]"
    )
    return with_options(with_params, [n_predict, *_SAMPLING, *_OUTPUT])


def sampling_default_options(command: Command) -> Command:
    """Adds the server's defaults of sampling.

    The command gets `sampling_defaults`, the given fields of `SamplingParams`.
    """

    @wraps(command)
    def with_defaults(n_predict: int | None, **arguments: Any) -> Any:
        sampling = _given(arguments, _SAMPLING_NAMES)
        if n_predict is not None:
            sampling["max_tokens"] = n_predict
        return command(sampling_defaults=sampling, **arguments)

    n_predict = _n_predict(
        "Default maximum tokens of a completion; -1: until the context is full. If not given: 16 for /v1/completions, "
        "otherwise -1. This and the following options are defaults for requests that do not set the field."
    )
    return with_options(with_defaults, [n_predict, *_SAMPLING])


def _given(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Takes these options out of `arguments`, and returns those that the user has given."""
    taken = {name: arguments.pop(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None and value != ()}
