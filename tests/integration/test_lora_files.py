"""LoRA files: what cannot be used is refused with the reason before llama.cpp could trip over it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFValueType

from cppbatch import BatchInferenceEngine
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.generate_command import generate
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError, OutOfRange
from cppbatch.llama import Context, Model
from cppbatch.models import synthetic
from cppbatch.models.synthetic import LlamaShape, Weight, write_gguf, write_llama
from tests.support import tiny_models
from tests.support.contexts import close, decode
from tests.support.lora_files import write_lora

TOKENS = [7, 70, 300, 12]
Q = "blk.0.attn_q.weight"


METADATA: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
KINDS = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32, list: GGUFValueType.ARRAY}


def lora(path: Path, weights: list[Weight], metadata: dict[str, Any] | None = None, *, quant: str = "F32") -> Path:
    """An adapter for the tiny Llama of these tensors; `metadata` beside or in place of what belongs there."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**METADATA, **(metadata or {})}.items():
        elements = GGUFValueType.UINT32 if isinstance(value, list) else None
        writer.add_key_value(key, value, KINDS[type(value)], sub_type=elements)
    return write_gguf(path, writer, weights, quant=quant)


def pair(name: str = Q, a: tuple[int, ...] = (4, 64), b: tuple[int, ...] = (64, 4)) -> list[Weight]:
    return [Weight(f"{name}.lora_a", a, std=0.1), Weight(f"{name}.lora_b", b, std=0.1)]


EMBEDDING = pair("token_embd.weight", (512, 4), (64, 4))


@pytest.fixture
def context(tiny_llama: Path, tmp_path: Path) -> Any:
    with Model(tiny_llama) as model:
        for seed in (1, 2):
            model.add_adapter(write_lora(tmp_path / f"{seed}.gguf", seed=seed))
        with Context(model, n_ctx=256, n_threads=1, flash_attn="off") as context:
            yield context


def test_adapters_change_the_logits_by_their_scale_and_can_be_taken_off_again(context: Context) -> None:
    rows = []
    for adapters in ((), ((0, 1.0),), ((0, 0.5),), ((1, 1.0),), ((0, 1.0), (1, 1.0)), ()):
        context.use_adapters(adapters)
        context.clear()
        rows.append(decode(context, TOKENS))
    assert close(rows[0], rows[-1])
    assert not any(close(a, b) for i, a in enumerate(rows[:-1]) for b in rows[:i])


def test_a_missing_adapter_is_out_of_range(context: Context) -> None:
    for number in (-1, 2):
        with pytest.raises(OutOfRange, match="the model has 2"):
            context.use_adapters(((number, 1.0),))


@pytest.mark.parametrize("quant", ["F32", "F16"])
def test_an_adapter_is_the_product_of_its_matrices_times_scale_and_alpha_by_rank(tmp_path: Path, quant: str) -> None:
    """Compared with a model with the adapter merged into its weights: W + scale * alpha / rank * B A."""
    path = lora(tmp_path / "a.gguf", pair(), quant=quant)
    read = {t.name: t.data.astype(np.float32) for t in gguf.GGUFReader(path).tensors}
    plain = write_llama(tmp_path / "plain.gguf")
    merged = write_llama(tmp_path / "merged.gguf")
    reader = gguf.GGUFReader(merged, "r+")
    (weight,) = (t for t in reader.tensors if t.name == Q)
    weight.data[:] += 0.5 * 4.0 / 4 * read[f"{Q}.lora_b"] @ read[f"{Q}.lora_a"]
    reader.data.flush()
    rows = []
    for file in (plain, merged):
        with Model(file) as model:
            if file is plain:
                model.add_adapter(path)
            with Context(model, n_ctx=256, n_threads=1, flash_attn="off", type_k="f32", type_v="f32") as context:
                context.use_adapters(((0, 0.5),) if file is plain else ())
                rows.append(decode(context, TOKENS))
    adapted, baked_in = rows
    assert np.allclose(adapted, baked_in, rtol=0, atol=1e-3)


