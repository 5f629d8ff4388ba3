"""Finds the lines of a text file that are closest in meaning to a query.

.venv/bin/python examples/embedding_search.py "Where do ships go at night?" --file examples/data/questions.txt

The default model is not made for embeddings; use an embedding model (GGUF) for good results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cppbatch import BatchInferenceEngine, pull_default
from cppbatch.config import Pooling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="?", default="How do boats find the harbour?")
    parser.add_argument("--file", default="examples/data/questions.txt", type=Path, help="one text per line")
    parser.add_argument("--top", type=int, default=3, help="number of lines to show")
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--pooling", choices=["mean", "cls", "last"], help="default: from the model's file")
    args = parser.parse_args()

    lines = [line for line in args.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    pooling: Pooling | None = args.pooling or (None if args.model else "mean")
    with BatchInferenceEngine(args.model or pull_default(), n_batch=512, pooling=pooling) as engine:
        query, *texts = engine.embed([args.query, *lines])  # vectors of length 1

    similarities = np.stack(texts) @ query  # so this is the cosine
    for i in np.argsort(-similarities)[: args.top]:
        print(f"{similarities[i]:.3f}  {lines[i]}")


if __name__ == "__main__":
    main()
