"""Small random models in place of the ones that llama-server's tests take from a model hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf

from cppbatch.models.synthetic import GgufVocab, LlamaShape, write_llama
from tests.llama_server.story_vocab import story_vocab
from tests.support.lora_files import write_lora
from tests.support.tiny_models import encoder_only, reranker

_SILENT = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.BYTE)
"""What no model here generates: so its text has the length asked for, and is valid UTF-8."""


_N_SPLITS = 3

_RANKING = 49  # a seed with which the documents are ranked as by the trained model


def make_models(folder: Path) -> None:
    """Writes every file in `MODELS` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in MODELS.items():
        write(folder / name)


def made_model(repo: str, file: str | None) -> str | None:
    """The name in `MODELS` of the model that replaces this one of a model hub; None if there is none."""
    name = file.replace("/", "-") if file else f"{repo.partition('/')[2]}.gguf"
    return name if name in MODELS else None


def _llama(path: Path, vocab: GgufVocab, seed: int = 0, n_layer: int = 2) -> Path:
    shape = LlamaShape(n_layer=n_layer, n_ctx_train=8192)
    return write_llama(path, shape, vocab=vocab, seed=seed, silent=_SILENT, output_gain=1.5)


def _stories(path: Path) -> Path:
    return _llama(path, story_vocab())


def _infill(path: Path) -> Path:
    return _llama(path, story_vocab(infill=True))


def _stories_moe(path: Path) -> Path:
    return _llama(path, story_vocab("Hello"), seed=1)


def _draft(path: Path) -> Path:
    return _llama(path, story_vocab("Hello"), seed=2, n_layer=1)


def _split(path: Path) -> Path:
    """The first of `_N_SPLITS` files of a model, with the others beside it."""
    whole = gguf.GGUFReader(_llama(path, story_vocab()))
    n_tensors = -(-len(whole.tensors) // _N_SPLITS)
    writer = gguf.GGUFWriter(
        path.with_name(f"{path.stem.partition('-0')[0]}.gguf"), "llama", split_max_tensors=n_tensors
    )
    for name, field in whole.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _bert(path: Path) -> Path:
    words = "believe the meaning of life is this test hello".split()
    return encoder_only(path, pooling=gguf.PoolingType.CLS, n_ctx_train=1024, words=words)


def _jina(path: Path) -> Path:
    words = "machine learn ##ing is which city paris capit".split()
    return reranker(path, words=words, eos_in_pairs=True, seed=_RANKING)


MODELS: dict[str, Callable[[Path], Path]] = {
    "test-model-stories260K.gguf": _stories,
    "test-model-stories260K-infill.gguf": _infill,
    "tinyllamas-split-stories15M-q8_0-00001-of-00003.gguf": _split,
    "stories15M_MOE-F16.gguf": _stories_moe,
    "stories15M-q4_0.gguf": _draft,
    "moe_shakespeare15M.gguf": lambda path: write_lora(path, gain=2.0),
    "bert-bge-small-ggml-model-f16.gguf": _bert,
    "jina-reranker-v1-tiny-en-ggml-model-f16.gguf": _jina,
}
"""What to write for each file of a hub; a `/` in its name is a `-` here."""
