"""Other types of weights: what changes, what stays byte for byte, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.llama.quantize import quantize
from cppbatch.models.inspect import read_gguf
from cppbatch.models.synthetic import LlamaShape, write_llama

SHAPE = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512)  # rows of whole blocks of K types
Q6_K = ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight", "output.weight")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with the types of a Q4_K_M."""
    folder = tmp_path_factory.mktemp("mixed")
    floats = write_llama(folder / "floats.gguf", SHAPE)
    return quantize(floats, folder / "tiny.Q4_K_M.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q6_K"))


def tensors(path: Path) -> dict[str, tuple[str, Any]]:
    """{tensor: its type, its bytes}."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data) for tensor in read_gguf(path).tensors}


def metadata(path: Path) -> dict[str, Any]:
    reader = read_gguf(path)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def greedy_text(path: Path) -> str:
    with BatchInferenceEngine(str(path), n_ctx=256, n_parallel=2, n_threads=1) as engine:
        return engine.generate(["Once"], SamplingParams(max_tokens=8, temperature=0))[0].text


# --- llama.cpp's quantiser ---


def test_only_the_named_tensors_change_and_all_others_are_copied_byte_for_byte(mixed: Path, tmp_path: Path) -> None:
    before = tensors(mixed)
    after = tensors(quantize(mixed, tmp_path / "out.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q8_0")))
    assert {name for name in before if before[name][0] != after[name][0]} == set(Q6_K)
    assert {after[name][0] for name in Q6_K} == {"Q8_0"}
    assert all(np.array_equal(before[name][1], after[name][1]) for name in before.keys() - set(Q6_K))


def test_metadata_and_vocabulary_stay_and_text_can_be_generated(mixed: Path, tmp_path: Path) -> None:
    out = quantize(mixed, tmp_path / "out.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q8_0"))
    assert metadata(out) == metadata(mixed)
    assert greedy_text(out)


def test_tensors_of_two_bits_are_copied_although_making_them_needs_an_importance_matrix(
    mixed: Path, tmp_path: Path
) -> None:
    two_bits = with_tensor(mixed, tmp_path / "two-bits.gguf", "blk.1.attn_q.weight", "IQ2_XXS")
    stays = {name: kind for name, (kind, _) in tensors(two_bits).items() if kind == "IQ2_XXS"}
    assert stays
    out = quantize(two_bits, tmp_path / "out.gguf", "Q4_K", stays | dict.fromkeys(Q6_K, "Q8_0"))
    assert {name: kind for name, (kind, _) in tensors(out).items() if kind == "IQ2_XXS"} == stays


def with_tensor(source: Path, target: Path, name: str, kind: str) -> Path:
    """A copy of a model in which one matrix is all zeros, of another type."""
    reader = read_gguf(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        data, dtype = tensor.data, tensor.tensor_type
        if tensor.name == name:
            dtype = gguf.GGMLQuantizationType[kind]
            block, size = gguf.GGML_QUANT_SIZES[dtype]
            data = np.zeros((int(tensor.shape[1]), int(tensor.shape[0]) // block * size), np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
