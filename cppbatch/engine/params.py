"""The parameters of a completion: `SamplingParams`, declared and validated once, here.

Request fields, the OpenAPI document, llama-server's settings and command options follow from it.
"""

import copy
import difflib
import json
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from cppbatch.chat.escaped_lark import MAX_GRAMMAR
from cppbatch.chat.lark_grammar import LazyGrammar
from cppbatch.chat.reasoning import ThinkingBudget
from cppbatch.errors import InvalidRequest
from cppbatch.json_schema import compact_schema
from cppbatch.setting import INT32_MAX, Range

Checked = TypeVar("Checked", bound=msgspec.Struct)

MOST_LOGPROBS = 20
_MAX_STOP, _MAX_STOP_TOTAL = 512, 16_384  # characters of one stop string, and of all
MOST_BIAS = 100.0
"""The largest magnitude that a bias keeps where a value without a limit is accepted, as in OpenAI's API."""
MOST_BIASES = 8192  # each is applied one by one
_MAX_TEXTS, _MAX_TEXT = 1000, 256  # texts as keys of biases, and characters per text, which is tokenised here
_MAX_STOP_IDS, _MAX_SUPPRESSED = 1024, 32_768  # each choice of a prompt has a copy
_MAX_BREAKERS = 32  # each is searched for in the whole vocabulary
_MAX_SHOWN = 200  # characters of a value in an error message
_SHOWN_DIGITS = 40
_MAX_SHOWN_INT = 10**_SHOWN_DIGITS  # Python refuses to print integers of thousands of digits

SAMPLER_SPELLINGS = {
    "penalties": "e", "dry": "d", "top_n_sigma": "s topnsigma", "top_k": "k topk", "typical_p": "y typ_p typp typ",
    "top_p": "p topp nucleus", "min_p": "m minp", "xtc": "x", "temperature": "t temp",
}  # fmt: skip
"""llama.cpp's samplers in its default order, with its letters and other spellings. The final random choice is not
included; `adaptive_target` and `mirostat` replace it."""
SAMPLERS = tuple(SAMPLER_SPELLINGS)

GRAMMARS = ("json_schema", "guided_regex", "guided_choice", "grammar")
"""Fields of `SamplingParams` for structured output; at most one may be given."""

DEFAULT_MAX_TOKENS = 4096
"""Default maximum tokens: enough for reasoning, but stops a model that repeats itself."""
UNLIMITED = -1
"""The `max_tokens` for no limit: until the context is full."""


