"""How one completion is generated: `SamplingParams`, checked once, here."""

from __future__ import annotations

import copy
import functools
import json
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import msgspec

from cppbatch.errors import InvalidRequest

Checked = TypeVar("Checked", bound=msgspec.Struct)

INT32_MAX = 2**31 - 1
_GREEDY_BELOW = 1e-3  # dividing logits by less would overflow float32
MOST_LOGPROBS = 20
_LONGEST_STOP, _MOST_STOP_LETTERS = 512, 16_384
_FRESH_SEEDS = 2**32  # few enough for every JSON parser
_MOST_VISIBLE = 64  # each is tokenised
MOST_BIASES = 8192  # each is looked at one by one
_MOST_TEXTS, _LONGEST_TEXT = 1000, 256  # keys of biases that are texts, and letters of what is tokenised on the side
_MOST_STOP_IDS, _MOST_SUPPRESSED = 1024, 32_768  # each choice of a prompt has a copy
_MOST_BREAKERS = 32  # each is looked for in the whole vocabulary
_LONGEST_SHOWN = 200  # letters of a value in an error's message
_SHOWN_DIGITS = 40
_LONGEST_SHOWN_INT = 10**_SHOWN_DIGITS  # Python refuses to write integers of thousands of digits
_LONGEST_GRAMMAR = 128 << 10  # letters; compiling takes about a second for so many
_LONGEST_BREAKER = 40  # letters: llama.cpp cuts DRY's breakers there

SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""llama.cpp's samplers in its default order. What draws the token in the end is none of these: `adaptive_target` and
`mirostat` replace it."""

GRAMMARS = ("json_schema", "guided_regex", "guided_choice", "grammar")
"""Fields of `SamplingParams` that say what the text must look like; at most one may be given."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0.01, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat_tau": (0, 1000),
    "mirostat_eta": (0, 10),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 0.99),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 1000),
    "dry_base": (0, 1000),
}
INTEGER_RANGES = {
    "top_k": (0, INT32_MAX),
    "mirostat": (0, 2),
    "penalty_last_n": (-1, INT32_MAX),
    "dry_allowed_length": (0, INT32_MAX),
    "dry_penalty_last_n": (-1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
}
OPTIONAL_INTEGER_RANGES = {
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MOST_LOGPROBS),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one completion is generated. Defaults are llama.cpp's. Raises `InvalidRequest` naming the bad field."""

    max_tokens: int | None = None
    """Most tokens to generate; None: until the model ends the text or the context is full. 0 only with `echo`."""
    min_tokens: int = 0
    """Do not let the model end the text, nor take a stop token, before this many tokens; not with a grammar."""
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch, but for llama.cpp's rounding (docs/sampling.md); None, or
    -1 as in llama.cpp: fresh entropy, which the result reports."""

    temperature: float = 0.8
    """0 (anything below 0.001) takes the likeliest token every time: greedy."""
    dynatemp_range: float = 0.0
    """Dynamic temperature: from temperature - range where the model is sure to temperature + range where it is not."""
    dynatemp_exponent: float = 1.0
    """How its entropy, as a share of the largest possible, maps to that range: entropy ** exponent."""
    top_k: int = 40
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float = 0.95
    """Sample among the likeliest tokens whose probabilities sum to this; 1: all."""
    min_p: float = 0.05
    """Drop tokens less than this times as likely as the likeliest; 0: none."""
    typical_p: float = 1.0
    """Sample among the tokens of the most typical information content that sum to this; 1: all (arXiv:2202.00666)."""
    top_n_sigma: float = -1.0
    """Drop tokens more than n standard deviations below the largest logit; 0 or less: none (arXiv:2411.07641)."""
    xtc_probability: float = 0.0
    """How often the likeliest tokens are excluded, all but the last above `xtc_threshold`; 0: never."""
    xtc_threshold: float = 0.1
    mirostat: int = 0
    """1 or 2: hold the surprise of the text at `mirostat_tau`, in place of all other samplers but temperature
    (arXiv:2007.14966). 1 turns greedy for a tau above about 10."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    """How fast it learns."""
    adaptive_target: float = -1.0
    """Prefer tokens of about this probability; below 0: off."""
    adaptive_decay: float = 0.9
    """How much of the past counts: about 1 / (1 - decay) tokens."""

    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) the logits of recent tokens; 1: off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every recent token, once; -2 to 2 as in OpenAI's API."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a recent token for each of its occurrences; -2 to 2."""
    penalty_last_n: int = 64
    """How many tokens, prompt included, count as recent for these three; -1: all."""
    dry_multiplier: float = 0.0
    """DRY: a token that would make a repetition longer loses multiplier * base ** (its length - allowed); 0: off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    """How many tokens are searched for repetitions; -1: all."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Strings over which no repetition reaches; only the first 40 letters count."""
    samplers: tuple[str, ...] = SAMPLERS
    """Which of `SAMPLERS` are applied, and in which order; those left out do nothing."""

    logit_bias: dict[int | str, float] = {}
    """Added to logits before anything else, -100 to 100. Keys are token ids; a string that is no number stands for
    each of its tokens, as often as it has them."""
    suppress_tokens: tuple[int, ...] = ()
    """Token ids that never come."""
    ignore_eos: bool = False
    """Never let the model end the text itself. Not with a grammar, which says itself when its text ends."""
    logits_processor: Any = None
    """Python only: `f(tokens, logits)` with the tokens so far, int32[n], and a row of logits, float32[n_vocab], that
    it changes in place or returns anew, before anything else. With a method `process_rows(tokens, logits)` that is
    called instead, once a step for all requests that have this object: a list of int32[n] and a list of rows."""

    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it. A single string may be given."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text besides the model's own."""
    include_stop: bool = False
    """Leave the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave control tokens (`<|im_start|>` ...) out of the text."""
    visible_tokens: tuple[str, ...] = ()
    """Control tokens, as they are written, that stay in the text although `skip_special_tokens` leaves the others out.
    A string that is no single token changes nothing: as ordinary text it is seen anyway."""
    echo: bool = False
    """Begin the text with the prompt, and the log-probabilities, if any, with the prompt's."""
    logprobs: int | None = None
    """Log-probabilities of the tokens taken, and of this many (to 20) of the likeliest at each place: those of the
    model itself, before temperature, penalties and filters."""

    json_schema: str | dict[str, Any] | bool | None = None
    """The text is JSON of this schema, given as an object or as its JSON text."""
    guided_regex: str | None = None
    """The whole text matches this regular expression (syntax of Rust's regex crate)."""
    guided_choice: tuple[str, ...] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """The text follows this grammar: llama.cpp's GBNF (with a `root` rule) or llguidance's Lark (with `start`)."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            number(self, name, low, high)
        for name, bounds in INTEGER_RANGES.items():
            number(self, name, *bounds, integer=True)
        for name, bounds in OPTIONAL_INTEGER_RANGES.items():
            if getattr(self, name) is not None:
                number(self, name, *bounds, integer=True)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens", "echo"):
            instance(self, name, bool, "true or false")
        _set_tuple(self, "stop", str, "a string or a list of strings")
        _set_tuple(self, "visible_tokens", str, "a list of strings")
        for name in ("stop_token_ids", "suppress_tokens"):
            _set_tuple(self, name, Integral, "a list of token ids")
            msgspec.structs.force_setattr(self, name, tuple(dict.fromkeys(token_ids(name, getattr(self, name)))))
        _check_counts(self)
        _set_tuple(self, "dry_sequence_breakers", str, "a list of strings")
        _set_tuple(self, "samplers", str, "a list of names")
        _check_lengths(self)
        _check_samplers(self)
        _check_bias(self)
        _check_grammars(self)
        if self.logits_processor is not None and not (
            callable(self.logits_processor) or hasattr(self.logits_processor, "process_rows")
        ):
            message = f"is {self.logits_processor!r}; it must be a function f(tokens, logits)"
            raise InvalidRequest("logits_processor", message)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with no randomness."""
        return self.temperature < _GREEDY_BELOW and self.dynatemp_range == 0 and "temperature" in self.samplers

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        wanted = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return wanted and self.penalty_last_n != 0 and "penalties" in self.samplers

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says what the text looks like, and when it ends."""
        return self.grammar_field is not None

    @property
    def grammar_field(self) -> str | None:
        """Which of `GRAMMARS` is given."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, for which all of it must be computed."""
        return self.echo and self.logprobs is not None


def replaced(request: Checked, **values: Any) -> Checked:
    """A copy of a request or of its params with other values, which are known to be good: nothing is checked again."""
    copied = copy.copy(request)
    for name, value in values.items():
        msgspec.structs.force_setattr(copied, name, value)
    return copied


def actual_seed(wanted: int | None) -> int:
    """The seed to use, 0 to 2**64 - 1: a fresh one when none is wanted."""
    return secrets.randbelow(_FRESH_SEEDS) if wanted is None or wanted == -1 else wanted % 2**64


def token_ids(field: str, given: Sequence[Any]) -> Sequence[int]:
    """What can be token ids of a model: int32, and not negative. Numpy's integers become Python's, for `msgspec`.

    Raises `InvalidRequest` naming the entry. Which ids a vocabulary has is for the engine to say.
    """
    if not set(map(type, given)) <= {int}:
        given = [
            operator.index(token) if hasattr(token, "__index__") and not isinstance(token, bool) else token
            for token in given
        ]
    if set(map(type, given)) <= {int} and min(given, default=0) >= 0 and max(given, default=0) <= INT32_MAX:
        return given
    i, token = next(
        (i, token) for i, token in enumerate(given) if type(token) is not int or not 0 <= token <= INT32_MAX
    )
    raise InvalidRequest(f"{field}[{i}]", f"is {shown(token)}; token ids are 0 to {INT32_MAX}")


def shown(value: object) -> str:
    """A value in an error's message, in short."""
    if isinstance(value, int) and abs(value) >= _LONGEST_SHOWN_INT:
        return f"a number of more than {_SHOWN_DIGITS} digits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        number(params, "max_tokens", 0 if params.echo else 1, INT32_MAX, integer=True)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", f"is {params.min_tokens}, more than max_tokens {params.max_tokens}")
    if "" in params.stop:
        raise InvalidRequest("stop", "has an empty string, which every text contains")
    longest, letters = max(map(len, params.stop), default=0), sum(map(len, params.stop))
    if longest > _LONGEST_STOP or letters > _MOST_STOP_LETTERS:  # all their beginnings are kept in memory
        message = (
            f"has {letters:,} letters, {longest:,} in one string; {_MOST_STOP_LETTERS:,} and {_LONGEST_STOP} may be"
        )
        raise InvalidRequest("stop", message)


