"""What `auto` chooses, and that a choice of one's own is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.kv.layout import choose_flash_attn, choose_layout, stream_cells, switches_layout, unified_cells


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_path="model.gguf", **settings)


@pytest.mark.parametrize(
    ("settings", "has_kv_cells", "layout", "switches"),
    [
        ({"n_ctx": 16384}, True, "per-sequence", True),
        ({"n_ctx": 16 * 256}, True, "per-sequence", True),
        ({"n_ctx": 16 * 256 - 1}, True, "unified", False),  # llama.cpp would round streams up to 256 cells
        ({"n_ctx": 16384}, False, "unified", False),
        ({"n_ctx": 16384, "deterministic": True}, True, "per-sequence", False),
        ({"n_ctx": 1024, "n_parallel": 1}, True, "unified", False),
        ({"n_ctx": 2048, "n_parallel": 1}, True, "per-sequence", False),  # all that the model can read
    ],
)
def test_an_engine_starts_with_streams_and_switches_if_they_are_large_enough(
    settings: dict[str, Any], has_kv_cells: bool, layout: str, switches: bool
) -> None:
    its = config(**settings)
    assert choose_layout(its, n_ctx_train=2048, has_kv_cells=has_kv_cells) == layout
    assert switches_layout(its, has_kv_cells=has_kv_cells) == switches


@pytest.mark.parametrize("n_ctx", [4096, 5000, 8191, 8192, 16384, 100_000])
def test_streams_take_no_more_memory_than_the_unified_layout(n_ctx: int) -> None:
    its = config(n_ctx=n_ctx)
    assert stream_cells(its) % 256 == 0
    assert n_ctx - 16 * 256 < 16 * stream_cells(its) <= n_ctx <= unified_cells(its) < n_ctx + 256


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_a_requested_layout_is_kept(layout: str) -> None:
    for n_ctx in (1024, 1 << 20):
        asked = config(n_ctx=n_ctx, kv_layout=layout)
        assert choose_layout(asked, n_ctx_train=2048, has_kv_cells=True) == layout
        assert not switches_layout(asked, has_kv_cells=True)


def test_flash_attention_is_off_only_in_streams_on_a_cpu_with_amx() -> None:
    off = [
        (layout, on_gpu, has_amx)
        for layout in ("unified", "per-sequence")
        for on_gpu in (False, True)
        for has_amx in (False, True)
        if choose_flash_attn(config(), layout, on_gpu=on_gpu, has_amx=has_amx) == "off"
    ]
    assert off == [("per-sequence", False, True)]


@pytest.mark.parametrize("measured", ["on", "off"])
def test_measured_flash_attention_is_for_streams_of_a_cpu_only(measured: str) -> None:
    its = config(stream_flash_attn=measured)
    for has_amx in (False, True):
        assert choose_flash_attn(its, "per-sequence", on_gpu=False, has_amx=has_amx) == measured
        assert choose_flash_attn(its, "per-sequence", on_gpu=True, has_amx=has_amx) == "auto"
        assert choose_flash_attn(its, "unified", on_gpu=False, has_amx=has_amx) == "auto"


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f32"), ("f32", "f16"), ("q8_0", "f32")])
def test_an_f32_cache_is_computed_without_flash_attention_which_would_cast_it_to_f16(types: tuple[str, str]) -> None:
    its = config(cache_type_k=types[0], cache_type_v=types[1])
    layouts: list[KvLayout] = ["unified", "per-sequence"]
    for layout, on_gpu in itertools.product(layouts, (False, True)):
        assert choose_flash_attn(its, layout, on_gpu=on_gpu, has_amx=False) == "off"


@pytest.mark.parametrize(
    "settings", [{"cache_type_v": "q8_0"}, {"cache_type_k": "f32", "cache_type_v": "q4_0"}, {"deterministic": True}]
)
def test_flash_attention_is_on_where_it_is_needed(settings: dict[str, Any]) -> None:
    assert choose_flash_attn(config(**settings), "per-sequence", on_gpu=False, has_amx=True) == "on"


@pytest.mark.parametrize("setting", ["on", "off"])
def test_requested_flash_attention_is_kept(setting: str) -> None:
    for layout in ("unified", "per-sequence"):
        assert choose_flash_attn(config(flash_attn=setting), layout, on_gpu=False, has_amx=True) == setting
