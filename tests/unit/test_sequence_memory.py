"""What a sequence and a checkpoint of it take, by llama.cpp's log and as `cppbatch memory` says it."""

from __future__ import annotations

from cppbatch.bench.memory_report import describe_sequences
from cppbatch.config import EngineConfig
from cppbatch.sizing.buffers import Buffer
from cppbatch.sizing.estimate import Footprint, SequenceMemory, read_sequence_memory

MIB = 2**20
WINDOW = """
llama_kv_cache_iswa: creating non-SWA KV cache, size = 4096 cells
llama_kv_cache: size =   32.00 MiB (  4096 cells,   4 layers,  8/8 seqs), K (f16):   16.00 MiB, V (f16):   16.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
llama_kv_cache: size =   64.00 MiB (  1024 cells,  32 layers,  8/8 seqs), K (f16):   32.00 MiB, V (f16):   32.00 MiB
""".splitlines()
HYBRID = """
llama_kv_cache: size =    2.00 MiB (  2048 cells,   1 layers,  8/1 seqs), K (f16):    1.00 MiB, V (f16):    1.00 MiB
llama_memory_recurrent:        CPU RS buffer size =    40.00 MiB
llama_memory_recurrent: size =   40.00 MiB (     8 cells,   2 layers,  8 seqs  4 rs_seq), R (f32):    8.00 MiB
""".splitlines()


def test_a_sequence_with_a_sliding_window_grows_slower_beyond_it() -> None:
    memory = read_sequence_memory(WINDOW, window=512, n_sequences=8)
    assert memory == SequenceMemory(token_bytes=1024, window=512, window_token_bytes=8192)
    assert memory.bytes_of(100) == 100 * (1024 + 8192)
    assert memory.bytes_of(4096) == 4096 * 1024 + 512 * 8192
    assert (memory.checkpoint_bytes(100), memory.checkpoint_bytes(4096)) == (100 * 8192, 512 * 8192)


def test_the_states_of_a_sequence_are_without_their_snapshots_and_as_large_when_it_is_short() -> None:
    memory = read_sequence_memory(HYBRID, window=0, n_sequences=8)
    assert memory == SequenceMemory(token_bytes=1024, state_bytes=MIB)
    assert memory.checkpoint_bytes(1) == memory.checkpoint_bytes(4096) == MIB


def test_the_report_shows_the_memory_of_sequences_and_how_many_checkpoints_fit() -> None:
    config = EngineConfig(model_path="x.gguf", prefix_cache_ram=1000)
    memory = SequenceMemory(token_bytes=1024, window=512, window_token_bytes=8192, state_bytes=MIB)
    footprint = Footprint(buffers=[Buffer("cells", "CPU", MIB)], sequence_cells=4096, n_ctx_train=2048, sequence=memory)
    assert list(describe_sequences(footprint, config)) == [
        "a sequence of 100 tokens uses 1.88 MiB, one of 2048 tokens 7 MiB (a window of 512 tokens: 4 MiB; "
        "states: 1 MiB)",
        "a checkpoint takes up to 5 MiB: --prefix-cache-ram 1000 holds 200",
    ]
    assert not list(describe_sequences(Footprint(sequence_cells=4096), config))
