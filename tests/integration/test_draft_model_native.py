"""A draft model over real llama.cpp contexts: its drafts are its greedy text, and the text stays the model's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, GenerationRequest, SamplingParams
from cppbatch.bench.memory_report import memory_report
from cppbatch.config import CacheType, EngineConfig
from cppbatch.engine.runtime import load_runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_model import DraftModelProposer
from cppbatch.engine.speculation.runtimes import draft_config
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models.synthetic import byte_vocab
from tests.support import tiny_models
from tests.support.fakes import greedy

PROMPTS = ["a", "Hello", "the cat " * 3, "é" * 20, "what will they say when ", "x" * 70, "one for all and " * 9, "1+1="]
STEM = "one prompt that all of them begin with, as long as it takes to be read in more than one piece: "
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "flash_attn": "off",
    "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary with other random weights."""
    return tiny_models.llama(tmp_path_factory.mktemp("other") / "other-llama.gguf", seed=1)


def draft_of(engine: BatchInferenceEngine) -> DraftModelProposer:
    (proposer,) = (each for each in engine.core.runtime.proposers if isinstance(each, DraftModelProposer))
    return proposer


@pytest.mark.parametrize("prompts", [PROMPTS[:4], [STEM + each for each in PROMPTS[:4]]], ids=["distinct", "stem"])
def test_drafts_are_the_greedy_text_of_the_draft_model(tiny_llama: Path, other_llama: Path, prompts: list[str]) -> None:
    n = 12
    with BatchInferenceEngine(other_llama, **SETTINGS) as alone:
        expected = [each.tokens for each in alone.generate(prompts, greedy(n + 4))]
    with BatchInferenceEngine(tiny_llama, draft_model=str(other_llama), **SETTINGS) as engine:
        proposer = draft_of(engine)
        sequences = [
            engine.prepare(GenerationRequest(id=prompt, prompt=prompt, params=greedy(n))) for prompt in prompts
        ]
        written = [0] * len(prompts)
        for turn in range(200):
            drafts = proposer.propose(sequences, [4] * len(sequences))
            for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
                left = expected[i][written[i] :]
                if draft:
                    assert draft.tokens.tolist() == left[: len(draft.tokens)]
                is_read = proposer.read_seconds(sequence) == 0
                for token in left[
                    : min((turn + i) % 4, n - written[i]) if is_read else 0
                ]:  # as if that many were accepted
                    sequence.append(token)
                    written[i] += 1
            if min(written) >= n:
                return
    raise AssertionError(f"{written} tokens were written")


