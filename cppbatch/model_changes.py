"""The settings that change what a model computes, and so its texts and saved states: positions, metadata, control
vectors, the size of images."""

import math
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from cppbatch.setting import Range, Setting

RopeScaling = Literal["auto", "none", "linear", "yarn"]
_ROPE = (
    "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow",
    "yarn_beta_fast",
)  # fmt: skip  # fields of `llama_context_params`
_SCALING_TYPES: tuple[RopeScaling, ...] = ("none", "linear", "yarn")  # llama_rope_scaling_type
MOST_SCALE = 1000.0
"""The largest magnitude of the scale of a LoRA adapter or control vector: far beyond practical values, but below
float32 overflow."""
_MAX_FLOAT = 3.4e38  # of llama.cpp's float
_POSITIVE = "0 (as in the file) or more"
_YARN = "-1 (as in the file), 0 or more"
_TEXT_BYTES = 127  # of a key, and of a text

_model = partial(Setting, "Model")


class ModelChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, which are fields of `EngineConfig`."""

    # fmt: off
    rope_scaling: Annotated[RopeScaling, _model(
        "--rope-scaling", "How positions beyond the trained context are scaled. auto: as the model's file says.",
        "LLAMA_ARG_ROPE_SCALING_TYPE",
    )] = "auto"
    rope_scale: Annotated[float, _model(
        "--rope-scale", "Expand the context by this factor, as --rope-freq-scale 1/N; 0: as the model's file says.",
        "LLAMA_ARG_ROPE_SCALE", metavar="N", range=Range(0, _MAX_FLOAT), range_words=_POSITIVE,
    )] = 0
    rope_freq_base: Annotated[float, _model(
        "--rope-freq-base", "Base frequency of RoPE; 0: as the model's file says.", "LLAMA_ARG_ROPE_FREQ_BASE",
        range=Range(0, _MAX_FLOAT), range_words=_POSITIVE,
    )] = 0
    rope_freq_scale: Annotated[float, _model(
        "--rope-freq-scale", "Factor of RoPE's frequencies: 1/N expands the context by N; 0: as the model's file says.",
        "LLAMA_ARG_ROPE_FREQ_SCALE", range=Range(0, _MAX_FLOAT), range_words=_POSITIVE,
    )] = 0
    yarn_orig_ctx: Annotated[int, _model(
        "--yarn-orig-ctx", "YaRN: the context length before it was expanded; 0: the trained one.",
        "LLAMA_ARG_YARN_ORIG_CTX", range=Range(0), range_words="0 (automatic) or more",
    )] = 0
    yarn_ext_factor: Annotated[float, _model(
        "--yarn-ext-factor", "YaRN: share of extrapolation; 0: interpolation only, -1: as the model's file says.",
        "LLAMA_ARG_YARN_EXT_FACTOR", range=Range(-1, _MAX_FLOAT), range_words=_YARN,
    )] = -1
    yarn_attn_factor: Annotated[float, _model(
        "--yarn-attn-factor", "YaRN: factor of the attention's magnitude; -1: as the model's file says.",
        "LLAMA_ARG_YARN_ATTN_FACTOR", range=Range(-1, _MAX_FLOAT), range_words=_YARN,
    )] = -1
    yarn_beta_slow: Annotated[float, _model(
        "--yarn-beta-slow", "YaRN: correction of high dimensions; -1: as the model's file says.",
        "LLAMA_ARG_YARN_BETA_SLOW", range=Range(-1, _MAX_FLOAT), range_words=_YARN,
    )] = -1
    yarn_beta_fast: Annotated[float, _model(
        "--yarn-beta-fast", "YaRN: correction of low dimensions; -1: as the model's file says.",
        "LLAMA_ARG_YARN_BETA_FAST", range=Range(-1, _MAX_FLOAT), range_words=_YARN,
    )] = -1
    kv_overrides: Annotated[tuple[str, ...], _model(
        "--override-kv", "Metadata in place of those in the model's file; TYPE is int, float, bool or str.",
        metavar="KEY=TYPE:VALUE,...",
    )] = ()
    check_tensors: Annotated[bool, _model(
        "--check-tensors", "Read all weights at the start, and refuse a file with invalid values (NaN, infinite).",
    )] = False
    control_vectors: Annotated[tuple[tuple[str, float], ...], _model(
        "--control-vector --control-vector-scaled",
        "Control vectors, GGUF files of directions that are added to the layers' outputs, each with scale 1 by "
        "default. Requests can override the scales.",
        metavar="FILE[:SCALE],...",
    )] = ()
    control_vector_layers: Annotated[tuple[int, ...], _model(
        "--control-vector-layer-range", "First and last layer that control vectors apply to. Default: all.",
        metavar="START END",
    )] = ()
    image_min_tokens: Annotated[int, _model(
        "--image-min-tokens", "Minimum tokens of an image, for models that read any size; 0: the model's own.",
        "LLAMA_ARG_IMAGE_MIN_TOKENS", range=Range(0), range_words="0 (automatic) or more",
    )] = 0
    image_max_tokens: Annotated[int, _model(
        "--image-max-tokens", "Maximum tokens of an image, for these models; 0: the model's own.",
        "LLAMA_ARG_IMAGE_MAX_TOKENS", range=Range(0), range_words="0 (automatic) or more",
    )] = 0
    # fmt: on

    @property
    def model_changes(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return {name: value for name in _DEFAULTS if (value := getattr(self, name)) != _DEFAULTS[name]}

    @property
    def rope_params(self) -> dict[str, Any]:
        """The given settings of positions, as fields of `llama_context_params`."""
        found = {name: value for name in _ROPE if (value := getattr(self, name)) != _DEFAULTS[name]}
        if self.rope_scaling != "auto":
            found["rope_scaling_type"] = _SCALING_TYPES.index(self.rope_scaling)
        return found


_DEFAULTS: dict[str, Any] = dict(zip(ModelChanges.__struct_fields__, ModelChanges.__struct_defaults__, strict=True))
del _DEFAULTS["check_tensors"]  # changes nothing


class Override(NamedTuple):
    """A value of a model's metadata."""

    key: str
    value: int | float | bool | str


def parse_override(given: str) -> Override:
    """`KEY=TYPE:VALUE`, as in llama.cpp's --override-kv. Raises `ValueError` with what is wrong."""
    key, equals, rest = given.partition("=")
    kind, colon, text = rest.partition(":")
    if not (key and equals and colon):
        raise ValueError("it must be KEY=TYPE:VALUE, such as tokenizer.ggml.add_bos_token=bool:false")
    if max(len(key.encode()), len(text.encode()) if kind == "str" else 0) > _TEXT_BYTES:
        raise ValueError(f"its key and text may have {_TEXT_BYTES} bytes each")
    try:
        return Override(key, _VALUES[kind](text))
    except KeyError:
        raise ValueError(f"its type is {kind!r}; it must be one of {', '.join(_VALUES)}") from None
    except ValueError:
        raise ValueError(f"its value is {text!r}, which is not of the type {kind}") from None


def _whole(text: str) -> int:
    if abs(value := int(text)) > 2**63 - 1:
        raise ValueError
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


_VALUES: dict[str, Any] = {"int": _whole, "float": _finite, "bool": _truth, "str": str}
