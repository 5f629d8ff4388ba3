"""Texts of quantised weights part only where two tokens are nearly tied."""

from __future__ import annotations

from pathlib import Path

from cppbatch.config import available_threads
from cppbatch.llama import Batch, Context, Model

TOP_TWO_TIE = 0.5
"""Logits this close may swap when a quantised weight's rounding flips."""


def gap_where_it_parts(path: Path, prompt: str, tokens: list[int]) -> float:
    """How much more likely, in logits, the model alone finds its own next token where `tokens` first differ from it; 0
    if they never do."""
    with Model(path) as model, Context(model, n_ctx=2048, n_threads=available_threads(), flash_attn="off") as context:
        start, batch = model.vocab.tokenize(prompt), Batch(2048)
        batch.add_run(start, 0, 0, n_logits=1)
        for position, token in enumerate(tokens, len(start)):
            context.decode(batch)
            row = context.logits(1)[0]
            if row.argmax() != token:
                return float(row.max() - row[token])
            batch.clear()
            batch.add_rows([token], [position], [0])
    return 0.0