def texts(path: Path, params: SamplingParams, **settings: Any) -> list[list[int]]:
    with BatchInferenceEngine(path, **{**SETTINGS, **settings}) as engine:
        return [each.tokens for each in engine.generate(PROMPTS, params)]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("drafts_with", ["tiny_llama", "other_llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_the_model_alone(
    tiny_llama: Path, drafts_with: str, layout: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    draft = str(request.getfixturevalue(drafts_with))
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True)
    expected = texts(tiny_llama, params, kv_layout=layout, spec="off")
    assert texts(tiny_llama, params, kv_layout=layout, spec="draft", draft_model=draft) == expected


def test_the_cells_of_the_draft_context_are_those_that_are_counted(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, draft_model=str(tiny_llama), **{**SETTINGS, "n_ctx": 512}) as engine:
        proposer = draft_of(engine)
        context = proposer._context
        for turn in range(6):  # more prompts than cells and seq_ids
            prompts = [f"{turn}: {'x' * 40 * i}" for i in range(4)]
            sequences = [engine.prepare(GenerationRequest(id=p, prompt=p, params=greedy(20))) for p in prompts]
            for _ in range(12):
                for sequence, draft in zip(sequences, proposer.propose(sequences, [3] * 4), strict=True):
                    if draft and sequence.n_left > 4:
                        for token in (*draft.tokens[:1].tolist(), 5):
                            sequence.append(token)
            for each in proposer.cells.all:
                assert context.last_position(each.seq_id) == each.n_cells - 1  # type: ignore[attr-defined]
            assert proposer.cells.n_free >= 0
            for sequence in sequences[turn % 2 :]:
                proposer.finished(sequence)


def test_a_larger_copy_for_measuring_writes_the_same_text(tiny_llama: Path, tmp_path: Path) -> None:
    script, larger = Path(__file__).parents[2] / "scripts" / "larger_model.py", tmp_path / "larger.gguf"
    subprocess.run([sys.executable, script, tiny_llama, larger, "--deeper", "3", "--wider", "2"], check=True)
    assert texts(larger, greedy(20), spec="off") == texts(tiny_llama, greedy(20), spec="off")


def renamed(path: Path) -> Path:
    vocab = byte_vocab()
    pieces = list(vocab.pieces)
    pieces[300] = "other"
    return tiny_models.llama(path, vocab=msgspec.structs.replace(vocab, pieces=pieces))


def test_another_vocabulary_is_refused_with_the_first_difference(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"token 300 is 'other' instead of .*smaller model of the same family"):
        load_runtime(config(tiny_llama, renamed(tmp_path / "renamed.gguf")))
    with pytest.raises(ModelError, match="544 tokens instead of 512"):
        load_runtime(config(tiny_llama, tiny_models.llama(tmp_path / "longer.gguf", vocab=byte_vocab(544))))


def config(model: Path, draft: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_path=str(model), draft_model=str(draft), **{**SETTINGS, **settings})


@pytest.mark.parametrize(("kind", "reason"), [("mamba", "recurrent"), ("hybrid", "recurrent"), ("swa", "sliding")])
def test_a_model_that_cannot_forget_wrong_drafts_is_refused(
    tiny_llama: Path, kind: str, reason: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ModelError, match=f"{reason}.*cannot be removed.*-md"):
        load_runtime(config(tiny_llama, request.getfixturevalue(f"tiny_{kind}")))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_models.truncated, "Download"),
        (tiny_models.empty, "Download"),
        (tiny_models.not_gguf, "Download"),
        (lambda path: path, "model file not found"),
    ],
    ids=["truncated", "empty", "web-page", "missing"],
)
def test_a_broken_or_missing_file_is_refused(
    tiny_llama: Path, tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        load_runtime(config(tiny_llama, make(tmp_path / "draft.gguf")))


def test_models_that_write_no_text_have_no_draft_model_and_are_none(tiny_llama: Path, tiny_encoder: Path) -> None:
    with pytest.raises(ModelError, match=r"draft_model \(-md\) requires a model that generates text"):
        load_runtime(config(tiny_encoder, tiny_llama))
    with pytest.raises(ModelError, match="does not generate text"):
        load_runtime(config(tiny_llama, tiny_encoder))
    with pytest.raises(ConfigError, match="requires a draft model"):
        EngineConfig(model_path="x", spec="draft")


@pytest.mark.parametrize("spec", ["off", "suffix"])
def test_a_draft_model_that_is_not_used_is_not_loaded(tiny_llama: Path, spec: Any) -> None:
    runtime = load_runtime(config(tiny_llama, Path("nowhere.gguf"), spec=spec))
    assert not any(proposer.costs_compute for proposer in runtime.proposers)
    runtime.close()


def test_the_memory_of_the_draft_model_is_predicted(tiny_llama: Path, other_llama: Path) -> None:
    alone = memory_report(config(tiny_llama, other_llama, spec="off"))
    both = memory_report(config(tiny_llama, other_llama))
    more = {row["what"]: row["predicted_mib"] for row in both.rows if row["what"].startswith("draft model")}
    assert {"draft model: weights", "draft model: KV cells", "draft model: compute buffers"} <= more.keys()
    cells = {row["what"]: row["predicted_mib"] for row in alone.rows}["KV cells"]
    assert more["draft model: KV cells"] == pytest.approx(cells, rel=0.01)
    assert not any(row["what"].startswith("draft model") for row in alone.rows)


def test_the_most_likely_token_is_that_of_the_logits(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, draft_model=str(tiny_llama), **SETTINGS) as engine:
        proposer = draft_of(engine)
        tokens = np.arange(20, 26, dtype=np.int32)
        sequence = Seq(GenerationRequest(id="1", prompt=tokens.tolist()), tokens, max_new=8, seed=0, now=0.0)
        proposer.propose([sequence], [1])
        rows = proposer._context.logits(1)
        guess = proposer._followed[sequence].guess
        assert guess
        assert guess.tokens == [int(rows[0].argmax())]
        exact = np.exp(rows[0].astype(np.float64) - rows[0].max())
        assert guess.probabilities == pytest.approx([1 / exact.sum()], rel=1e-4)


@pytest.mark.parametrize("of_draft", [None, "f32"])
def test_the_cells_of_a_draft_model_have_a_type_of_their_own(tiny_llama: Path, of_draft: CacheType | None) -> None:
    config = EngineConfig(
        str(tiny_llama), n_ctx=256, n_parallel=1, n_threads=1, draft_model=str(tiny_llama), cache_type_k="bf16",
        draft_cache_type_k=of_draft, draft_cache_type_v=of_draft, rope_freq_base=77.0, kv_overrides=("a=int:1",),
    )  # fmt: skip
    draft = draft_config(config)
    assert draft
    assert (draft.cache_type_k, draft.cache_type_v) == (of_draft or "bf16", of_draft or "f16")
    assert (draft.rope_freq_base, draft.kv_overrides, draft.control_vectors) == (77.0, (), ())
    with BatchInferenceEngine(config) as engine:
        assert engine.generate(["a"], SamplingParams(max_tokens=8, temperature=0))[0].tokens
