"""The self-check's child process: decodes some tokens with each model, many at once and one alone. It may crash."""

from __future__ import annotations

import sys

import numpy as np

from cppbatch.llama import Batch, Context, Model


def main() -> None:
    """`selfcheck_child USE_EXTRA_BUFTS MODEL...`: exit code 0 if all logits of every model are finite."""
    repack, *paths = sys.argv[1:]
    for path in paths:
        model = Model(path, n_gpu_layers=0, repack=repack == "1")
        with model, Context(model, n_ctx=256, n_batch=64, n_threads=1) as context:
            batch = Batch(64)
            for tokens, position in ((np.arange(32, dtype=np.int32), 0), (np.array([1], np.int32), 32)):
                batch.clear()
                batch.add_run(tokens, position, 0, n_logits=1)
                context.decode(batch)
                if not np.isfinite(context.logits(1)).all():
                    raise SystemExit(f"{path}: the logits are not finite")


if __name__ == "__main__":
    main()
