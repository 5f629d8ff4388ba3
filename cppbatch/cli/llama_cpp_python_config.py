"""--llama-cpp-python-config: the file of `python -m llama_cpp.server --config_file`, as flags of `cppbatch serve`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from cppbatch.config import CHOICES, EngineConfig, cells_for
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.cli.model_settings import ModelFile

log = logging.getLogger("cppbatch.flags")

Json = dict[str, Any]

_DEFAULTS = EngineConfig("")
_N_CTX, _PORT = 2048, 8000  # of llama-cpp-python's server
_CACHE_TYPES = {  # ggml's numbers
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16",
}  # fmt: skip
_TEMPLATES = {
    "chatml": "chatml", "gemma": "gemma", "llama-2": "llama2", "llama-3": "llama3", "mistral-instruct": "mistral-v1",
    "openchat": "openchat", "vicuna": "vicuna", "zephyr": "zephyr",
}  # fmt: skip
"""llama-cpp-python's chat formats, and llama.cpp's names for their templates."""
_IMAGE_CHAT_FORMATS = (
    "llava-1-5", "llava-1-6", "obsidian", "moondream", "nanollava", "llama-3-vision-alpha", "minicpm-v-2.6",
    "qwen2.5-vl", "mtmd", "gemma4",
)  # fmt: skip
_WITHOUT_EFFECT = {
    "n_batch", "n_threads_batch", "use_mmap", "use_mlock", "verbose", "cache", "cache_type", "cache_size",
    "logits_all", "mul_mat_q", "lora_base", "embedding",
    "interrupt_requests", "disable_ping_events", "root_path",
}  # fmt: skip
_UNSET: dict[str, Any] = {
    "vocab_only": False, "rpc_servers": None, "hf_tokenizer_config_path": None,
    "hf_pretrained_model_name_or_path": None,
}  # fmt: skip
"""Settings that are only accepted with a value that has no effect."""
_FROM_FILE: dict[str, Any] = {
    "rope_scaling_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_orig_ctx": 0,
}  # fmt: skip
"""The defaults, with which the model's file decides."""


class LlamaCppPythonConfig(NamedTuple):
    """The file's content."""

    server: Json
    """Defaults of the parameters of `cppbatch serve`."""
    models: ModelFile


def read_llama_cpp_python_config(path: Path) -> LlamaCppPythonConfig:
    """Reads JSON, or YAML if the file name ends in .yaml or .yml. Raises `ConfigError`."""
    from cppbatch.cli.model_settings import ModelFile

    where = f"--llama-cpp-python-config {path}"
    try:
        content = _decode(path)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply") from None
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(each, dict) for each in models):
        raise ConfigError(f"{where}: models must be a list with the settings of each model")
    values = {name: _convert(content.get(name), kind, f"{where}: {name}") for name, kind in _SERVER.items()}
    server: Json = {"hosts": (values["host"] or "localhost",), "port": values["port"] or _PORT, "any_model": True}
    server |= {name: values[name] for name in ("ssl_keyfile", "ssl_certfile") if values[name]}
    if key := values["api_key"]:
        server["api_keys"] = (key,)
    _check_names(content, {"models", *_SERVER}, where)
    own: dict[str, Json] = {}
    for i, settings in enumerate(models):
        for key in ("model", "model_alias", "hf_model_repo_id"):
            _convert(settings.get(key), str, f"{where}: models[{i}].{key}")
        if not settings.get("model"):
            raise ConfigError(f"{where}: models[{i}].model is required: the path of a GGUF file")
        name = settings.get("model_alias") or Path(settings["model"]).stem
        own[name] = _flags(settings, f"{where}, model {name!r}")
    first = next(iter(own))
    own[first]["load-on-startup"] = True
    return LlamaCppPythonConfig(server, ModelFile(default=first, models=own))


