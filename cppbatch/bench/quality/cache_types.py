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
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.attention_choice import MAX_KL
from cppbatch.engine.compute_threads import ComputeThreads, usable_cpus
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import ModelError
from cppbatch.models.cache_quality import TYPES, Types, keep_kl

_SOURCE: Types = ("f16", "f16")
_COLUMNS = [
    Column("keys", "keys"),
    Column("values", "values"),
    Column("perplexity", "perplexity", 3),
    Column("kl_divergence", "KL", 5),
    Column("same_top_percent", "same top %"),
    Column("is_close", f"KL below {MAX_KL}"),
]


def compare_cache_types(
    model: Path, types: Sequence[Types] = TYPES, progress: Callable[[str], object] = lambda line: None
) -> Report:
    """Measures the text quality with these types of keys and values, and with f16 alone, and keeps the KL divergences
    for later starts. All are computed with flash attention.

    Raises `ModelError` for a model that does not generate text, and the exceptions of loading a model.
    """
    config = EngineConfig(
        model_path=str(model), n_ctx=CONTEXT, n_parallel=1, flash_attn="on", kv_layout="unified", spec="off"
    )
    progress("text quality")
    threads = ComputeThreads(available_threads(), len(usable_cpus()))
    with load_model(config) as loaded, ExitStack() as stack:
        if not loaded.can_generate:
            raise ModelError(
                f"{model.name} returns vectors: its cache is empty between two texts, and its types do not matter"
            )
        contexts = []
        for k, v in (_SOURCE, *types):
            context = make_context(replace(config, cache_type_k=k, cache_type_v=v), loaded)
            stack.callback(context.close)
            context.use_threads(threads.now())
            contexts.append(context)
        vocab = loaded.vocab
        tokens = vocab.tokenize(english_text(), add_special=False)
        found = compare_text(contexts[0], contexts[1:], tokens, vocab.bos if vocab.adds_bos else None)
    kl = {f"{k} {v}": quality.kl_divergence for (k, v), quality in zip(types, found, strict=True)}
    keep_kl(model, kl)
    rows: list[dict[str, Any]] = [{"keys": "f16", "values": "f16", "perplexity": found[0].source_perplexity}]
    for (k, v), quality in zip(types, found, strict=True):
        figures = {"perplexity": quality.perplexity, "kl_divergence": quality.kl_divergence}
        is_close = "yes" if quality.kl_divergence < MAX_KL else "no"
        rows.append(
            {"keys": k, "values": v, **figures, "same_top_percent": 100 * quality.same_top, "is_close": is_close}
        )
    return Report(
        kind="cache-types",
        title=f"types of the KV cache with {model.name}",
        machine=this_machine(),
        model=model.stem,
        settings={"types": [f"{k} {v}" for k, v in types]},
        columns=_COLUMNS,
        rows=rows,
        notes=[
            f"text: {len(tokens):,} tokens of English in contexts of at most {CONTEXT}; the second half of each "
            f"context is scored ({found[0].n_scored:,} tokens)",
            "KL: KL divergence from the f16 cache, nats. Types below the bound may be chosen by `-ctk` and `-ctv` auto",
        ],
    )