def test_an_embedding_can_have_an_adapter_where_the_output_has_weights_of_its_own(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = lora(tmp_path / "e.gguf", EMBEDDING)
    with BatchInferenceEngine(tiny_llama, n_ctx=256, n_threads=1, lora=((str(path), 1.0),)) as engine:
        assert engine.generate(["abc"])[0].tokens


# --- what does not --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "adapter file not found"),
    "a folder": (lambda path: path.mkdir(), "adapter file not found"),
    "empty": (tiny_models.empty, "is empty"),
    "a web page": (tiny_models.not_gguf, "not a GGUF file"),
    "a model": (tiny_models.llama, "expect general.type to be 'adapter'"),
    "cut off": (lambda path: path.write_bytes(write_lora(path).read_bytes()[:9000]), "Download it again"),
    "of another architecture": (lambda path: write_lora(path, arch="qwen2"), "arch mismatch"),
    "of a larger model": (lambda path: write_lora(path, LlamaShape(n_layer=3)), "wrong base model"),
    "of a wider model": (lambda path: write_lora(path, LlamaShape(n_embd=128)), "wrong base model"),
    "no lora": (lambda path: lora(path, pair(), {"adapter.type": "ia3"}), "to be 'lora', but got: ia3"),
    "half of a pair": (lambda path: lora(path, pair()[:1]), "missing one component"),
    "of two ranks": (lambda path: lora(path, pair(b=(64, 8))), "not transposed"),
    "other tensors": (lambda path: lora(path, [Weight("x", (4, 4))]), "unexpected suffix"),
    "an aLoRA": (lambda path: lora(path, pair(), {"adapter.alora.invocation_tokens": [5, 6]}), "is an aLoRA"),
    # llama.cpp would abort:
    "a number as type": (lambda path: lora(path, pair(), {"general.type": 3}), "type is of type UINT32"),
    "an integer as alpha": (lambda path: lora(path, pair(), {"adapter.lora.alpha": 4}), "alpha is of type UINT32"),
    "alpha not finite": (lambda path: lora(path, pair(), {"adapter.lora.alpha": math.nan}), "alpha is nan"),
    "three dimensions": (lambda path: lora(path, pair(a=(2, 4, 64), b=(2, 64, 4))), "does not fit any matrix"),
    "embedding of two ranks": (
        lambda path: lora(path, pair("token_embd.weight", (512, 4), (64, 8))), "ranks of token_embd.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    make, reason = BAD[kind]
    make(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=reason) as raised:
        BatchInferenceEngine(tiny_llama, n_ctx=256, n_threads=1, lora=((str(tmp_path / "a.gguf"), 1.0),))
    assert "a.gguf" in str(raised.value)


def test_an_embedding_that_is_the_output_too_can_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    weights = synthetic._llama_weights
    monkeypatch.setattr(
        synthetic, "_llama_weights", lambda *args: [w for w in weights(*args) if w[0] != "output.weight"]
    )
    model = write_llama(tmp_path / "tied.gguf")
    path = lora(tmp_path / "a.gguf", EMBEDDING)
    with pytest.raises(ModelError, match="also uses as its output matrix"):
        BatchInferenceEngine(model, n_ctx=256, n_threads=1, lora=((str(path), 1.0),))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1001, 1001])
def test_a_default_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"lora \(--lora\): the scale of a.gguf is .* from -1000 to 1000"):
        EngineConfig(model_path="", lora=(("a.gguf", scale),))


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one/a.gguf and two/a.gguf have the same name 'a'; rename"):
        EngineConfig(model_path="", lora=(("one/a.gguf", 1), ("two/a.gguf", 1)))


@pytest.mark.parametrize("lora", [("a.gguf",), ((1, 2, 3),), 3, (("a.gguf", "much"),)])
def test_adapters_are_pairs_of_a_file_and_a_scale(lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(file, scale\) pairs"):
        EngineConfig(model_path="", lora=lora)


@click.command()
@engine_options
def show_lora(config: EngineConfig) -> None:
    click.echo(json.dumps(config.lora))


@pytest.mark.parametrize("name", ["plain.gguf", "with=sign.gguf", "looks=like=0.25"])
def test_lora_takes_files_with_or_without_a_scale(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """And a = in a file's name is part of it, even if what follows could be a scale."""
    path = write_lora(tmp_path / name)
    for given, scale in {"": 1.0, "=1": 1.0, "=0.5": 0.5, "=0": 0.0, "=-1e1": -10.0}.items():
        result = CliRunner().invoke(show_lora, ["-m", str(tiny_llama), "--lora", f"{path}{given}", "--lora", "b.gguf"])
        assert json.loads(result.output) == [[str(path), scale], ["b.gguf", 1.0]]


def test_generate_uses_the_adapters_that_it_is_given(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_lora(tmp_path / "a.gguf")
    texts = []
    for given in ([], ["--lora", f"{path}=0"], ["--lora", str(path)]):
        command = ["-m", str(tiny_llama), "-c", "256", "-np", "1", "-p", "abc", "-n", "8", "--temp", "0", "--json"]
        result = CliRunner().invoke(generate, [*command, *given])
        texts.append(json.loads(result.stdout)["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("none.gguf", "adapter file not found: none.gguf"),
        ("none.gguf=much", "adapter file not found: none.gguf=much"),
        ("none.gguf=nan", "lora (--lora): the scale of none.gguf is nan"),
        ("none.gguf=1e9", "lora (--lora): the scale of none.gguf is 1000000000.0"),
    ],
)
def test_a_lora_that_cannot_be_is_one_line(given: str, reason: str, tiny_llama: Path) -> None:
    result = CliRunner().invoke(generate, ["-m", str(tiny_llama), "-p", "abc", "--lora", given])
    assert isinstance(result.exception, (ModelError, ConfigError))
    assert reason in str(result.exception)
