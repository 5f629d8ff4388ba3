"""EAGLE-3 and DFlash files are recognised and checked by their header: llama.cpp aborts the process where one does not
fit to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cppbatch.errors import ModelError
from cppbatch.models.draft_files import DraftFile, describe_draft, read_draft_file, row_kind
from cppbatch.models.file_header import read_integers

N_VOCAB = 10
TARGET = {"embedding_length": 8, "block_count": 6}
EAGLE: dict[str, Any] = {
    "embedding_length": 8, "block_count": 1, "target_hidden_size": 8, "target_layers": [1, 2, 5],
    "attention.key_length": 4, "attention.value_length": 4,
}  # fmt: skip
DFLASH: dict[str, Any] = {**EAGLE, "block_count": 5, "block_size": 4}
OWN = {"token_embd.weight": (N_VOCAB, 8), "output.weight": (N_VOCAB, 8)}


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """`tensors`: shapes in numpy's order, or arrays."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    writer.add_mask_token_id(7)
    writer.add_tensor("fc.weight", np.zeros((8, 24), np.float32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, np.zeros(tensor, np.float32) if isinstance(tensor, tuple) else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(folder: Path, architecture: str, tensors: Any = OWN, *, target: str = "llama", **keys: Any) -> DraftFile:
    usual = EAGLE if architecture == "eagle3" else DFLASH
    its_target = write(folder / "target.gguf", target, TARGET | {"nextn_predict_layers": keys.pop("nextn", None)})
    draft = write(
        folder / "draft.gguf", architecture, usual | {k.replace("__", "."): v for k, v in keys.items()}, tensors
    )
    return read_draft_file(draft, its_target)


def test_kinds_are_recognised_by_their_architecture(tmp_path: Path) -> None:
    assert read(tmp_path, "eagle3") == DraftFile("eagle3", (1, 2, 5), 24, shares=False)
    assert read(tmp_path, "eagle3", {}).shares
    assert read(tmp_path, "dflash") == DraftFile("dflash", (1, 2, 5), 24, shares=False, block=4, mask=7)
    assert read(tmp_path, "dflash", {}).shares
    assert describe_draft(tmp_path / "draft.gguf") == "DFlash draft model, reads layers 1, 2, 5"
    assert row_kind(tmp_path / "target.gguf") is describe_draft(tmp_path / "target.gguf") is None


def test_the_kinds_of_dflash_are_recognised_by_their_tensors(tmp_path: Path) -> None:
    spark = {**OWN, "markov_w1.weight": (N_VOCAB, 2)}
    assert read(tmp_path, "dflash", spark).first == 0
    assert read(tmp_path, "dflash", spark, sample_from_anchor=False).first == 1
    selector = {**OWN, "selector_hidden.weight": (2, 8)}
    assert read(tmp_path, "dflash", selector, selector_top_k=3).top_k == 3
    assert read(tmp_path, "dflash", selector_top_k=3).top_k == 0
    assert read(tmp_path, "dflash", attention__causal=True).is_causal
    assert read(tmp_path, "dflash", block_size=None).block == 16


@pytest.mark.parametrize("target", ["deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"])
def test_some_models_also_give_the_rows_after_the_last_layer(tmp_path: Path, target: str) -> None:
    assert read(tmp_path, "dflash", target_layers=[1, 6], target=target).layers == (1, 6)
    with pytest.raises(ModelError, match="layers 0 to 5"):
        read(tmp_path, "dflash", target_layers=[1, 6])
    with pytest.raises(ModelError, match="layers 0 to 4"):  # the last layer is a draft head
        read(tmp_path, "dflash", target_layers=[1, 5], nextn=1)


@pytest.mark.parametrize(
    ("architecture", "tensors", "keys", "reason"),
    [
        ("eagle3", OWN, {"target": "gemma4"}, "does not export hidden rows for the architecture gemma4"),
        ("eagle3", OWN, {"target": "qwen4exp"}, "architecture qwen4exp"),  # its rows have other lengths
        ("eagle3", OWN, {"target_layers": None}, r"reads layers \[\]"),
        ("eagle3", OWN, {"attention__value_length": 2}, r"different lengths \(4 and 2\)"),
        ("eagle3", {}, {"embedding_length": 4}, "which have 8 dimensions, but it has 4"),
        ("dflash", OWN, {"embedding_length": 4}, "expects rows of 4 numbers, but the rows of the model have 8"),
        ("eagle3", {**OWN, "token_embd.weight": (9, 8)}, {}, "embeddings for 9 tokens, but a vocabulary of 10"),
        ("eagle3", {"d2t": np.arange(3)}, {}, "the output matrix is missing"),
        ("eagle3", {**OWN, "d2t": np.arange(3, dtype=np.int32)}, {}, "does not contain 64-bit integers"),
        ("eagle3", {**OWN, "d2t": np.arange(8, 11)}, {}, "outside 0 to 9"),
        ("dflash", OWN, {"hyper_connection__count": 4}, "DSpark model for DeepSeek 4"),
        ("dflash", {"markov_w1.weight": (N_VOCAB, 2)}, {"block_size": None}, "blocks of None tokens"),
    ],
)
def test_draft_files_that_would_abort_the_process_are_refused(
    tmp_path: Path, architecture: str, tensors: Any, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(
        ModelError, match=rf"draft\.gguf cannot be used as a draft model for target\.gguf \(-md\): .*{reason}"
    ):
        read(tmp_path, architecture, tensors, **keys)


def test_integers_of_a_tensor_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "eagle3", EAGLE, {"d2t": np.array([5, 1 << 40, -2]), **OWN})
    assert read_integers(path, "d2t").tolist() == [5, 1 << 40, -2]
    with pytest.raises(ModelError, match=r"no tensor output\.weight of type I64"):
        read_integers(path, "output.weight")
