"""Compares how well two files of a model predict a text: perplexity, KL divergence, agreement of the top tokens.

As in llama.cpp's llama-perplexity, the text is processed in contexts of up to 512 tokens, and the second half of each
is scored, so that every scored token has a few hundred preceding tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from cppbatch.bench.report import Column, Report
from cppbatch.config import EngineConfig, FlashAttention, available_threads
from cppbatch.engine.compute_threads import ComputeThreads, usable_cpus
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.errors import ModelError
from cppbatch.llama import Batch, Vocab
from cppbatch.sizing.attention import TYPES, Types, keep_excess, plan_attention
from cppbatch.sizing.attention_choice import MAX_EXCESS_KL
from cppbatch.sizing.machine import this_machine

CONTEXT = 512
"""The maximum number of tokens in a context."""
_ROWS = 64  # tokens of a batch; limits the memory for the logits of large vocabularies


class Scored(Protocol):
    """The part of a context that scoring uses (`cppbatch.llama.Context`)."""

    def decode(self, batch: Batch) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...
    def clear(self) -> None: ...


class TextQuality(NamedTuple):
    """The figures of two models on the same tokens."""

    n_scored: int
    """Number of predicted tokens."""
    source_perplexity: float
    """exp of the mean of -log p(token) of the source."""
    perplexity: float
    """exp of the mean of -log p(token) of the other model."""
    kl_divergence: float
    """Mean over the positions of sum p (log p - log q), in nats: p of the source, q of the other model."""
    same_top: float
    """Fraction of positions at which both have the same most likely token."""

    def figures(self) -> dict[str, float]:
        """The figures of the other model for a row of a report."""
        return {
            "perplexity": self.perplexity,
            "kl_divergence": self.kl_divergence,
            "same_top_percent": 100 * self.same_top,
        }


def english_text() -> str:
    """A text of about 2,000 tokens: prose, dialogue, figures, a little code."""
    return files("cppbatch.bench").joinpath("english.txt").read_text("utf-8")


def compare_english(contexts: Sequence[Scored], vocab: Vocab) -> tuple[list[TextQuality], str]:
    """Scores `english_text` with the first context and each other one. Returns the figures, and a note about the text.

    Raises the exceptions of `compare_text`.
    """
    tokens = vocab.tokenize(english_text(), add_special=False)
    found = compare_text(contexts[0], contexts[1:], tokens, vocab.bos if vocab.adds_bos else None)
    return found, (
        f"text: {len(tokens):,} tokens of English text in contexts of at most {CONTEXT}; the second half of each is "
        f"scored ({found[0].n_scored:,} tokens)"
    )


def compare_text(
    source: Scored, others: Sequence[Scored], tokens: npt.NDArray[np.int32], bos: int | None = None
) -> list[TextQuality]:
    """Scores the tokens, int32[n], with the source and each other model. `bos`: the token before each context, or None.

    The contexts are empty afterwards. They must hold `CONTEXT` tokens and take batches of 64. Raises ValueError for
    fewer than 4 tokens, and the exceptions of the contexts.
    """
    if len(tokens) < 4:
        raise ValueError(f"{len(tokens)} tokens are not enough for a score")
    n, n_source = 0, 0.0
    n_other, kl, same = (np.zeros(len(others)) for _ in range(3))
    before = [] if bos is None else [bos]
    for part in np.array_split(tokens, math.ceil(len(tokens) / (CONTEXT - len(before)))):
        context = np.concatenate([np.asarray(before, np.int32), part])
        pieces = zip(*(_log_probs(each, context) for each in (source, *others)), strict=True)
        for (following, log_p), *of_others in pieces:
            each = np.arange(len(following))
            n += len(following)
            n_source -= float(log_p[each, following].sum(dtype=np.float64))
            for i, (_, log_q) in enumerate(of_others):
                n_other[i] -= float(log_q[each, following].sum(dtype=np.float64))
                kl[i] += float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64))
                same[i] += int((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
    perplexity = math.exp(n_source / n)
    return [
        TextQuality(n, perplexity, math.exp(of_other / n), float(k / n), float(s / n))
        for of_other, k, s in zip(n_other, kl, same, strict=True)
    ]


def _log_probs(
    context: Scored, tokens: npt.NDArray[np.int32]
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Yields (the following token int32[r], log-probabilities float32[r, n_vocab]) of the second half, in pieces."""
    batch = Batch(_ROWS)
    first, stop = len(tokens) // 2, len(tokens) - 1  # the scored positions: each predicts the next token
    at = 0
    while at < stop:
        end = min(at + _ROWS, stop if at >= first else first)
        batch.clear()
        batch.add_run(tokens[at:end], at, 0, n_logits=end - at if at >= first else 0)
        context.decode(batch)
        if at >= first:
            logits = context.logits(end - at)
            shifted = logits - logits.max(axis=1, keepdims=True)
            yield tokens[at + 1 : end + 1], shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        at = end
    context.clear()


