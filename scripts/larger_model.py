"""Writes a copy of a GGUF model with more weights that change nothing: it writes the same texts, but takes longer.

For measuring speculation without a large model: a random model of a large size writes random texts, in which no draft
is right. And the original, or a copy of it in another type, is a draft model for the larger one that is nearly always
right.

    .venv/bin/python scripts/larger_model.py models/SmolLM2-135M-Instruct.Q4_1.gguf /tmp/larger.gguf --deeper 6
    .venv/bin/cppbatch bench throughput --spec draft -m /tmp/larger.gguf -md models/SmolLM2-135M-Instruct.Q4_1.gguf

`--deeper 2 --wider 6` makes 1.0B of the default model. Its attention takes as small a part of the time as that of
real models of this size: 540 heads in all layers together, Llama 3.2 1B has 512.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

SILENT = ("attn_output.weight", "ffn_down.weight")
"""What adds a layer's result to that of the layers before: zero in the added layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A copy of a Llama-like GGUF model with weights that change nothing.")
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--deeper", type=int, default=1, help="How many times as many layers it gets.")
    parser.add_argument("--wider", type=int, default=1, help="How many times as wide its feed-forward layers get.")
    arguments = parser.parse_args()
    for name in ("deeper", "wider"):
        if (times := getattr(arguments, name)) < 1:
            parser.error(f"--{name} is {times}; it must be at least 1")
    write_larger(arguments.model, arguments.output, deeper=arguments.deeper, wider=arguments.wider)


def write_larger(model: Path, output: Path, *, deeper: int, wider: int) -> None:
    """Writes the copy. Each layer is followed by `deeper` - 1 copies with outputs of zero."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    sizes = {f"{arch}.block_count": deeper, f"{arch}.feed_forward_length": wider}
    writer = gguf.GGUFWriter(output, arch)
    for name, field in reader.fields.items():
        if times := sizes.get(name):
            writer.add_uint32(name, field.contents() * times)
        elif not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        prefix, _, rest = tensor.name.partition(".")
        if prefix != "blk":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        layer, _, part = rest.partition(".")
        data = widened(part, tensor.data, wider)
        for i in range(deeper):
            own = np.zeros_like(data) if i and part in SILENT else data
            writer.add_tensor(f"blk.{int(layer) * deeper + i}.{part}", own, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widened(part: str, data: npt.NDArray[np.generic], times: int) -> npt.NDArray[np.generic]:
    """A tensor of a wider feed-forward layer: the added hidden units are copies, and zeros multiply their results.

    `data`: [rows, numbers or bytes of a row]; a row of zero bytes is a row of zeros in all types but the IQ ones.
    """
    if part in ("ffn_gate.weight", "ffn_up.weight"):
        return np.concatenate([data] * times)
    if part == "ffn_down.weight":
        return np.concatenate([data, *[np.zeros_like(data)] * (times - 1)], axis=1)
    return data


if __name__ == "__main__":
    main()
