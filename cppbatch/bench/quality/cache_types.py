"""What the types of the KV cache change: text quality of one model, and what was measured of it before."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from platformdirs import user_cache_path

from cppbatch.bench.machine import this_machine
from cppbatch.bench.profile import file_identity
from cppbatch.bench.quality.text_quality import CONTEXT, compare_text, english_text
from cppbatch.bench.report import Column, Report
from cppbatch.config import CacheType, EngineConfig, available_threads
from cppbatch.engine.attention_choice import MAX_KL
from cppbatch.engine.compute_threads import ComputeThreads, usable_cpus
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import ModelError
from cppbatch.models.kernels import read_cached, write_cached

log = logging.getLogger("cppbatch.tune")

Types = tuple[CacheType, CacheType]
"""Those of keys and of values."""
TYPES: tuple[Types, ...] = (
    ("f16", "bf16"), ("bf16", "f16"), ("bf16", "bf16"), ("f16", "q8_0"), ("q8_0", "f16"), ("q8_0", "bf16"),
    ("bf16", "q8_0"), ("q8_0", "q8_0"),
)  # fmt: skip
"""Those that may be chosen without being given."""
_SOURCE: Types = ("f16", "f16")
_COLUMNS = [
    Column("keys", "keys"),
    Column("values", "values"),
    Column("perplexity", "perplexity", 3),
    Column("kl_divergence", "KL", 5),
    Column("same_top_percent", "same top %"),
    Column("is_close", f"KL below {MAX_KL}"),
]


class CacheQuality(msgspec.Struct, frozen=True):
    """What was measured of a model's file."""

    kl: dict[str, float]
    """{types of keys and values ("q8_0 bf16"): KL divergence from the f16 cache, in nats}."""


def known_kl(model: Path) -> Mapping[str, float]:
    """The KL divergences that were measured of this file; empty if none were."""
    known = read_cached(_path(model), CacheQuality)
    return known.kl if known else {}


def _path(model: Path) -> Path:
    key = hashlib.sha256(repr(file_identity(model)).encode()).hexdigest()[:12]
    return user_cache_path("cppbatch") / "cache-types" / f"{model.stem}-{key}.json"


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
    write_cached(_path(model), CacheQuality({**known_kl(model), **kl}))
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
