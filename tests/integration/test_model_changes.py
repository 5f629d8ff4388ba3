"""Settings that change what a model computes: logits are those of llama-cpp-python's own class with the same values."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import StateKey, weight_files
from cppbatch.engine.load_check import check_loads
from cppbatch.engine.runtime import load_runtime
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models.synthetic import LlamaShape
from tests.support import tiny_models
from tests.support.contexts import PROMPT, Row, decode

SIZES: dict[str, Any] = {"n_ctx": 256, "n_parallel": 2, "n_threads": 1}
NO_REPACK: dict[str, Any] = {"repack": "off", "flash_attn": "off", "kv_layout": "unified"}


def logits_here(model: Path, tokens: Sequence[int] | Any = PROMPT, **settings: Any) -> Row:
    """Of a runtime with these settings."""
    runtime = load_runtime(EngineConfig(str(model), **SIZES, **NO_REPACK, **settings))
    try:
        return decode(runtime.context, tokens)  # type: ignore[arg-type]
    finally:
        runtime.close()


def logits_there(model: Path, vector: Any = None, layers: tuple[int, int] = (1, 99), **arguments: Any) -> Row:
    """Of llama-cpp-python's class."""
    llm = llama_cpp.Llama(str(model), n_ctx=256, n_threads=1, verbose=False, logits_all=True, **arguments)
    if vector is not None:
        data = np.ascontiguousarray(vector, np.float32)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert not llama_cpp.llama_set_adapter_cvec(llm._ctx.ctx, pointer, data.size, data.shape[-1], *layers)
    llm.eval(PROMPT.tolist())
    row: Row = llm.scores[len(PROMPT) - 1].copy()
    llm.close()
    return row


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"rope_freq_base": 500.0}, {"rope_freq_base": 500.0}),
        ({"rope_freq_scale": 0.25}, {"rope_freq_scale": 0.25}),
        ({"rope_scale": 4}, {"rope_freq_scale": 0.25}),
        ({"rope_scaling": "none", "rope_scale": 4}, {"rope_scaling_type": 0, "rope_freq_scale": 0.25}),
        (
            {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 64},
            {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64},
        ),
        (
            {"rope_scaling": "yarn", "rope_scale": 4, "yarn_ext_factor": 0.5, "yarn_attn_factor": 1.5},
            {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_ext_factor": 0.5, "yarn_attn_factor": 1.5},
        ),
        (
            {"rope_scaling": "yarn", "rope_scale": 4, "yarn_beta_slow": 2.0, "yarn_beta_fast": 8.0},
            {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_beta_slow": 2.0, "yarn_beta_fast": 8.0},
        ),
        ({"kv_overrides": ("llama.rope.freq_base=float:77.5",)}, {"kv_overrides": {"llama.rope.freq_base": 77.5}}),
    ],
)
def test_positions_and_metadata_are_as_in_llama_cpp_python(
    tiny_llama: Path, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    here = logits_here(tiny_llama, **settings)
    assert np.allclose(here, logits_there(tiny_llama, **arguments), rtol=0, atol=1e-4)
    is_changed = settings.get("rope_scaling") != "none"
    assert bool(np.abs(here - logits_there(tiny_llama)).max() > 1e-3) is is_changed


def test_metadata_that_crash_llama_cpp_are_refused_before_the_load(tiny_llama: Path) -> None:
    config = EngineConfig(str(tiny_llama), kv_overrides=("llama.block_count=int:5000",))
    with pytest.raises(ModelError, match=r"llama\.cpp crashes .* with these metadata .*override-kv"):
        check_loads(config)


def test_a_token_that_metadata_name_is_the_end_of_texts(tiny_llama: Path) -> None:
    runtime = load_runtime(EngineConfig(str(tiny_llama), **SIZES, kv_overrides=("tokenizer.ggml.eos_token_id=int:77",)))
    try:
        assert 77 in runtime.info.end_tokens
    finally:
        runtime.close()


def test_yarn_lets_a_request_be_longer_than_the_training_context(tmp_path: Path) -> None:
    model = tiny_models.llama(tmp_path / "short.gguf", shape=LlamaShape(n_ctx_train=256))

    def longest(**settings: Any) -> int:
        runtime = load_runtime(EngineConfig(str(model), n_ctx=4096, n_parallel=1, n_threads=1, **settings))
        try:
            return runtime.info.max_sequence
        finally:
            runtime.close()

    assert longest() == 256
    assert longest(rope_scaling="yarn", rope_scale=4) == 1024
    assert longest(kv_overrides=("llama.context_length=int:512",)) == 512


def test_a_file_with_weights_that_are_not_numbers_is_refused_if_asked(tmp_path: Path) -> None:
    model = tiny_models.llama(tmp_path / "bad.gguf")
    reader = gguf.GGUFReader(model, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data[0] = np.nan
    with pytest.raises(ModelError, match="invalid data"):
        logits_here(model, check_tensors=True)


@pytest.mark.parametrize(
    "settings",
    [{"rope_freq_base": 500.0}, {"rope_scaling": "yarn"}, {"kv_overrides": ("llama.rope.freq_base=float:77.5",)}],
)
def test_saved_states_are_only_for_engines_with_the_same_changes(tiny_llama: Path, settings: dict[str, Any]) -> None:
    def key(**changed: Any) -> str:
        config = EngineConfig(str(tiny_llama), **SIZES, **changed)
        runtime, files = load_runtime(config), weight_files(config)
        try:
            files.read()
            return StateKey(runtime.info, config, runtime.state_settings, files).short
        finally:
            runtime.close()

    assert key(**settings) == key(**settings) != key()


def test_values_that_are_not_possible_are_refused_with_the_setting() -> None:
    for settings, problem in (
        ({"kv_overrides": ("a",)}, "KEY=TYPE:VALUE"),
        ({"kv_overrides": ("a=long:1",)}, "its type is 'long'"),
        ({"kv_overrides": ("a=bool:yes",)}, "its value is 'yes'"),
        ({"kv_overrides": (f"a=str:{'x' * 128}",)}, "127 bytes"),
        ({"rope_scale": 2, "rope_freq_scale": 0.5}, "leave one out"),
        ({"rope_freq_base": float("nan")}, "rope_freq_base"),
        ({"control_vector_layers": (0, 1)}, "the first and the last layer"),
        ({"control_vectors": (("a", float("inf")),)}, "scale of a is inf"),
        ({"image_min_tokens": 9, "image_max_tokens": 8}, "lower the former"),
    ):
        with pytest.raises(ConfigError, match=problem):
            EngineConfig("m.gguf", **settings)
