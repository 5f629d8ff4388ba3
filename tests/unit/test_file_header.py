"""The header of a GGUF file is read as the gguf package reads it, and damaged files are refused with a reason."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.errors import ModelError
from cppbatch.models import file_header
from cppbatch.models.attention_times import attention_shape
from cppbatch.models.check import check_model
from cppbatch.models.draft_files import describe_draft, draft_heads
from cppbatch.models.file_header import WEIGHT_TYPES, TensorInfo, read_header
from cppbatch.models.inspect import inspect_model
from cppbatch.models.requantize import read_matrices
from cppbatch.models.synthetic import LlamaShape, write_llama
from tests.support import tiny_models
from tests.support.mutated_files import Gguf, retyped, write_mutants

MODELS = {
    "llama": tiny_models.llama,
    "quantised": lambda path: tiny_models.llama(path, quant="Q8_0", chat_template="{{ messages }}"),
    "hybrid": tiny_models.hybrid,
    "encoder": tiny_models.encoder_only,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_models.llama(tmp_path / "tiny.gguf")


def expected(value: Any) -> Any:
    """The contents of a field of `GGUFReader` in the form of `FileHeader.metadata`."""
    if not isinstance(value, list):
        return value
    return len(value) if value and isinstance(value[0], str) else tuple(value)


@pytest.mark.parametrize("kind", MODELS)
def test_the_header_is_what_the_gguf_package_reads(kind: str, tmp_path: Path) -> None:
    path = MODELS[kind](tmp_path / "model.gguf")
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == {name: expected(value) for name, value in fields.items()}
    assert header.value_types == {name: reader.fields[name].types[0].name for name in fields}
    assert header.tensors == [
        TensorInfo(t.name, t.tensor_type.name, tuple(int(n) for n in t.shape), t.data_offset - reader.data_offset)
        for t in reader.tensors
    ]
    assert [(t.n_elements, t.n_bytes) for t in header.tensors] == [
        (int(t.n_elements), int(t.n_bytes)) for t in reader.tensors
    ]


def test_a_file_of_the_other_byte_order_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(3)
    writer.add_tensor("a.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.metadata["llama.block_count"] == 3
    assert header.tensors == [TensorInfo("a.weight", "F32", (32, 4))]


def test_a_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole, path = tiny.read_bytes(), tmp_path / "cut.gguf"
    for n_bytes in range(4, len(whole), len(whole) // 300):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(ModelError, match="Download it again"):
            read_header(path)


def test_a_damaged_header_is_refused_or_read_but_raises_nothing_else(tiny: Path, tmp_path: Path) -> None:
    whole, path, rng = tiny.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.randrange(4, 20_000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_header(path)
        except ModelError:
            refused += 1
    assert refused > 50


def test_an_alignment_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 0)
    writer.add_tensor("a.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="damaged"):
        read_header(path)


def test_metadata_of_a_wrong_type_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.name", [1, 2])
    writer.add_string("llama.context_length", "many")
    writer.add_float32("llama.embedding_length", float("nan"))
    writer.add_int32("llama.block_count", -1)
    writer.add_string("llama.attention.key_length", "long")
    writer.add_string("llama.expert_used_count", "some")
    writer.add_string("split.count", "several")
    writer.add_tensor("a.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = inspect_model(path)
    assert (facts.architecture, facts.name, facts.n_ctx_train, facts.n_embd, facts.n_layer) == ("llama", *[None] * 4)
    assert attention_shape(path) is None
    assert [matrix.name for matrix in read_matrices(path)] == ["a.weight"]


def test_a_key_length_that_is_a_text_counts_as_missing(tmp_path: Path) -> None:
    whole = attention_shape(tiny_models.llama(tmp_path / "whole.gguf"))
    path = tmp_path / "damaged.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(tiny_models.N_EMBD)
    writer.add_head_count(tiny_models.N_HEAD)
    writer.add_head_count_kv(tiny_models.N_HEAD_KV)
    writer.add_string("llama.attention.key_length", "long")
    writer.add_tensor("a.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert attention_shape(path) == whole


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a regular file"):
        read_header(path)


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    kinds = {kind.name: (int(kind), *GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: tuple(each) for name, each in WEIGHT_TYPES.items()} == kinds


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, LlamaShape(n_layer=1))
    first = read_header(path)
    assert read_header(path) is first
    write_llama(path, LlamaShape(n_layer=2))
    assert len(read_header(path).tensors) > len(first.tensors)


# --- bounds ----------------------------------------------------------------------------------------------------------

ONE = (b"a.weight", [4], 0, 0)


def written(path: Path, *, tensors: list[Any] | None = None, metadata: list[Any] | None = None, **counts: int) -> Path:
    path.write_bytes(Gguf(metadata or [], tensors or [ONE], bytes(64), counts).encode())
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors": [(b"a.weight", [2**62] * 50_000, 0, 0)]}, "a.weight has 50000 dimensions"),
        ({"tensors": [(b"a.weight", [2**40, 2**40], 0, 0)]}, "a.weight has the shape"),
        ({"tensors": [(b"a.weight", [2**64 - 1, 0], 0, 0)]}, "a.weight has the shape"),
        ({"tensors": [(b"a.weight", [2**62], 99, 0)]}, "its weights end at"),  # of a type that is not known
        ({"tensors": [(b"a.weight", [33], 8, 0)]}, "not whole blocks of Q8_0"),
        ({"tensors": [(b"x" * 64, [4], 0, 0)]}, "a name of 64 bytes"),
        ({"tensors": [ONE, ONE]}, "the same name"),
        ({"tensors": [(b"t%d" % i, [1], 0, 0) for i in range(20_000)]}, "20000 tensors"),
        ({"tensors": [ONE], "metadata": [(b"k%d" % i, 4, 1) for i in range(5000)]}, "5000 metadata values"),
        ({"tensors": [ONE], "metadata": [(b"k", 4, 1)] * 2}, "'k' twice"),
        ({"tensors": [ONE], "metadata": [(b"k" * 70_000, 4, 1)]}, "a name of 70000 bytes"),
        ({"tensors": [ONE], "metadata": [(b"general.alignment", 4, 3)]}, "not a power of 2"),
        ({"tensors": [ONE], "metadata": [(b"general.alignment", 11, -32)]}, "not a power of 2"),
    ],
)
def test_what_no_model_contains_is_refused_at_once(changes: Any, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", **changes)
    began = time.process_time()
    with pytest.raises(ModelError, match=reason) as refused:
        read_header(path)
    assert time.process_time() - began < 1
    assert len(str(refused.value)) < 500


def test_a_header_has_limits_of_bytes_and_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones here."""
    monkeypatch.setattr(file_header, "_MOST_TEXTS", 1000)
    many = written(tmp_path / "a.gguf", metadata=[(b"k%d" % i, 9, (8, [b""] * 600)) for i in range(2)])
    with pytest.raises(ModelError, match="arrays of 1200 texts; the limit is 1000"):
        read_header(many)
    monkeypatch.setattr(file_header, "_MOST_BYTES", 1 << 20)
    large = written(tmp_path / "b.gguf", metadata=[(b"k", 8, b"x" * (1 << 20))])
    with pytest.raises(ModelError, match="its header has more than 1 MiB"):
        read_header(large)


