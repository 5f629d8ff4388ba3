"""Writes a copy of a GGUF model with more layers that change nothing: it writes the same texts, but takes longer.

For measuring draft models without a large model: the original, or a copy of it in another type, drafts for the deeper
one, and is right nearly always.

    .venv/bin/python scripts/deeper_model.py models/SmolLM2-135M-Instruct.Q4_1.gguf /tmp/deeper.gguf --times 6
    .venv/bin/cppbatch bench throughput --spec draft -m /tmp/deeper.gguf -md models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

SILENT = ("attn_output.weight", "ffn_down.weight")
"""What adds a layer's result to that of the layers before: zero in the added layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A copy of a Llama-like GGUF model with layers that change nothing.")
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--times", type=int, default=6, help="How many times as many layers it gets. Default: 6.")
    arguments = parser.parse_args()
    if arguments.times < 1:
        parser.error(f"--times is {arguments.times}; it must be at least 1")
    write_deeper(arguments.model, arguments.output, arguments.times)


def write_deeper(model: Path, output: Path, times: int) -> None:
    """Writes the copy. Each layer is followed by `times` - 1 copies whose outputs are zero."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    blocks = f"{arch}.block_count"
    n_layers = reader.fields[blocks].contents()
    writer = gguf.GGUFWriter(output, arch)
    for name, field in reader.fields.items():
        if name == blocks:
            writer.add_block_count(n_layers * times)
        elif not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        prefix, _, rest = tensor.name.partition(".")
        if prefix != "blk":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        layer, _, part = rest.partition(".")
        for i in range(times):
            data = np.zeros_like(tensor.data) if i and part in SILENT else tensor.data
            writer.add_tensor(f"blk.{int(layer) * times + i}.{part}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
