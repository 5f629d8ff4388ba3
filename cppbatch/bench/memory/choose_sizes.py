"""Which -np and -c an engine gets where they are not given: for the model and the free memory, without loading it.

The largest sizes are 16 sequences (on a GPU 32) with 1,024 cells each; on a GPU more cells, so that one text may be as
long as the model knows. A single sequence may be as long as the model knows, on a CPU 32,768 tokens. Of these sizes,
halved step by step, the first that leaves a tenth of the memory free is taken.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from msgspec.structs import replace

from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times

MARGIN = 0.1
"""The part of the free memory that chosen sizes leave free."""

SIZES = frozenset({"n_parallel", "n_ctx"})

_SEQUENCES, _SEQUENCES_ON_GPU = 16, 32
_CELLS_EACH = 1024  # a prompt and its answer, mostly
_LEAST_CELLS_EACH, _LEAST_CELLS = 512, 2048  # fewer are of little use, for a sequence and for an engine
_MOST_CELLS_ON_GPU = 131_072
_MOST_CELLS_OF_ONE = 32_768  # on a CPU, which reads so long a prompt for minutes
_CELL_STEP = 256  # llama.cpp's


def size_candidates(config: EngineConfig, given: Set[str], *, n_ctx_train: int, on_gpu: bool) -> list[EngineConfig]:
    """The settings to choose from, the largest first. At least one; what is in `given` is as in `config`.

    `given`: the names of settings that the user, or a profile, has decided. `n_ctx_train`: the tokens of the longest
    text that the model knows.
    """
    if given >= SIZES:
        return [config]
    sequences = min(_SEQUENCES_ON_GPU if on_gpu else _SEQUENCES, config.n_batch)
    if "n_parallel" in given:
        sizes = _halved_cells(config.n_parallel, _most_cells(config.n_parallel, n_ctx_train, on_gpu=on_gpu))
    elif "n_ctx" in given:
        most = max(1, min(sequences, config.n_ctx // _CELL_STEP))
        sizes = [(n, config.n_ctx) for n in _halves(most, 1)]
    else:
        sizes = _halved_cells(sequences, _most_cells(sequences, n_ctx_train, on_gpu=on_gpu))
        while (last := sizes[-1]) != (1, _LEAST_CELLS):
            sizes.append((max(1, last[0] // 2), max(_LEAST_CELLS, last[1] // 2)))
    return [replace(config, n_parallel=n, n_ctx=cells) for n, cells in sizes]


def candidates_for(config: EngineConfig, given: Set[str]) -> list[EngineConfig]:
    """As `size_candidates`, for the model of `config` on this machine. Engines that return vectors keep no cells, and
    a file that cannot be read is left to the loading: of these there is one candidate."""
    if given >= SIZES or config.pooling:
        return [config]
    try:
        facts = inspect_model(Path(config.model_path))
    except ModelError:
        return [config]
    if facts.pooling:
        return [config]
    kernel_times(["Q8_0"])  # cached; finds out whether there is a GPU, if that is not known yet
    on_gpu = config.n_gpu_layers != 0 and has_gpu()
    return size_candidates(config, given, n_ctx_train=facts.n_ctx_train or 0, on_gpu=on_gpu)


def _most_cells(n: int, n_ctx_train: int, *, on_gpu: bool) -> int:
    if n == 1 and n_ctx_train:
        return max(_LEAST_CELLS, min(n_ctx_train, _MOST_CELLS_ON_GPU if on_gpu else _MOST_CELLS_OF_ONE))
    cells = max(n, _SEQUENCES) * _CELLS_EACH
    return max(cells, min(n_ctx_train, _MOST_CELLS_ON_GPU)) if on_gpu else cells


def _halved_cells(n: int, most: int) -> list[tuple[int, int]]:
    """`n` sequences with `most` cells, with half of them ..."""
    return [(n, cells) for cells in _halves(most, max(_LEAST_CELLS, n * _LEAST_CELLS_EACH))]


def _halves(most: int, least: int) -> list[int]:
    """`most`, half of it, and so on, down to `least`."""
    return [most >> i for i in range(most.bit_length()) if i == 0 or most >> i >= least]
