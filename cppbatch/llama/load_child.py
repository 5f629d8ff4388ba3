"""The child process that tries a model or adapter: loads it and computes a few tokens. It may crash."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError
from cppbatch.llama import Batch, Context, Model
from cppbatch.models.draft_files import row_kind

_OVERRIDE = "--override-kv="
_N_TOKENS = 2  # of a prompt, before one more


def main() -> None:
    """`load_child MODEL [ADAPTER] [--override-kv=KEY=TYPE:VALUE ...]`: exit code 0 if it computes. Layers stay on the
    CPU, and weights are not repacked, so that they are only mapped."""
    path, *adapters = (each for each in sys.argv[1:] if not each.startswith(_OVERRIDE))
    overrides = [each.removeprefix(_OVERRIDE) for each in sys.argv[1:] if each.startswith(_OVERRIDE)]
    try:
        with Model(path, n_gpu_layers=0, repack=False, kv_overrides=overrides) as model:
            for adapter in adapters:
                model.add_adapter(adapter)
            if model.is_one_stack and not row_kind(Path(path)):  # which reads the rows of another model
                _compute(model)
    except CppBatchError as error:
        raise SystemExit(str(error)) from error


def _compute(model: Model) -> None:
    pooling = None if model.can_generate else model.pooling or "mean"
    # several threads wait for each other longer than they compute in a small model
    n_threads = 1 if model.n_params < 1e9 else available_threads()
    with Context(model, n_ctx=256, n_batch=64, n_threads=n_threads, pooling=pooling) as context:
        context.use_adapters(tuple((i, 1.0) for i in range(len(model.adapters))))
        tokens = model.vocab.tokenize("Hello", add_special=True, parse_special=True)[:_N_TOKENS]
        if not len(tokens):
            tokens = np.zeros(1, np.int32)
        model.vocab.piece(int(tokens[0]))
        batch = Batch(64)
        batch.add_run(np.resize(tokens, _N_TOKENS), 0, 0, n_logits=1)
        context.decode(batch)
        if pooling is None:
            batch.clear()
            batch.add_run(tokens[:1], _N_TOKENS, 0, n_logits=1)
            context.decode(batch)


if __name__ == "__main__":
    main()
