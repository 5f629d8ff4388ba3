"""Converts llama-cpp-python's arguments to engine settings and request parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import llama_cpp

from cppbatch.config import CHOICES, CacheType, EngineConfig, Pooling, SplitMode
from cppbatch.engine.params import MOST_BIAS, RANGES, SamplingParams
from cppbatch.errors import ConfigError

log = logging.getLogger("cppbatch.llama_cpp_python")

Json = dict[str, Any]

POOLING: dict[int, Pooling] = {
    llama_cpp.LLAMA_POOLING_TYPE_NONE: "none",
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_CLS: "cls",
    llama_cpp.LLAMA_POOLING_TYPE_LAST: "last",
    llama_cpp.LLAMA_POOLING_TYPE_RANK: "rank",
}
_CACHE_TYPES: dict[int, CacheType] = {
    llama_cpp.GGML_TYPE_F32: "f32",
    llama_cpp.GGML_TYPE_F16: "f16",
    30: "bf16",  # not defined in llama_cpp
    llama_cpp.GGML_TYPE_Q8_0: "q8_0",
    llama_cpp.GGML_TYPE_Q4_0: "q4_0",
    llama_cpp.GGML_TYPE_Q4_1: "q4_1",
    llama_cpp.GGML_TYPE_Q5_0: "q5_0",
    llama_cpp.GGML_TYPE_Q5_1: "q5_1",
    llama_cpp.GGML_TYPE_IQ4_NL: "iq4_nl",
}
_SPLIT_MODES: tuple[SplitMode, ...] = ("none", "layer", "row", "tensor")
_NUMA = dict(enumerate(CHOICES["numa"]))
_CONTEXT_PARAMS = (
    "rope_scaling_type", "attention_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv", "op_offload",
)  # fmt: skip
_OVERRIDES = {bool: "bool", int: "int", float: "float", str: "str"}
_LIMITED = ("top_p", "min_p", "typical_p", "frequency_penalty", "presence_penalty")
"""Parameters with the same name, which may be out of range in llama-cpp-python."""
_DEFAULTS = {name: EngineConfig.__struct_defaults__[i] for i, name in enumerate(EngineConfig.__struct_fields__[1:])}


def engine_settings(given: Json) -> Json:
    """The fields of `EngineConfig` for the constructor arguments that the caller passed.

    If an omitted argument only affects speed, its default is the engine's, not llama-cpp-python's. Raises `ConfigError`
    for unsupported arguments.
    """
    settings: Json = {
        "n_gpu_layers": given.get("n_gpu_layers", 0),
        "n_threads": given.get("n_threads") or 0,
        "repack": "on",  # as in llama-cpp-python; "auto" rereads the header and may time kernels
        **_placement(given),
    }
    if (flash_attn := given.get("flash_attn")) is not None:
        settings["flash_attn"] = "on" if flash_attn else "off"
    for name, setting in (("type_k", "cache_type_k"), ("type_v", "cache_type_v")):
        if (kind := given.get(name)) is not None:
            if kind not in _CACHE_TYPES:
                known = ", ".join(f"{number} ({name})" for number, name in _CACHE_TYPES.items())
                raise ConfigError(f"{name} is {kind}; it must be one of {known}")
            settings[setting] = _CACHE_TYPES[kind]
    if overrides := given.get("kv_overrides"):
        settings["kv_overrides"] = tuple(_override(key, value) for key, value in overrides.items())
    if given.get("swa_full"):
        settings["swa_full"] = True
    if given.get("lora_path"):
        settings["lora"] = ((given["lora_path"], given.get("lora_scale", 1.0)),)
    if "n_ubatch" in given:
        settings["n_ubatch"] = given["n_ubatch"]
    settings["n_batch"] = max(given.get("n_batch", 0), _DEFAULTS["n_batch"])
    settings |= _draft_settings(given.get("draft_model"))
    if projector := getattr(given.get("chat_handler"), "clip_model_path", None):
        settings["mmproj"] = projector
    return settings | _extra_settings(given.get("kwargs", {}))


def _override(key: str, value: object) -> str:
    """Formats a value of --override-kv."""
    kind = next((name for kind, name in _OVERRIDES.items() if isinstance(value, kind)), type(value).__name__)
    return f"{key}={kind}:{str(value).lower() if kind == 'bool' else value}"


def _placement(given: Json) -> Json:
    settings: Json = {"main_gpu": given["main_gpu"]} if "main_gpu" in given else {}
    if "split_mode" in given:
        settings["split_mode"] = _SPLIT_MODES[given["split_mode"]]
    if given.get("numa"):
        settings["numa"] = _NUMA.get(given["numa"], "off")
    if given.get("tensor_split"):
        settings["tensor_split"] = tuple(given["tensor_split"])
    if "use_mmap" in given or "use_mlock" in given:
        how = ["mmap"] * bool(given.get("use_mmap", True)) + ["mlock"] * bool(given.get("use_mlock"))
        settings["load_mode"] = "+".join(how) or "none"
    return settings


def _draft_settings(draft_model: object) -> Json:
    if draft_model is None:
        return {}
    if not isinstance(draft_model, llama_cpp.llama_speculative.LlamaPromptLookupDecoding):
        log.warning("draft_model: %r is not used; drafts come from earlier text", draft_model)
        return {"spec": "suffix"}
    return {"spec": "suffix", "draft_max": draft_model.num_pred_tokens}


def _extra_settings(extra: Json) -> Json:
    """Fields of `EngineConfig` among the keyword arguments unknown to llama-cpp-python."""
    extra = dict(extra)
    if servers := extra.pop("rpc_servers", None):
        extra["rpc"] = servers
    known = {name: value for name, value in extra.items() if name in _DEFAULTS}
    if ignored := sorted(extra.keys() - known - {"kv_cells"}):
        log.info("arguments without effect: %s", ", ".join(ignored))
    return known


def context_params(given: Json) -> Json:
    """The fields of `llama_context_params` that the constructor arguments set and that `EngineConfig` lacks."""
    return {name: given[name] for name in _CONTEXT_PARAMS if given.get(name) is not None}


def sampling_params(given: Mapping[str, Any], *, seed: int, last_n: int) -> SamplingParams:
    """The parameters of a request; without a token limit, it may fill the context.

    `given`: the arguments of `create_completion`, or of `generate` with `temp` as `temperature`. llama-cpp-python has
    the same order of samplers: processors and biases, penalties, grammar, top-k, typical-p, top-p, min-p, temperature.
    There, a negative temperature disables filters and temperature, mirostat disables temperature, and of a seed only 32
    bits count: -1 and 2**32 - 1 are random.
    """
    temperature, mirostat = given["temperature"], given["mirostat_mode"] if given["temperature"] > 0 else 0
    fields: Json = {name: _within(given[name], *RANGES[name]) for name in _LIMITED}
    if temperature < 0:
        fields["samplers"] = ("penalties",)
    stop, most = given.get("stop") or [], given.get("max_tokens")
    return SamplingParams(
        max_tokens=most if most is not None and most > 0 else None,
        temperature=1.0 if mirostat else max(0.0, temperature),
        top_k=max(0, given["top_k"]),
        repetition_penalty=given["repeat_penalty"],
        penalty_last_n=last_n,
        penalize_prompt=False,
        mirostat=mirostat,
        mirostat_tau=given["mirostat_tau"],
        mirostat_eta=given["mirostat_eta"],
        seed=-1 if seed % 2**32 == llama_cpp.LLAMA_DEFAULT_SEED else seed % 2**64,
        stop=[stop] if isinstance(stop, str) else [text for text in stop if text],
        logprobs=given.get("logprobs"),
        logit_bias=_biases(given.get("logit_bias")),
        grammar=None if given["grammar"] is None else given["grammar"]._grammar,
        json_schema=given.get("json_schema"),
        **fields,
    )


def _biases(given: Mapping[Any, float] | None) -> dict[int | str, float]:
    return {int(token): _within(bias, -MOST_BIAS, MOST_BIAS) for token, bias in (given or {}).items()}


def _within(value: float, low: float, high: float) -> float:
    return min(max(float(value), low), high)


class Callbacks:
    """The logits processors and stopping criteria of a request, called when its next token is sampled.

    A `SamplingParams.logits_processor`. It is called on the thread that steps the engine, for one request at a time.
    """

    def __init__(self, processors: object, criteria: object) -> None:
        self._processors = _functions(processors)
        self._criteria = cast("Callable[[Any, Any], bool] | None", criteria)
        self.n_kept: int | None = None
        """Set when the criteria are met: the number of tokens of prompt and text so far. Later tokens are dropped."""
        self.error: Exception | None = None
        """The exception raised by one of them."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Callbacks | None:
        """The callbacks in the arguments; None if there are none."""
        functions = given.get("logits_processor"), given.get("stopping_criteria")
        return cls(*functions) if any(functions) else None

    def __call__(self, tokens: Any, logits: Any) -> Any:
        try:
            for process in self._processors:
                logits = process(tokens, logits)
            if self.n_kept is None and self._criteria and self._criteria(tokens, logits):
                self.n_kept = len(tokens)
        except Exception as error:
            self.error = error
            raise
        return logits


def _functions(given: object) -> list[Callable[[Any, Any], Any]]:
    """A `LogitsProcessorList`, any list of functions, or one function."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [cast("Callable[[Any, Any], Any]", given)]
