"""The device of the ring, as CPPBATCH_TEST_DEVICE says: an RPC worker of this machine (rpc), or the library's own GPU
(gpu)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch.llama import Backend
from tests.support import tiny_models, tiny_projectors
from tests.support.rpc_workers import RpcWorker


@pytest.fixture(scope="session")
def device() -> Iterator[dict[str, Any]]:
    """The settings of an engine on the device."""
    wanted = os.environ["CPPBATCH_TEST_DEVICE"]
    if wanted == "rpc":
        with RpcWorker() as worker:
            yield {"rpc": (worker.endpoint,)}
    else:
        assert Backend.get().supports_gpu, "the library has no GPU; ./scripts/test gpu finds one that has"
        yield {}


@pytest.fixture(scope="session")
def largest_tie() -> float:
    """Where tokens on the device first differ from the CPU's, the two most likely ones are at most this far apart. An
    RPC worker computes as the CPU; a GPU rounds differently (llvmpipe: 0.005)."""
    return 0.0 if os.environ["CPPBATCH_TEST_DEVICE"] == "rpc" else 0.05


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "plain": tiny_models.llama(folder / "plain.gguf"),
        "window": tiny_models.sliding_window(folder / "window.gguf"),
        "hybrid": tiny_models.hybrid(folder / "hybrid.gguf"),
        "recurrent": tiny_models.mamba(folder / "recurrent.gguf"),
        "experts": tiny_models.experts(folder / "experts.gguf"),
        "echo": tiny_models.echo(folder / "echo.gguf"),
        "projector": tiny_projectors.vision(folder / "projector.gguf"),
    }
