"""Models that the tests share, made or fetched once a run: a tiny GGUF of each kind, and the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.llama.quantize import requantize
from cppbatch.models.pull import pull_default
from tests import tiny_models


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Path) -> Path:
    return tiny_models.llama(tiny_folder / "tiny-llama.gguf")


@pytest.fixture(scope="session")
def tiny_mamba(tiny_folder: Path) -> Path:
    return tiny_models.mamba(tiny_folder / "tiny-mamba.gguf")


@pytest.fixture(scope="session")
def tiny_swa(tiny_folder: Path) -> Path:
    return tiny_models.sliding_window(tiny_folder / "tiny-swa.gguf")


@pytest.fixture(scope="session")
def tiny_hybrid(tiny_folder: Path) -> Path:
    return tiny_models.hybrid(tiny_folder / "tiny-hybrid.gguf")


@pytest.fixture(scope="session")
def tiny_encoder(tiny_folder: Path) -> Path:
    return tiny_models.encoder_only(tiny_folder / "tiny-encoder.gguf")


@pytest.fixture(scope="session")
def default_model() -> Path:
    return pull_default()


@pytest.fixture(scope="session")
def f16_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with float weights: wherever identical text is demanded (DESIGN)."""
    return requantize(default_model, tmp_path_factory.mktemp("f16") / "default-F16.gguf", "F16")