# --- cache types -----------------------------------------------------------------------------------------------------


_SOURCE: Types = ("f16", "f16")
_COLUMNS = [
    Column("flash_attn", "FA"), Column("keys", "keys"), Column("values", "values"),
    Column("perplexity", "perplexity", 3), Column("kl_divergence", "KL", 5), Column("excess", "more", 5),
    Column("same_top_percent", "same top %"),
]  # fmt: skip


def compare_cache_types(
    model: Path, types: Sequence[Types] = TYPES, progress: Callable[[str], object] = lambda line: None
) -> Report:
    """Measures the text quality with these types of keys and values and with f16, and stores the KL divergences for
    later starts.

    All types use flash attention, and f16 is also measured without it. The divergence of the latter is only due to the
    order of additions, which affects the rounding of quantised weights; any excess is due to the type. Raises
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
        found, about_text = compare_english(contexts, loaded.vocab)
    floor = found[0].kl_divergence
    rows: list[dict[str, Any]] = [
        {"flash_attn": "on", "keys": "f16", "values": "f16", "perplexity": found[0].source_perplexity}
    ]
    for (flash_attn, (k, v)), quality in zip(ways[1:], found, strict=True):
        rows.append({"flash_attn": flash_attn, "keys": k, "values": v, **quality.figures()})
    for row in rows[2:]:
        row["excess"] = row["kl_divergence"] - floor
    keep_excess(model, {f"{row['keys']} {row['values']}": row["excess"] for row in rows[2:]})
    return Report(
        kind="cache-types", title=f"types of the KV cache with {model.name}", machine=this_machine(), model=model.stem,
        settings={"types": [f"{k} {v}" for k, v in types]}, columns=_COLUMNS, rows=rows,
        notes=[
            about_text,
            "KL: KL divergence from the first row, nats; more: excess over f16 without flash attention, which adds in "
            f"a different order. Types with an excess below {MAX_EXCESS_KL} may be chosen if they are clearly faster",
        ],
    )  # fmt: skip


# --- the cache types that a start proposes ---------------------------------------------------------------------------


_SMALL_BYTES = 2 << 30  # maximum file size for measuring the quality automatically


def measure_proposal(
    config: EngineConfig, given: Collection[str], progress: Callable[[str], object] = lambda line: None
) -> str | None:
    """Measures the proposed cache types for a small model, so that later starts may use them.

    Returns a sentence with the result; None without a proposal, or for a large model. Raises the exceptions of
    loading a model.
    """
    unmeasured = plan_attention(config, given).unmeasured
    if unmeasured is None or Path(config.model_path).stat().st_size > _SMALL_BYTES:
        return None
    row = compare_cache_types(Path(config.model_path), [(unmeasured.k, unmeasured.v)], progress).rows[-1]
    is_close = row["excess"] < MAX_EXCESS_KL
    verdict = "later starts use it" if is_close else f"not below {MAX_EXCESS_KL}, so it is used only if given"
    return (
        f"-ctk {unmeasured.k} -ctv {unmeasured.v} is faster, and its KL divergence from f16 is {row['excess']:.5f} "
        f"higher than that of a different order of additions: {verdict}"
    )
