"""Log-probabilities of texts by hand: one context of llama.cpp, one decode for each text, a log-softmax in float64.

Runs in .venv, unlike the tests of clients: `python -m tests.clients.model_scores MODEL.gguf F32.gguf < pairs.json`
makes a copy of the model with F32 weights, and prints a JSON list: for each pair [context, continuation] the sum over
the continuation's tokens, and whether each of them is the likeliest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from cppbatch.llama import Batch, Context, Model
from cppbatch.llama.quantize_child import quantize


def main() -> None:
    source, path = map(Path, sys.argv[1:])
    quantize(source, path, "F32")
    scores = []
    with Model(path) as model:
        for before, after in json.load(sys.stdin):
            tokens = model.vocab.tokenize(before + after, add_special=False)
            n_before = len(model.vocab.tokenize(before, add_special=False))
            scores.append(score(model, np.asarray(tokens, np.int32), n_before))
    print(json.dumps(scores))


def score(model: Model, tokens: np.ndarray, n_before: int) -> tuple[float, bool]:
    with Context(
        model, n_ctx=512, n_batch=512, n_seq_max=1, n_threads=2, type_k="f32", type_v="f32", flash_attn="off"
    ) as context:
        batch = Batch(context.n_batch)
        batch.add_run(tokens, 0, 0, n_logits=len(tokens))
        context.decode(batch)
        rows = context.logits(len(tokens)).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    after = range(n_before, len(tokens))
    total = sum(float(rows[i - 1, tokens[i]]) for i in after)
    return total, all(int(rows[i - 1].argmax()) == tokens[i] for i in after)


if __name__ == "__main__":
    main()
