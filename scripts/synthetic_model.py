#!/usr/bin/env python3
"""Writes a GGUF file with random weights of a given shape: it has a real model's speed and memory, but not its text.

Use it to see what a machine can serve before downloading gigabytes, or to measure a machine without a model. The
vocabulary and the chat template come from another GGUF file; --vocab-from bytes needs no other file. --shape sets all
sizes, and the other flags override some of them.

    .venv/bin/python scripts/synthetic_model.py 8b.gguf --shape 8B --type Q4_0
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from time import perf_counter

from msgspec.structs import fields, replace

from cppbatch.errors import CppBatchError
from cppbatch.models.find import check_file
from cppbatch.models.pull import pull_default
from cppbatch.models.synthetic import (
    LLAMA3_VOCAB,
    QUANTS,
    SHAPES,
    GgufVocab,
    LlamaShape,
    byte_vocab,
    copy_vocab,
    llama_bytes,
    write_llama,
)


def main() -> None:
    """Writes the file and prints its size and how to serve it."""
    args = _arguments()
    try:
        _write(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except (CppBatchError, ValueError, OSError) as error:
        sys.exit(f"synthetic_model.py: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the GGUF file to write")
    parser.add_argument("--shape", choices=SHAPES, default="1B", help="sizes of Llama 3.2 1B or Llama 3.1 8B")
    parser.add_argument("--type", choices=QUANTS, default="Q4_0", help="of the matrices (Q4_0)")
    parser.add_argument("--layers", dest="n_layer", type=int)
    parser.add_argument("--embd", dest="n_embd", type=int, help="a multiple of 64 x the heads suits flash attention")
    parser.add_argument("--heads", dest="n_head", type=int)
    parser.add_argument("--kv-heads", dest="n_head_kv", type=int, help="fewer than --heads: grouped-query attention")
    parser.add_argument("--ff", dest="n_ff", type=int, help="size of the feed-forward layers")
    parser.add_argument("--ctx", dest="n_ctx_train", type=int, help="context length of the training")
    parser.add_argument(
        "--vocab-from", metavar="FILE|bytes", help="another GGUF file (the default model), or a plain one"
    )
    parser.add_argument(
        "--vocab-size", type=int, help=f"tokens, unused ones filled in ({LLAMA3_VOCAB}, or the other file's, if more)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _write(args: argparse.Namespace) -> None:
    if args.file.exists():
        raise ValueError(f"{args.file} is there already. Name another file, or delete it")
    sizes = {f.name: getattr(args, f.name, None) for f in fields(LlamaShape)}
    shape = replace(SHAPES[args.shape], **{name: size for name, size in sizes.items() if size is not None})
    vocab = _vocab(args.vocab_from, args.vocab_size)
    n_bytes, free = llama_bytes(shape, vocab, args.type), shutil.disk_usage(args.file.absolute().parent).free
    if n_bytes > free:
        raise ValueError(f"{args.file} needs {_gigabytes(n_bytes)}, and there are {_gigabytes(free)} free")
    part = args.file.with_name(args.file.name + ".part")
    began = perf_counter()
    try:
        write_llama(part, shape, quant=args.type, vocab=vocab, seed=args.seed)
        part.replace(args.file)  # atomically
    finally:
        part.unlink(missing_ok=True)
    took = perf_counter() - began
    print(f"{args.file}: {_gigabytes(args.file.stat().st_size)} in {took:.0f} s, {len(vocab.pieces):,} tokens")
    print(f"serve it: .venv/bin/cppbatch serve -m {args.file}")


def _vocab(source: str | None, size: int | None) -> GgufVocab:
    if source == "bytes":
        return byte_vocab(LLAMA3_VOCAB if size is None else size)
    return copy_vocab(check_file(Path(source)) if source else pull_default(), size)


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