class Param(msgspec.Struct, frozen=True):
    """What commands, docs, the web page and llama-server's API need to know about a field of `SamplingParams` that is
    an option, in addition to its type and default."""

    help: str
    range: Range | None = None
    flags: str = ""
    """llama.cpp's flags, separated by spaces, if they are not the field's name."""
    llama_env: str = ""
    """llama.cpp's environment variable."""
    is_clamped: bool = False
    """Whether llama-server's API clamps values to the range: temperature -1 is greedy, top_k -1 is unlimited."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a completion. Defaults are llama.cpp's. Raises `InvalidRequest` naming the invalid field.

    Lists become tuples.
    """

    max_tokens: int | None = None
    """Maximum tokens to generate; None: 4,096, or fewer if the context is smaller; -1: until the context is full; 0:
    only with `echo`."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Minimum tokens to generate before an end or stop token may be sampled. Not with a grammar."""

    # fmt: off
    temperature: Annotated[float, Param(
        "Temperature; 0: greedy.", Range(0, 100), "--temp --temperature", "LLAMA_ARG_TEMPERATURE", is_clamped=True,
    )] = 0.8
    """Values below 0.001 are also greedy: always the most likely token."""
    top_k: Annotated[int, Param(
        "Sample from this many most likely tokens; 0: all.", Range(0), llama_env="LLAMA_ARG_TOP_K", is_clamped=True,
    )] = 40
    top_p: Annotated[float, Param(
        "Sample from the most likely tokens up to this cumulative probability.", Range(0, 1),
        llama_env="LLAMA_ARG_TOP_P", is_clamped=True,
    )] = 0.95
    """1: all."""
    min_p: Annotated[float, Param(
        "Drop tokens whose probability is less than this fraction of the most likely token's.", Range(0, 1),
        llama_env="LLAMA_ARG_MIN_P", is_clamped=True,
    )] = 0.05
    """0: none."""
    typical_p: Annotated[float, Param("Locally typical sampling; 1: off.", Range(0, 1), "--typical --typical-p")] = 1.0
    """Sample from the tokens with the most typical information content, up to this cumulative probability
    (arXiv:2202.00666)."""
    top_n_sigma: Annotated[float, Param(
        "Drop tokens more than n standard deviations below the maximum logit; -1: off.", Range(-1, 1000),
        "--top-nsigma --top-n-sigma",
    )] = -1.0
    """0 is also off (arXiv:2411.07641)."""
    xtc_probability: Annotated[float, Param("Probability of XTC; 0: off.", Range(0, 1), is_clamped=True)] = 0.0
    xtc_threshold: Annotated[float, Param(
        "XTC excludes all but the least likely of the tokens above this probability.", Range(0, 1), is_clamped=True,
    )] = 0.1
    dynatemp_range: Annotated[float, Param(
        "Range of the dynamic temperature around --temp; 0: off.", Range(0, 100),
    )] = 0.0
    """From temperature - range if the model is certain, to temperature + range if it is uncertain."""
    dynatemp_exponent: Annotated[float, Param(
        "Exponent of the dynamic temperature.", Range(0.01, 100), "--dynatemp-exp",
    )] = 1.0
    """Maps the entropy, as a share of its maximum, to that range: entropy ** exponent."""

    repetition_penalty: Annotated[float, Param(
        "Repetition penalty for recent tokens; 1: off.", Range(0.01, 100),
        "--repeat-penalty", "LLAMA_ARG_REPEAT_PENALTY",
    )] = 1.0
    """Divides positive logits of recent tokens, and multiplies negative ones."""
    penalty_last_n: Annotated[int, Param(
        "Recent tokens to penalise; -1: all, 0: no penalties.", Range(-1), "--repeat-last-n",
    )] = 64
    """Prompt included."""
    penalize_prompt: bool = True
    """Python only: whether penalties and DRY include the prompt as recent tokens (not in llama-cpp-python)."""
    presence_penalty: Annotated[float, Param(
        "Subtracted from the logit of each recent token.", Range(-2, 2), llama_env="LLAMA_ARG_PRESENCE_PENALTY",
    )] = 0.0
    frequency_penalty: Annotated[float, Param(
        "Subtracted for each occurrence of a recent token.", Range(-2, 2), llama_env="LLAMA_ARG_FREQUENCY_PENALTY",
    )] = 0.0
    dry_multiplier: Annotated[float, Param("Strength of DRY, a penalty for repetitions; 0: off.", Range(0, 1000))] = 0.0
    """Lowers the logit of a token that would extend a repetition by multiplier * base ** (length - allowed length)."""
    dry_base: Annotated[float, Param("Base of DRY's penalty, which grows with the repetition.", Range(0, 1000))] = 1.75
    dry_allowed_length: Annotated[int, Param(
        "Length of a repetition, in tokens, that DRY does not penalise.", Range(0),
    )] = 2
    dry_penalty_last_n: Annotated[int, Param(
        "Number of tokens that DRY searches for repetitions; -1: all.", Range(-1),
    )] = 64
    dry_sequence_breakers: Annotated[Sequence[str], Param(
        "Text that a repetition does not extend across for DRY; may be repeated; none: no such text.",
        flags="--dry-sequence-breaker",
    )] = ("\n", ":", '"', "*")
    """Only their first 40 characters count."""

    adaptive_target: Annotated[float, Param(
        "Adaptive-p: prefer tokens of this probability; -1: off.", Range(-1, 1),
    )] = -1.0
    """Any value below 0 is off."""
    adaptive_decay: Annotated[float, Param(
        "Decay of adaptive-p, 0 to 0.99; higher adapts more slowly.", Range(0, 0.99),
    )] = 0.9
    """Adaptive-p averages over about 1 / (1 - decay) tokens."""
    mirostat: Annotated[int, Param("Mirostat version, 1 or 2; 0: off.", Range(0, 2), is_clamped=True)] = 0
    """Keeps the surprise of the text at `mirostat_tau`; replaces all other samplers except temperature
    (arXiv:2007.14966). 1 becomes greedy for a tau above about 10."""
    mirostat_eta: Annotated[float, Param("Mirostat's learning rate.", Range(0, 10), "--mirostat-lr")] = 0.1
    mirostat_tau: Annotated[float, Param(
        "Mirostat's target surprise, in bits.", Range(0, 1000), "--mirostat-ent",
    )] = 5.0

    samplers: Annotated[Sequence[str], Param(
        "Samplers to apply, in this order, separated by semicolons, or as llama.cpp's letters.",
        flags="--samplers --sampler-seq --sampling-seq",
    )] = SAMPLERS
    """From `SAMPLERS`."""
    ignore_eos: Annotated[bool, Param("Never sample an end token.")] = False
    """Not with a grammar, which determines the end of the text."""
    seed: Annotated[int | None, Param(
        "Seed; the same seed gives the same text; -1: random.", Range(-(2**63), 2**64 - 1), "-s --seed",
    )] = None
    """Regardless of what else is in the batch, up to llama.cpp's rounding (docs/sampling.md). None: a random seed. The
    result reports the seed."""
    # fmt: on

    logit_bias: dict[int | str, float] = {}
    """Added to logits before anything else, -100 to 100. Keys are token ids or texts: a text's bias is added to each of
    its tokens, once per occurrence."""
    suppress_tokens: Sequence[int] = ()
    """Token ids that must not be generated."""
    logits_processor: Any = None
    """Python only: `f(tokens, logits)` is called before anything else, with the tokens so far, int32[n], and a row of
    logits, float32[n_vocab], which it modifies in place or replaces by its result. If the object has a method
    `process_rows(tokens, logits)`, that is called instead, once per step for all requests with this object, with a list
    of int32[n] and a list of rows."""

    speculate: bool = True
    """Use speculative decoding when it is faster (`EngineConfig.spec`). False: no drafts for this request. Changes
    the text only by rounding (docs/speculation.md)."""

    stop: Sequence[str] = ()
    """Strings that end the text and are not included in it. May be a single string."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, in addition to the model's own."""
    include_stop: bool = False
    """Include the stop string in the text."""
    skip_special_tokens: bool = True
    """Omit control tokens (`<|im_start|>` ...) from the text."""
    visible_tokens: Sequence[str] = ()
    """Control tokens, as text, to include in the text despite `skip_special_tokens`. Strings that are not a single
    token have no effect."""
    echo: bool = False
    """Start the text with the prompt, and the log-probabilities, if any, with those of the prompt."""
    logprobs: Annotated[int | None, Range(0, MOST_LOGPROBS)] = None
    """Return log-probabilities of the sampled tokens, including a final end token, and of this many (0 to 20) most
    likely tokens at each position, as computed by the model before temperature, penalties and filters."""
    post_sampling_probs: bool = False
    """Return the log-probabilities after all samplers instead: only tokens that pass the filters are listed, and a
    greedy token has 0.0. The log-probabilities of an echoed prompt remain the model's own."""

    json_schema: str | dict[str, Any] | bool | None = None
    """Constrain the text to JSON with this schema, given as an object or as JSON text."""
    compact_json: bool = False
    """Write JSON of a schema without whitespace between its tokens, which saves tokens. Whitespace in strings is
    kept."""
    guided_regex: str | None = None
    """Constrain the whole text to this regular expression (syntax of Rust's regex crate)."""
    guided_choice: Sequence[str] | None = None
    """Constrain the text to one of these."""
    grammar: str | None = None
    """Constrain the text to this grammar: llama.cpp's GBNF (with a `root` rule) or llguidance's Lark (with `start`)."""
    reasoning_budget: ThinkingBudget | None = None
    """A limit on reasoning tokens. `chat` and the server's chat APIs create it from `thinking_budget`."""
    lazy_grammar: LazyGrammar | None = None
    """Tool calls that the model may choose to write. No effect together with another grammar."""

    def __post_init__(self) -> None:
        for name, low, high, is_integer, is_optional in _NUMBERS:
            value = getattr(self, name)
            if type(value) is (int if is_integer else float) and low <= value <= high:
                continue  # as in almost all requests
            if not is_optional or value is not None:
                number(self, name, low, high, integer=is_integer)
        for name in SWITCHES:
            if type(getattr(self, name)) is not bool:
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
        """Whether the most likely token is always chosen."""
        # dividing logits by a lower temperature would overflow float32
        return self.temperature < 1e-3 and self.dynatemp_range == 0 and "temperature" in self.samplers

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        wanted = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return wanted and self.penalty_last_n != 0 and "penalties" in self.samplers

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains the text and determines its end."""
        return self.grammar_field is not None

    @property
    def grammar_field(self) -> str | None:
        """The given field of `GRAMMARS`; None: no grammar."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @property
    def scores_prompt(self) -> bool:
        """Whether to return log-probabilities of the prompt, which then must be computed completely."""
        return self.echo and self.logprobs is not None


