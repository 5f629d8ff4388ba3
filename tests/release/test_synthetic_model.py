"""Models with random weights: of the shape asked for, and they read and write text as the model they copy does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.chat.template import ChatTemplate
from cppbatch.errors import ModelError
from cppbatch.llama import Model
from cppbatch.models.inspect import inspect_model
from cppbatch.models.synthetic import SHAPES, LlamaShape, copy_vocab, llama_bytes, norm, write_gguf, write_llama
from tests.support.scripts import run_script

pytestmark = pytest.mark.nightly

SMALL = "--layers 2 --embd 64 --heads 4 --kv-heads 2 --ff 128 --ctx 512 --type Q8_0 --vocab-size 50000".split()
TEXTS = [
    "Hello, world!",
    "  def f(x):\n\treturn x",
    "größer 你好 🦙",
    "<|im_start|>user\nHi<|im_end|>\n",
    "12345 <|unused_3|>",
]


def script(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("synthetic_model.py", *args)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "small.gguf"
    done = script(path, *SMALL, "--vocab-from", default_model)
    assert done.returncode == 0, done.stderr
    assert "0.01 GB in" in done.stdout
    assert f"cppbatch serve -m {path}" in done.stdout
    return path


def test_the_file_has_the_given_dimensions_and_those_of_the_preset_otherwise(synthetic: Path) -> None:
    facts = inspect_model(synthetic)
    assert (facts.n_layer, facts.n_embd, facts.n_head, facts.n_head_kv, facts.n_ctx_train) == (2, 64, 4, 2, 512)
    assert facts.n_vocab == 50_000
    assert facts.tensor_types.keys() == {"Q8_0", "F32"}
    assert gguf.GGUFReader(synthetic).get_field("llama.rope.freq_base").contents() == 500_000


def test_text_becomes_the_donors_tokens_and_comes_back(synthetic: Path, default_model: Path) -> None:
    with Model(synthetic) as copy, Model(default_model) as donor:
        assert copy.vocab.n_tokens > donor.vocab.n_tokens
        for text in TEXTS:
            tokens = copy.vocab.tokenize(text)
            assert tokens.tolist() == donor.vocab.tokenize(text).tolist()
            assert b"".join(copy.vocab.piece(int(t), special=True) for t in tokens) == text.encode()
        assert (copy.vocab.bos, copy.vocab.eos, copy.vocab.eog) == (donor.vocab.bos, donor.vocab.eos, donor.vocab.eog)
        assert copy.chat_template == donor.chat_template


def test_it_generates_text_and_never_a_token_that_only_fills_up_the_vocabulary(synthetic: Path) -> None:
    with BatchInferenceEngine(synthetic, n_ctx=1024, n_threads=1) as engine:
        for temperature in (0, 0.8):
            params = SamplingParams(max_tokens=32, temperature=temperature, seed=1)
            for result in engine.generate(["Hello", "Once upon a time"], params):
                assert len(result.tokens) == 32
                assert max(result.tokens) < 49_152
                assert len(set(result.tokens)) > 4
                assert result.text


def test_conversations_are_written_as_the_donors_are(synthetic: Path) -> None:
    with Model(synthetic) as model:
        prompt = ChatTemplate(model.chat_template, bos="", eos="").render([{"role": "user", "content": "Hi"}])
    assert "<|im_start|>user\nHi<|im_end|>" in prompt


def test_a_sentencepiece_vocabulary_is_copied_and_filled_up_too(tmp_path: Path, tiny_llama: Path) -> None:
    path = write_llama(tmp_path / "copy.gguf", LlamaShape(), vocab=copy_vocab(tiny_llama, 700))
    with Model(path) as copy, Model(tiny_llama) as donor:
        assert (copy.vocab.n_tokens, donor.vocab.n_tokens) == (700, 512)
        for text in TEXTS:
            assert copy.vocab.tokenize(text).tolist() == donor.vocab.tokenize(text).tolist()


def test_without_another_file_the_vocabulary_is_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    assert script(path, *SMALL, "--vocab-from", "bytes", "--vocab-size", "600").returncode == 0
    with Model(path) as model:
        assert model.vocab.n_tokens == 600
        assert (
            b"".join(model.vocab.piece(int(t)) for t in model.vocab.tokenize("größer 你好")) == "größer 你好".encode()
        )


def test_the_presets_are_as_large_as_the_models_they_are_called_after(default_model: Path) -> None:
    vocab = copy_vocab(default_model)
    assert len(vocab.pieces) == 128_256
    parameters = {name: llama_bytes(shape, vocab, "F16") / 2 for name, shape in SHAPES.items()}
    published = {"1B": 1.236e9, "8B": 8.030e9, "70B": 70.554e9}
    assert parameters == {name: pytest.approx(n, rel=0.001) for name, n in published.items()}


def test_the_size_is_computed_before_anything_is_written(tmp_path: Path, tiny_llama: Path) -> None:
    vocab = copy_vocab(tiny_llama, 512)
    shape = LlamaShape(n_embd=64, tied=True)
    written = write_llama(tmp_path / "m.gguf", shape, quant="Q4_0", vocab=vocab)
    in_file = sum(tensor.n_bytes for tensor in gguf.GGUFReader(written).tensors)
    assert llama_bytes(shape, vocab, "Q4_0") == in_file


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--embd", "100"], "n_embd is 100: must be a multiple of 2 * n_head, 64"),
        (["--kv-heads", "5"], "n_head is 32: must be a multiple of n_head_kv, 5"),
        (["--layers", "0"], "n_layer is 0: must be at least 1"),
        (["--ff", "100"], "blk.0.ffn_down.weight has rows of 100: must be a multiple of 32 for Q4_0"),
        (["--vocab-size", "100"], "a vocabulary of 100 tokens"),
        (["--ff", "3200000000"], "GB free"),
        (["--vocab-from", "nowhere.gguf"], "file not found: nowhere.gguf"),
        (["--type", "Q3_K"], "invalid choice: 'Q3_K'"),
    ],
)
def test_an_invalid_model_is_refused_with_the_flag_and_leaves_no_file(
    tmp_path: Path, tiny_llama: Path, flags: list[str], message: str
) -> None:
    donor: list[str | Path] = [] if "--vocab-from" in flags else ["--vocab-from", tiny_llama]
    done = script(tmp_path / "m.gguf", *donor, *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_overwritten(tiny_llama: Path) -> None:
    before = tiny_llama.read_bytes()
    assert "is there already" in script(tiny_llama, "--vocab-from", tiny_llama).stderr
    assert tiny_llama.read_bytes() == before


def test_vocabularies_that_cannot_be_copied_are_refused(tmp_path: Path, tiny_encoder: Path) -> None:
    with pytest.raises(ModelError, match="of type 'bert'"):
        copy_vocab(tiny_encoder)
    without = tmp_path / "without.gguf"
    with pytest.raises(ModelError, match="has no vocabulary"):
        copy_vocab(write_gguf(without, gguf.GGUFWriter(without, "llama"), [norm("output_norm", 8)]))
