"""Bytes and operations of a decode step, and which of them bounds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.bench.roofline import border, roofline_row
from cppbatch.bench.step_work import StepWork, read_step_work
from cppbatch.llama.device_speed import DeviceSpeed
from cppbatch.models.synthetic import LlamaShape, write_llama

DENSE = StepWork(
    dense_bytes=1000,
    dense_weights=500,
    expert_bytes=0,
    expert_weights=0,
    experts_used=0,
    kv_bytes=10,
    state_bytes=0,
    attention_flops=8,
    main_type="F16",
)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_matrix_once_but_of_an_embedding_only_rows(tied: bool, tmp_path: Path) -> None:
    shape = LlamaShape(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=128, tied=tied)
    file = write_llama(tmp_path / "model.gguf", shape, quant="F16")
    work = read_step_work(file, kv_bytes=2 * 2 * 32 * 2)
    n_vocab = 512
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    assert work.dense_weights == 2 * layer + n_vocab * 64
    norms = (2 * 2 + 1) * 64
    assert work.dense_bytes == 2 * work.dense_weights + 4 * norms
    assert work.main_type == "F16"
    assert work.attention_flops == 2 * 2 * 4 * 2 * 16, "two layers, four heads of 16, a key and a value"


def test_weights_are_read_once_for_all_sequences_and_keys_and_values_for_each() -> None:
    assert DENSE.n_bytes(1, 100) == 1000 + 100 * 10
    assert DENSE.n_bytes(8, 100) == 1000 + 8 * 100 * 10
    assert DENSE.flops(8, 100) == 8 * (2 * 500 + 100 * 8)


def test_a_larger_batch_uses_more_experts_and_computes_as_many_for_each_row() -> None:
    experts = StepWork(
        dense_bytes=0,
        dense_weights=0,
        expert_bytes=800,
        expert_weights=400,
        experts_used=2 / 8,
        kv_bytes=0,
        state_bytes=5,
        attention_flops=0,
        main_type="F16",
    )
    assert experts.n_bytes(1, 0) == pytest.approx(200 + 2 * 5)
    assert experts.n_bytes(2, 0) == pytest.approx(800 * (1 - 0.75**2) + 4 * 5)
    assert experts.n_bytes(100, 0) == pytest.approx(800 + 200 * 5)
    assert experts.flops(10, 0) == 10 * 2 * 400 / 4


def test_the_border_is_where_computing_takes_longer_than_reading() -> None:
    # At 1000 bytes/s and 5000 FLOP/s, weights take 1 s, and each row 0.2 s of computing.
    speed = DeviceSpeed(1000, 5000)
    assert border(DENSE, speed, 0) == 6
    below, above = (roofline_row(DENSE, speed, n, 0, [2.0, 4.0]) for n in (5, 10))
    assert (below["bound"], above["bound"]) == ("memory", "compute")
    assert (below["memory_ms"], above["compute_ms"]) == (1000, 2000)
    assert above["of_roof"].high == 100
    assert above["tokens_per_s"].median == pytest.approx((10 / 2 + 10 / 4) / 2)
    assert border(DENSE, DeviceSpeed(1, 1e9), 0) is None
