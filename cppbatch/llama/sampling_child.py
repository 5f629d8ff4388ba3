"""The child process that tries sampling on a device, whose driver may crash."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError
from cppbatch.llama import Context, Model
from cppbatch.models.synthetic import byte_vocab, write_llama

_N_VOCAB = (512, 200_000)  # of which a vocabulary can be made


def main() -> None:
    """`sampling_child N_VOCAB DEVICE [NAME...]`: exit code 0 if one token of a tiny model is sampled, or the device
    does not support it. `DEVICE`: the number of a GPU, or none; `NAME`: ggml's names."""
    n_vocab, device, *names = sys.argv[1:]
    vocab = byte_vocab(min(max(int(n_vocab), _N_VOCAB[0]), _N_VOCAB[1]))
    try:
        with tempfile.TemporaryDirectory(prefix="cppbatch-sampling-") as folder:
            path = write_llama(Path(folder) / "model.gguf", vocab=vocab, quant="F16")
            with (
                Model(path, device=int(device) if device else None, devices=names) as model,
                Context(model, n_ctx=256, n_batch=64, n_seq_max=2, n_threads=available_threads()) as context,
            ):
                context.enable_backend_sampling()
    except CppBatchError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