def _check_counts(params: SamplingParams) -> None:
    most = {"stop_token_ids": _MOST_STOP_IDS, "suppress_tokens": _MOST_SUPPRESSED, "visible_tokens": _MOST_VISIBLE}
    for name, limit in most.items():
        if (n := len(getattr(params, name))) > limit:
            raise InvalidRequest(name, f"has {n:,} entries; {limit:,} may be")
    if max(map(len, params.visible_tokens), default=0) > _LONGEST_TEXT:
        raise InvalidRequest("visible_tokens", f"has a string of more than {_LONGEST_TEXT} letters, which is no token")


def _check_samplers(params: SamplingParams) -> None:
    for i, name in enumerate(params.samplers):
        if name not in SAMPLERS:
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r}; there are {', '.join(SAMPLERS)}")
        if name in params.samplers[:i]:
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r} for the second time")
    if params.mirostat and params.adaptive_target >= 0:
        raise InvalidRequest("adaptive_target", "cannot be used together with mirostat: each draws in its own way")
    n_breakers = len(params.dry_sequence_breakers)
    if n_breakers > _MOST_BREAKERS:
        raise InvalidRequest("dry_sequence_breakers", f"has {n_breakers} strings; there may be {_MOST_BREAKERS}")
    cut = tuple(breaker[:_LONGEST_BREAKER] for breaker in params.dry_sequence_breakers if breaker)
    msgspec.structs.force_setattr(params, "dry_sequence_breakers", cut)