def test_long_texts_and_arrays_are_not_kept(tmp_path: Path) -> None:
    values = [(b"text", 8, b"x" * ((1 << 20) + 1)), (b"array", 9, (4, [1] * 5000)), (b"short", 9, (4, [1, 2]))]
    header = read_header(written(tmp_path / "a.gguf", metadata=values))
    assert header.metadata == {"text": None, "array": 5000, "short": (1, 2)}


def test_a_file_that_is_truncated_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file mapped into memory would end the process with SIGBUS."""
    path = written(tmp_path / "a.gguf", metadata=[(b"text", 8, b"x" * 3_000_000)])
    text = file_header._Reader._text

    def truncating(self: Any, most: int | None = None) -> Any:
        os.truncate(path, 1000)
        return text(self, most)

    monkeypatch.setattr(file_header._Reader, "_text", truncating)
    with pytest.raises(ModelError, match="was truncated"):
        read_header(path)


def test_mutated_files_are_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    """Files of each kind, as models and draft models; a thousand: tests/release/test_mutated_files.py."""
    reads = (check_model, inspect_model, draft_heads, describe_draft, attention_shape, read_matrices)
    messages: list[str] = []
    for name, path in write_mutants(tmp_path, 20, seed=3).items():
        for read in reads:
            try:
                assert len(msgspec.json.encode(read(path), enc_hook=repr)) < 20_000, name
            except ModelError as error:
                messages.append(str(error))
    assert 20 < len(messages) < 120
    assert max(map(len, messages)) <= 2000


def test_a_matrix_of_integers_is_refused_before_llama_cpp_computes_with_it(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf is damaged: blk\.0\.ffn_down\.weight is of type I32"):
        check_model(retyped(tiny, "blk.0.ffn_down.weight", "I32"))