_DECLARED: dict[str, Any] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
KINDS: dict[str, Any] = get_type_hints(SamplingParams)
"""The types of all fields."""
PARAMS: dict[str, Param] = {name: each for name, each in _DECLARED.items() if isinstance(each, Param)}
"""The fields that are command options, and defaults of the server."""
RANGES: dict[str, Range] = {
    name: each for name, one in _DECLARED.items() if (each := one.range if isinstance(one, Param) else one)
}
"""The ranges of numeric fields. That of `max_tokens` depends on `echo`."""
SWITCHES = tuple(name for name, kind in KINDS.items() if kind is bool)
_NUMBERS = tuple((name, *RANGES[name], KINDS[name] is not float, KINDS[name] not in (int, float)) for name in RANGES)

Params = SamplingParams | Mapping[str, Any] | int | None
"""Alternatives to `SamplingParams` in Python: a dict of its fields, or `max_tokens`."""


def sampling_params(given: Params) -> SamplingParams:
    """Raises `InvalidRequest` for unknown fields and for other types."""
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, Integral) and not isinstance(given, bool):
        return SamplingParams(max_tokens=int(given))
    if not isinstance(given, Mapping | None):
        message = f"is {given!r:.{_MAX_SHOWN}}; give SamplingParams, a dict of its fields, or a number of tokens"
        raise InvalidRequest("params", message)
    known = SamplingParams.__struct_fields__
    for name in given or ():
        if name not in known:
            similar = difflib.get_close_matches(str(name), known, n=1)
            meant = f"; did you mean {similar[0]}?" if similar else ""
            raise InvalidRequest("params", f"contains {name!r}, which is not a field of SamplingParams{meant}")
    return SamplingParams(**given or {})


