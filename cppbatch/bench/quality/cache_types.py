"""What the types of the KV cache change: text quality of one model, beside f16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cppbatch.bench.machine import this_machine
from cppbatch.bench.quality.text_quality import CONTEXT, compare_text, english_text
from cppbatch.bench.report import Column, Report
from cppbatch.config import EngineConfig, FlashAttention, available_threads
from cppbatch.engine.attention_choice import MAX_EXCESS_KL
from cppbatch.engine.compute_threads import ComputeThreads, usable_cpus
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import ModelError
from cppbatch.models.cache_quality import TYPES, Types, keep_excess

_SOURCE: Types = ("f16", "f16")
_COLUMNS = [
    Column("flash_attn", "FA"),
    Column("keys", "keys"),
    Column("values", "values"),
    Column("perplexity", "perplexity", 3),
    Column("kl_divergence", "KL", 5),
    Column("excess", "more", 5),
    Column("same_top_percent", "same top %"),
]


def compare_cache_types(
    model: Path, types: Sequence[Types] = TYPES, progress: Callable[[str], object] = lambda line: None
) -> Report:
    """Measures the text quality with these types of keys and values, and with f16 alone, and keeps the KL divergences
    for later starts.

    All are computed with flash attention, and f16 without it too. The divergence of the latter comes from the order of
    additions alone, which quantised weights round on; what a type has more than that is due to the type. Raises
    `ModelError` for a model that does not generate text, and the exceptions of loading a model.
    """
    config = EngineConfig(model_path=str(model), n_ctx=CONTEXT, n_parallel=1, kv_layout="unified", spec="off")
    ways: list[tuple[FlashAttention, Types]] = [("on", _SOURCE), ("off", _SOURCE), *(("on", each) for each in types)]
    progress("text quality")
    threads = ComputeThreads(available_threads(), len(usable_cpus()))
    with load_model(config) as loaded, ExitStack() as stack:
        if not loaded.can_generate:
            raise ModelError(f"{model.name} is an embedding model: cache types do not apply")
        contexts = []
        for flash_attn, (k, v) in ways:
            way = replace(config, flash_attn=flash_attn, cache_type_k=k, cache_type_v=v)
            context = make_context(way, loaded)
            stack.callback(context.close)
            context.use_threads(threads.now())
            contexts.append(context)
        vocab = loaded.vocab
        tokens = vocab.tokenize(english_text(), add_special=False)
        found = compare_text(contexts[0], contexts[1:], tokens, vocab.bos if vocab.adds_bos else None)
    floor = found[0].kl_divergence
    rows: list[dict[str, Any]] = [
        {"flash_attn": "on", "keys": "f16", "values": "f16", "perplexity": found[0].source_perplexity}
    ]
    for (flash_attn, (k, v)), quality in zip(ways[1:], found, strict=True):
        rows.append(
            {
                "flash_attn": flash_attn,
                "keys": k,
                "values": v,
                "perplexity": quality.perplexity,
                "kl_divergence": quality.kl_divergence,
                "same_top_percent": 100 * quality.same_top,
            }
        )
    for row in rows[2:]:
        row["excess"] = row["kl_divergence"] - floor
    keep_excess(model, {f"{row['keys']} {row['values']}": row["excess"] for row in rows[2:]})
    return Report(
        kind="cache-types",
        title=f"types of the KV cache with {model.name}",
        machine=this_machine(),
        model=model.stem,
        settings={"types": [f"{k} {v}" for k, v in types]},
        columns=_COLUMNS,
        rows=rows,
        notes=[
            f"text: {len(tokens):,} tokens of English in contexts of at most {CONTEXT}; the second half of each is "
            f"scored ({found[0].n_scored:,} tokens)",
            "KL: KL divergence from the first row, nats; more: than that of f16 without flash attention, which adds in "
            f"another order. Types with less than {MAX_EXCESS_KL} more may be chosen where they are clearly faster",
        ],
    )
