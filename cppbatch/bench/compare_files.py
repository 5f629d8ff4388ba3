"""Compares two files of a model: size, memory, speed measured alternately, and text quality."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.quality import CONTEXT, compare_english
from cppbatch.bench.report import Column, Report, Spread
from cppbatch.bench.throughput import bare_loop
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import EstimateFailed
from cppbatch.llama import Batch, Model
from cppbatch.sizing.estimate import estimate_memory
from cppbatch.sizing.machine import this_machine

_PARALLEL = 16
_PROMPT, _NEW = 32, 24  # tokens
_SPEED_SECONDS, _MAX_TURNS = 10, 5
_FILE_COLUMNS = [
    Column("name", "file"), Column("size_mb", "MB"), Column("weights_mib", "weights MiB"),
    Column("decode_1", "tok/s B=1"), Column("decode_16", "B=16"), Column("prefill", "prefill", 0),
    Column("perplexity", "perplexity", 2), Column("kl_divergence", "KL", 4), Column("same_top_percent", "same top %"),
]  # fmt: skip


def compare_files(source: Path, other: Path, progress: Callable[[str], object] = lambda line: None) -> Report:
    """Measures both files of a model. For an embedding model, it does not measure speed and text quality.

    Raises the exceptions of loading a model.
    """
    rows = [{"name": path.name, "size_mb": path.stat().st_size / 1e6} for path in (source, other)]
    configs = [EngineConfig(model_path=str(path), n_parallel=_PARALLEL) for path in (source, other)]
    for row, n_bytes in zip(rows, _weights(configs), strict=True):
        row["weights_mib"] = n_bytes and n_bytes / 2**20
    notes = ["weights: in memory, with the copies that llama.cpp repacks for this CPU"]
    with load_model(configs[0]) as first, load_model(configs[1]) as second:
        if first.can_generate:
            progress("speed")
            for row, figures in zip(rows, _speeds(first, second, configs), strict=True):
                row.update(figures)
            progress("text quality")
            notes += _quality(first, second, configs, rows)
    return Report(
        kind="requantize", title=f"{source.name} and {other.name}", machine=this_machine(), model=source.stem,
        settings={"prompt_tokens": _PROMPT, "new_tokens": _NEW, "batch_sizes": [1, _PARALLEL]},
        columns=[column for column in _FILE_COLUMNS if any(column.key in row for row in rows)], rows=rows, notes=notes,
    )  # fmt: skip


def _weights(configs: list[EngineConfig]) -> list[int | None]:
    """Bytes of the weights in memory; None if llama.cpp does not report them."""
    try:
        footprints = estimate_memory(configs).footprints
    except EstimateFailed:
        return [None] * len(configs)
    return [sum(buffer.n_bytes for buffer in each.buffers if buffer.kind == "weights") or None for each in footprints]


def _speeds(first: Model, second: Model, configs: list[EngineConfig]) -> list[dict[str, Spread]]:
    """Measures both models alternately, so that both are subject to the same disturbances."""
    n_ctx = _PARALLEL * (_PROMPT + _NEW)
    contexts = [
        make_context(replace(config, n_ctx=n_ctx), model)
        for config, model in zip(configs, (first, second), strict=True)
    ]
    draw = np.random.default_rng(0)
    prompts = [random_prompt(draw, _PROMPT, first.vocab.n_tokens) for _ in range(_PARALLEL)]
    batch = Batch(min(context.n_batch for context in contexts))
    taken: list[dict[str, list[float]]] = [{"decode_1": [], "decode_16": [], "prefill": []} for _ in contexts]
    for context in contexts:
        bare_loop(context, batch, prompts, 2)  # the first use of a context is slower
    began, n_turns = time.perf_counter(), 0
    while n_turns < 1 or (n_turns < _MAX_TURNS and time.perf_counter() - began < _SPEED_SECONDS):
        for context, figures in zip(contexts, taken, strict=True):
            figures["decode_1"].append(bare_loop(context, batch, prompts[:1], _NEW).decode)
            all_rows = bare_loop(context, batch, prompts, _NEW)
            figures["decode_16"].append(all_rows.decode)
            figures["prefill"].append(all_rows.prefill)
        n_turns += 1
    for context in contexts:
        context.close()
    return [{name: Spread.of(values) for name, values in figures.items()} for figures in taken]


def _quality(first: Model, second: Model, configs: list[EngineConfig], rows: list[dict[str, Any]]) -> list[str]:
    """Adds the figures to the rows. Returns notes about them."""
    contexts = [
        make_context(replace(config, n_ctx=CONTEXT, n_parallel=1), model)
        for config, model in zip(configs, (first, second), strict=True)
    ]
    (quality,), about_text = compare_english(contexts, first.vocab)
    for context in contexts:
        context.close()
    rows[0]["perplexity"] = quality.source_perplexity
    rows[1].update(quality.figures())
    return [
        about_text,
        "KL: KL divergence from the source, nats; same top: how often both have the same most likely token",
    ]
