"""Small random models in place of the ones that llama-server's tests take from a model hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf

from cppbatch.models.synthetic import LlamaShape, write_llama, write_lora
from tests.llama_server.story_vocab import story_vocab
from tests.tiny_models import encoder_only, reranker


def make_models(folder: Path) -> None:
    """Writes every file in `MODELS` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in MODELS.items():
        write(folder / name)


def made_model(repo: str, file: str | None) -> str | None:
    """The name in `MODELS` of the model that stands for this one of a model hub; None if there is none."""
    name = file.replace("/", "-") if file else f"{repo.partition('/')[2]}.gguf"
    return name if name in MODELS else None


def _stories(path: Path) -> Path:
    return write_llama(path, LlamaShape(n_ctx_train=2048), vocab=story_vocab())


def _infill(path: Path) -> Path:
    return _stories(path)


def _stories_moe(path: Path) -> Path:
    return write_llama(path, LlamaShape(n_ctx_train=2048), vocab=story_vocab(), seed=1)


def _draft(path: Path) -> Path:
    return write_llama(path, LlamaShape(n_layer=1, n_ctx_train=2048), vocab=story_vocab(), seed=1)


def _bert(path: Path) -> Path:
    return encoder_only(path, pooling=gguf.PoolingType.CLS, n_ctx_train=512)


MODELS: dict[str, Callable[[Path], Path]] = {
    "test-model-stories260K.gguf": _stories,
    "test-model-stories260K-infill.gguf": _infill,
    "stories15M_MOE-F16.gguf": _stories_moe,
    "stories15M-q4_0.gguf": _draft,
    "moe_shakespeare15M.gguf": lambda path: write_lora(path, gain=2.0),
    "bert-bge-small-ggml-model-f16.gguf": _bert,
    "jina-reranker-v1-tiny-en-ggml-model-f16.gguf": reranker,
}
"""What to write for each file of a hub; a `/` in its name is a `-` here."""
