"""What llama.cpp logs about its buffers, read without it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cppbatch.models.find import model_parts
from cppbatch.sizing.buffers import MAPPED, Buffer, read_buffers, weight_buffers

MIB = 2**20


class InFile(NamedTuple):
    name: str
    offset: int
    n_bytes: int
    kind: str = "Q4_0"
    n_blocks: int = 0


def test_each_kind_of_buffer_is_read_with_its_place() -> None:
    lines = [
        "load_tensors:   CPU_Mapped model buffer size =    92.10 MiB",
        "llama_context:        CPU  output buffer size =     3.19 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =   360.00 MiB",
        "llama_kv_cache: size =  360.00 MiB ( 16384 cells,  30 layers, 17/1 seqs), K (f16):  180.00 MiB, V",
        "llama_memory_recurrent:        CPU RS buffer size =     0.50 MiB",
        "sched_reserve:        CPU compute buffer size =    98.25 MiB",
        "graph_reserve: nothing of interest",
    ]
    assert read_buffers(lines) == [
        Buffer("weights", "CPU_Mapped", round(92.1 * MIB)),
        Buffer("output", "CPU", round(3.19 * MIB)),
        Buffer("cells", "CUDA0", 360 * MIB),
        Buffer("states", "CPU", MIB // 2),
        Buffer("compute", "CPU", round(98.25 * MIB)),
    ]


def test_a_simulated_cache_counts_by_its_total_on_the_devices_of_its_layers() -> None:
    lines = [
        *(f"llama_kv_cache: layer   {i}: dev = {'CPU' if i == 0 else 'CUDA0'}" for i in range(4)),
        "llama_kv_cache:        CPU KV buffer size =     0.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     0.00 MiB",
        "llama_kv_cache: size =  400.00 MiB ( 16384 cells,   4 layers,  4/1 seqs), K (f16):  200.00 MiB, V",
    ]
    assert read_buffers(lines) == [Buffer("cells", "CPU", 100 * MIB), Buffer("cells", "CUDA0", 300 * MIB)]


def test_two_caches_of_one_model_add_up() -> None:
    cache = [
        "llama_kv_cache: layer   0: dev = CPU",
        "llama_kv_cache:        CPU KV buffer size =     0.00 MiB",
        "llama_kv_cache: size =    2.00 MiB (  4096 cells,   1 layers,  4/1 seqs), K (f16):    1.00 MiB, V",
    ]
    assert read_buffers(cache + cache) == [Buffer("cells", "CPU", 4 * MIB)]


def test_a_graph_that_is_planned_anew_replaces_the_one_before() -> None:
    plan = ["sched_reserve: reserving ...", "sched_reserve:        CPU compute buffer size =    10.00 MiB"]
    assert read_buffers([*plan, *plan]) == [Buffer("compute", "CPU", 10 * MIB)]


def test_weights_that_stay_in_the_file_are_all_from_the_first_to_the_last() -> None:
    lines = [f"tensor {name} (0 MiB q4_0) buffer type overridden to {place}" for name, place in
             (("a", "CPU"), ("b", "CPU_REPACK"), ("c", "CPU"), ("a", "CPU_REPACK"))]  # fmt: skip
    tensors = [InFile("a", 0, 10), InFile("b", 10, 20), InFile("c", 30, 5), InFile("not loaded", 35, 1000)]
    assert weight_buffers(lines, [tensors], names_all=True) == [
        Buffer("weights", "CPU_REPACK", 30),
        Buffer("weights", MAPPED, 35),
    ]


def test_weights_packed_for_amx_take_more_than_in_the_file() -> None:
    lines = [f"tensor {name} (0 MiB x) buffer type overridden to AMX" for name in "ab"]
    tensors = [InFile("a", 0, 340, kind="Q8_0", n_blocks=10), InFile("b", 340, 180, kind="Q4_0", n_blocks=10)]
    assert weight_buffers(lines, [tensors], names_all=True) == [Buffer("weights", "AMX", 380 + 180)]


def test_layers_on_a_gpu_take_their_weights_there_and_a_shared_output_is_in_both() -> None:
    lines = [f"load_tensors: layer {i} assigned to device {'CPU' if i < 1 else 'CUDA0'}, is_swa = 0" for i in range(3)]
    tensors = [
        InFile("token_embd.weight", 0, 100),
        InFile("blk.0.attn_q.weight", 100, 10),
        InFile("blk.1.attn_q.weight", 110, 10),
        InFile("output_norm.weight", 120, 1),
    ]
    assert {b.buffer_type: b.n_bytes for b in weight_buffers(lines, [tensors])} == {MAPPED: 110, "CUDA0": 111}
    with_output = [*tensors, InFile("output.weight", 121, 50)]
    assert {b.buffer_type: b.n_bytes for b in weight_buffers(lines, [with_output])} == {MAPPED: 110, "CUDA0": 61}


def test_a_model_in_parts_has_all_of_them() -> None:
    assert [part.name for part in model_parts(Path("m-00001-of-00002.gguf"))] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert model_parts(Path("m.gguf")) == [Path("m.gguf")]