def _check_bias(params: SamplingParams) -> None:
    if not isinstance(params.logit_bias, Mapping):
        message = f"is {shown(params.logit_bias)}; it must be an object of token ids (or strings) and biases"
        raise InvalidRequest("logit_bias", message)
    if len(params.logit_bias) > MOST_BIASES:
        more = f"suppress_tokens bans {_MOST_SUPPRESSED:,}"
        message = f"has {len(params.logit_bias):,} entries; {MOST_BIASES:,} may be ({more})"
        raise InvalidRequest("logit_bias", message)
    texts = [key for key in params.logit_bias if isinstance(key, str) and not key.isdecimal()]
    if len(texts) > _MOST_TEXTS or max(map(len, texts), default=0) > _LONGEST_TEXT:
        message = f"has {len(texts):,} texts as keys; {_MOST_TEXTS:,} may be, of {_LONGEST_TEXT} letters each"
        raise InvalidRequest("logit_bias", message)
    for key, bias in params.logit_bias.items():
        if not isinstance(key, (int, str)) or isinstance(key, bool) or key == "":
            raise InvalidRequest("logit_bias", f"has the key {key!r}; keys are token ids or strings")
        if isinstance(key, int) and not 0 <= key <= INT32_MAX:
            raise InvalidRequest("logit_bias", f"has the token id {shown(key)}; they are 0 to {INT32_MAX}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias", f"is {shown(bias)} for {shown(key)}; it must be from -100 to 100")


def _check_grammars(params: SamplingParams) -> None:
    given = [name for name in GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"cannot be used together with {given[0]}: one of them says how the text looks")
    for name in ("guided_regex", "grammar"):
        if getattr(params, name) is not None:
            instance(params, name, str, "a string")
    if params.guided_choice is not None:
        _set_tuple(params, "guided_choice", str, "a list of strings")
        if not params.guided_choice or "" in params.guided_choice:
            raise InvalidRequest("guided_choice", "must have at least one string, and none that is empty")
    if params.json_schema is not None:
        msgspec.structs.force_setattr(params, "json_schema", _schema_text(params.json_schema))
    for name in given:
        _check_grammar_length(name, getattr(params, name))


def _check_grammar_length(name: str, grammar: str | tuple[str, ...]) -> None:
    n_letters = len(grammar) if isinstance(grammar, str) else sum(map(len, grammar))
    if n_letters > _LONGEST_GRAMMAR:
        raise InvalidRequest(name, f"has {n_letters:,} letters; the limit is {_LONGEST_GRAMMAR:,}")


def _schema_text(schema: object) -> str:
    """The schema as JSON text, its keys in the order they had: that is the order of the properties in the answer."""
    try:
        if isinstance(schema, str):
            _check_grammar_length("json_schema", schema)
            return _rewritten_schema(schema)
        return _written_schema(schema)
    except RecursionError:
        raise InvalidRequest("json_schema", "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("json_schema", f"is not JSON: {error}") from error


@functools.lru_cache(maxsize=64)
def _rewritten_schema(text: str) -> str:
    """Remembered: a worker reads the same text once for each choice of a prompt."""
    return _written_schema(json.loads(text))


def _written_schema(schema: object) -> str:
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest("json_schema", f"is {schema!r:.80}; a schema is an object, true or false")
    return json.dumps(schema, allow_nan=False, ensure_ascii=False)


def _set_tuple(params: SamplingParams, name: str, kind: type, wanted: str) -> None:
    value = getattr(params, name)
    items = (value,) if isinstance(value, kind) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise InvalidRequest(name, f"is {value!r:.200}; it must be {wanted}")
    msgspec.structs.force_setattr(params, name, items)


def instance(request: msgspec.Struct, name: str, kind: type, wanted: str) -> None:
    """Raises `InvalidRequest` when the field is not of this kind."""
    value = getattr(request, name)
    if not isinstance(value, kind):
        raise InvalidRequest(name, f"is {shown(value)}; it must be {wanted}")


def number(params: msgspec.Struct, name: str, low: float, high: float, *, integer: bool = False) -> None:
    """Raises `InvalidRequest` when the field is not a number from `low` to `high`."""
    value = getattr(params, name)
    if not isinstance(value, int if integer else (int, float)) or isinstance(value, bool):
        message = f"is {shown(value)}; it must be {'a whole number' if integer else 'a number'}"
        raise InvalidRequest(name, message)
    if not low <= value <= high:  # also false for NaN
        raise InvalidRequest(name, f"is {shown(value)}; it must be from {low} to {high}")