def replace_fields(request: Checked, **values: Any) -> Checked:
    """A copy of a request or its params with some fields replaced by valid values, without validation."""
    copied = copy.copy(request)
    for name, value in values.items():
        msgspec.structs.force_setattr(copied, name, value)
    return copied


def actual_seed(wanted: int | None) -> int:
    """The seed to use, 0 to 2**64 - 1: a random one for None and -1."""
    # new seeds are small enough for every JSON parser
    return secrets.randbelow(2**32) if wanted is None or wanted == -1 else wanted % 2**64


def token_id(key: str) -> int | None:
    """The token id that a key of `logit_bias` is in decimal digits, at most `INT32_MAX`; None: it is a text."""
    if not (key.isascii() and key.isdecimal()):
        return None
    return int(key) if len(key) < 10 else INT32_MAX  # which no vocabulary has


def token_ids(field: str, given: Sequence[Any]) -> Sequence[int]:
    """Checks that these are token ids: int32, not negative. Converts numpy's integers to Python's, as msgspec requires.

    Raises `InvalidRequest` naming the entry. The engine checks whether the vocabulary has these ids.
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
    raise InvalidRequest(f"{field}[{i}]", f"is {format_value(token)}; token ids are 0 to {INT32_MAX}")


def format_value(value: object) -> str:
    """A value for an error message, shortened."""
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_INT:
        return f"a number of more than {_SHOWN_DIGITS} digits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens != UNLIMITED:
        number(params, "max_tokens", 0 if params.echo else 1, INT32_MAX, integer=True)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"is {params.min_tokens}; it must not be more than max_tokens, which is {params.max_tokens}",
            )
    if "" in params.stop:
        raise InvalidRequest("stop", "contains an empty string, which would match every text")
    longest, n_characters = max(map(len, params.stop), default=0), sum(map(len, params.stop))
    if longest > _MAX_STOP or n_characters > _MAX_STOP_TOTAL:  # all their prefixes are kept in memory
        limits = f"the limits are {_MAX_STOP_TOTAL:,} and {_MAX_STOP}"
        message = f"has {n_characters:,} characters, up to {longest:,} in one string; {limits}"
        raise InvalidRequest("stop", message)


def _check_counts(params: SamplingParams) -> None:
    # each visible token is tokenised
    most = {"stop_token_ids": _MAX_STOP_IDS, "suppress_tokens": _MAX_SUPPRESSED, "visible_tokens": 64}
    for name, limit in most.items():
        if (n := len(getattr(params, name))) > limit:
            raise InvalidRequest(name, f"has {n:,} entries; the limit is {limit:,}")
    if max(map(len, params.visible_tokens), default=0) > _MAX_TEXT:
        raise InvalidRequest(
            "visible_tokens", f"contains a string of more than {_MAX_TEXT} characters, which cannot be a token"
        )


def _check_samplers(params: SamplingParams) -> None:
    for i, name in enumerate(params.samplers):
        if name not in SAMPLERS:
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r}; it must be one of {', '.join(SAMPLERS)}")
        if name in params.samplers[:i]:
            raise InvalidRequest(f"samplers[{i}]", f"is {name!r}, which is already in the list")
    if params.mirostat and params.adaptive_target >= 0:
        raise InvalidRequest("adaptive_target", "cannot be combined with mirostat: both replace the sampling")
    n_breakers = len(params.dry_sequence_breakers)
    if n_breakers > _MAX_BREAKERS:
        raise InvalidRequest("dry_sequence_breakers", f"has {n_breakers} strings; the limit is {_MAX_BREAKERS}")
    # llama.cpp truncates DRY's sequence breakers to 40 characters
    cut = tuple(breaker[:40] for breaker in params.dry_sequence_breakers if breaker)
    msgspec.structs.force_setattr(params, "dry_sequence_breakers", cut)


def _check_bias(params: SamplingParams) -> None:
    if not isinstance(params.logit_bias, Mapping):
        message = (
            f"is {format_value(params.logit_bias)}; it must be an object that maps token ids (or strings) to biases"
        )
        raise InvalidRequest("logit_bias", message)
    if len(params.logit_bias) > MOST_BIASES:
        more = f"suppress_tokens allows {_MAX_SUPPRESSED:,}"
        message = f"has {len(params.logit_bias):,} entries; the limit is {MOST_BIASES:,} ({more})"
        raise InvalidRequest("logit_bias", message)
    texts = [key for key in params.logit_bias if isinstance(key, str) and token_id(key) is None]
    if len(texts) > _MAX_TEXTS or max(map(len, texts), default=0) > _MAX_TEXT:
        limits = f"the limits are {_MAX_TEXTS:,} texts and {_MAX_TEXT} characters each"
        message = f"has {len(texts):,} texts as keys; {limits}"
        raise InvalidRequest("logit_bias", message)
    for key, bias in params.logit_bias.items():
        if not isinstance(key, (int, str)) or isinstance(key, bool) or key == "":
            raise InvalidRequest("logit_bias", f"has the key {key!r}; keys are token ids or strings")
        if isinstance(key, int) and not 0 <= key <= INT32_MAX:
            raise InvalidRequest(
                "logit_bias", f"contains the token id {format_value(key)}; token ids are 0 to {INT32_MAX}"
            )
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise InvalidRequest(
                "logit_bias", f"is {format_value(bias)} for {format_value(key)}; it must be from -100 to 100"
            )


def _check_grammars(params: SamplingParams) -> None:
    given = [name for name in GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"cannot be combined with {given[0]}: give only one grammar")
    for name in ("guided_regex", "grammar"):
        if getattr(params, name) is not None:
            instance(params, name, str, "a string")
    if params.guided_choice is not None:
        _set_tuple(params, "guided_choice", str, "a list of strings")
        if not params.guided_choice or "" in params.guided_choice:
            raise InvalidRequest("guided_choice", "must contain at least one string, and no empty strings")
    if params.json_schema is not None:
        text = _schema_text(params.json_schema, compact=params.compact_json)
        msgspec.structs.force_setattr(params, "json_schema", text)
    for name in given:
        _check_grammar_length(name, getattr(params, name))


def _check_grammar_length(name: str, grammar: str | tuple[str, ...]) -> None:
    n_characters = len(grammar) if isinstance(grammar, str) else sum(map(len, grammar))
    if n_characters > MAX_GRAMMAR:
        raise InvalidRequest(name, f"has {n_characters:,} characters; the limit is {MAX_GRAMMAR:,}")


def _schema_text(schema: object, *, compact: bool) -> str:
    """The schema as JSON text with the same key order, which is the order of properties in the output."""
    from cppbatch.json_bounds import excess  # imports numpy, which `import cppbatch` does without

    try:
        if isinstance(schema, str):
            _check_grammar_length("json_schema", schema)
            schema = json.loads(schema)
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequest("json_schema", f"is {schema!r:.80}; a schema must be an object, true or false")
        text = json.dumps(compact_schema(schema) if compact else schema, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("json_schema", "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("json_schema", f"is not valid JSON: {error}") from error
    if reason := excess(text.encode(errors="surrogatepass")):
        raise InvalidRequest("json_schema", reason)
    return text


def _set_tuple(params: SamplingParams, name: str, kind: type, wanted: str) -> None:
    value = getattr(params, name)
    items = (value,) if isinstance(value, kind) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise InvalidRequest(name, f"is {value!r:.200}; it must be {wanted}")
    msgspec.structs.force_setattr(params, name, items)


def instance(request: msgspec.Struct, name: str, kind: type, wanted: str) -> None:
    """Raises `InvalidRequest` unless the field is an instance of `kind`."""
    value = getattr(request, name)
    if not isinstance(value, kind):
        raise InvalidRequest(name, f"is {format_value(value)}; it must be {wanted}")


def number(params: msgspec.Struct, name: str, low: float, high: float, *, integer: bool = False) -> None:
    """Raises `InvalidRequest` unless the field is a number from `low` to `high`."""
    value = getattr(params, name)
    if not isinstance(value, int if integer else (int, float)) or isinstance(value, bool):
        message = f"is {format_value(value)}; it must be {'a whole number' if integer else 'a number'}"
        raise InvalidRequest(name, message)
    if not low <= value <= high:  # also false for NaN
        raise InvalidRequest(name, f"is {format_value(value)}; it must be from {low} to {high}")
