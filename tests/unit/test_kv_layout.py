"""What `auto` chooses, and that a choice of one's own is kept."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch.config import EngineConfig
from cppbatch.engine.kv_layout import choose_flash_attn, choose_layout


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_path="model.gguf", **settings)


@pytest.mark.parametrize(
    ("n_ctx", "on_gpu", "has_kv_cells", "layout"),
    [
        (16 * 2048, False, True, "per-sequence"),  # every stream holds all that the model can read
        (16 * 2048 - 1, False, True, "unified"),
        (16 * 2048, True, True, "unified"),
        (16 * 2048, False, False, "unified"),
    ],
)
def test_streams_are_chosen_on_a_cpu_where_they_limit_nobody(
    n_ctx: int, on_gpu: bool, has_kv_cells: bool, layout: str
) -> None:
    chosen = choose_layout(config(n_ctx=n_ctx), on_gpu=on_gpu, n_ctx_train=2048, has_kv_cells=has_kv_cells)
    assert chosen == layout


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_a_layout_that_was_asked_for_is_kept(layout: str) -> None:
    for n_ctx in (1024, 1 << 20):
        asked = config(n_ctx=n_ctx, kv_layout=layout)
        assert choose_layout(asked, on_gpu=False, n_ctx_train=2048, has_kv_cells=True) == layout


def test_flash_attention_is_off_only_in_streams_on_a_cpu_with_amx() -> None:
    off = [
        (layout, on_gpu, has_amx)
        for layout in ("unified", "per-sequence")
        for on_gpu in (False, True)
        for has_amx in (False, True)
        if choose_flash_attn(config(), layout, on_gpu=on_gpu, has_amx=has_amx) == "off"
    ]
    assert off == [("per-sequence", False, True)]


@pytest.mark.parametrize("setting", ["on", "off"])
def test_flash_attention_that_was_asked_for_is_kept(setting: str) -> None:
    for layout in ("unified", "per-sequence"):
        assert choose_flash_attn(config(flash_attn=setting), layout, on_gpu=False, has_amx=True) == setting
