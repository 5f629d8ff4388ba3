"""Each node of a cluster may keep the model's file in another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.errors import ModelError
from cppbatch.ray.replica import options
from cppbatch.ray.replica.options import model_on_this_node
from tests.support import tiny_models

HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "models"))
    (tmp_path / "models").mkdir()
    return tmp_path


def test_the_file_itself_is_taken(here: Path) -> None:
    (here / "a.gguf").write_bytes(HEADER)
    (here / "models" / "a.gguf").write_bytes(HEADER)
    assert model_on_this_node(str(here / "a.gguf")) == str(here / "a.gguf")


def test_else_the_file_of_that_name_in_the_models_folder_of_the_node(here: Path) -> None:
    tiny_models.llama(here / "models" / "a.gguf")
    assert model_on_this_node("/elsewhere/a.gguf") == str(here / "models" / "a.gguf")


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1-BF16.gguf"])
def test_the_default_model_is_fetched_by_each_node(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(options, "pull_default", lambda: here / "fetched.gguf")
    assert model_on_this_node(f"/elsewhere/{name}") == str(here / "fetched.gguf")


def test_a_model_that_is_missing_on_the_node_is_named(here: Path) -> None:
    with pytest.raises(ModelError, match=r"b\.gguf"):
        model_on_this_node("/elsewhere/b.gguf")