def _decode(path: Path) -> Any:
    text = path.read_text("utf-8")
    if path.suffix not in (".yaml", ".yml"):
        return json.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading YAML requires pyyaml: run `pip install pyyaml`, or use JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _flags(settings: Json, where: str) -> Json:
    """The settings of a model, named like those of `ModelFile`."""
    settings = {
        name: _convert(value, _TYPES[name], f"{where}: {name}") if name in _TYPES else value
        for name, value in settings.items()
    }
    flags: Json = {"model": _model(settings)}
    n_ctx = _N_CTX if settings.get("n_ctx") is None else settings["n_ctx"]
    flags["ctx-size"] = cells_for(n_ctx, _DEFAULTS.n_parallel, _DEFAULTS.n_ctx) if n_ctx > 0 else 0
    flags["gpu-layers"] = settings.get("n_gpu_layers") or 0
    for name, (flag, value_of) in _FLAGS.items():
        if settings.get(name) not in (None, _FROM_FILE.get(name)):
            flags[flag] = value_of(settings[name])
    for name in ("type_k", "type_v"):
        if (kind := settings.get(name)) is not None:
            if kind not in _CACHE_TYPES:
                raise ConfigError(f"{where}: {name} is {kind}; it must be one of {', '.join(map(str, _CACHE_TYPES))}")
            flags[f"cache-type-{name[-1]}"] = _CACHE_TYPES[kind]
    if draft := settings.get("draft_model"):
        if draft != "prompt-lookup-decoding":
            raise ConfigError(f"{where}: draft_model is {draft!r}; the only supported value is prompt-lookup-decoding")
        flags |= {"spec": "suffix", "draft-max": settings.get("draft_model_num_pred_tokens") or 10}
    chat_format = settings.get("chat_format")
    if chat_format in _TEMPLATES:
        flags["chat-template"] = _TEMPLATES[chat_format]
    elif chat_format is not None and chat_format not in _IMAGE_CHAT_FORMATS:
        known = ", ".join(_TEMPLATES)
        raise ConfigError(
            f"{where}: chat_format is {chat_format!r}; leave it out to use the model's own, or use {known}"
        )
    for name, unset in _UNSET.items():
        if settings.get(name, unset) != unset:
            raise ConfigError(f"{where}: {name} is not supported; leave it out (docs/migration.md)")
    handled = {"model", "model_alias", "n_ctx", "n_gpu_layers", "type_k", "type_v", "draft_model", "chat_format"}
    handled |= {"draft_model_num_pred_tokens", "hf_model_repo_id", *_FLAGS, *_UNSET}
    _check_names(settings, handled, where)
    return flags


def _model(settings: Json) -> str:
    """The model's file, downloaded from the hub if necessary."""
    if repository := settings.get("hf_model_repo_id"):
        from cppbatch.models.hub import HubModel, pull_model

        return str(pull_model(HubModel(repository, settings["model"])))
    return str(settings["model"])


_FLAGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n_ubatch": ("ubatch-size", int),
    "n_threads": ("threads", lambda n: max(0, n)),
    "flash_attn": ("flash-attn", lambda on: "on" if on else "off"),
    "tensor_split": ("tensor-split", list),
    "split_mode": ("split-mode", CHOICES["split_mode"].__getitem__),
    "main_gpu": ("main-gpu", int),
    "numa": ("numa", lambda given: dict(enumerate(CHOICES["numa"])).get(int(given), "off")),
    "offload_kqv": ("kv-offload", bool),
    "seed": ("seed", lambda seed: -1 if seed == 0xFFFFFFFF else seed),
    "last_n_tokens_size": ("repeat-last-n", int),
    "lora_path": ("lora", str),
    "clip_model_path": ("mmproj", str),
    "chat_template_kwargs": ("chat-template-kwargs", dict),
    "kv_overrides": ("override-kv", list),
    "rope_scaling_type": ("rope-scaling", ("none", "linear", "yarn").__getitem__),
    **{name: (name.replace("_", "-"), float) for name in _FROM_FILE if name != "rope_scaling_type"},
    "yarn_orig_ctx": ("yarn-orig-ctx", int),
}
_TYPES: dict[str, Any] = {
    "n_ctx": int, "n_gpu_layers": int, "n_ubatch": int, "n_threads": int, "flash_attn": bool,
    "tensor_split": list[float], "seed": int, "last_n_tokens_size": int, "lora_path": str, "clip_model_path": str,
    "chat_template_kwargs": Json, "type_k": int, "type_v": int, "draft_model": str, "draft_model_num_pred_tokens": int,
    "chat_format": str, "numa": bool | int, "kv_overrides": list[str],
    **{name: type(usual) for name, usual in _FROM_FILE.items()},
}  # fmt: skip
_SERVER: dict[str, Any] = {"host": str, "port": int, "ssl_keyfile": str, "ssl_certfile": str, "api_key": str}


def _convert(value: Any, kind: Any, where: str) -> Any:
    """The value as this type. Accepts text such as "2048", as pydantic does. Raises `ConfigError`."""
    try:
        return msgspec.convert(value, kind | None, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_names(settings: Json, handled: set[str], where: str) -> None:
    """Logs names without effect; raises `ConfigError` for names unknown to llama-cpp-python."""
    if unknown := sorted(settings.keys() - handled - _WITHOUT_EFFECT):
        raise ConfigError(f"{where}: unknown setting {', '.join(unknown)}")
    if ignored := sorted(settings.keys() & _WITHOUT_EFFECT):
        log.info("%s: no effect: %s (docs/migration.md)", where, ", ".join(ignored))


def use_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """The callback of the flag: the file's server settings become the defaults of the other flags."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_llama_cpp_python_config(path).server}
    return path
