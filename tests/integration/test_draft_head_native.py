"""The draft head in a model's file over real llama.cpp contexts: its drafts are what it computes alone, and the text
stays the model's own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.memory_report import memory_report
from cppbatch.cli.plan_start import model_line
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import load_runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation import draft_model, runtimes, speculator
from cppbatch.engine.speculation.chain_proposer import ChainProposer
from cppbatch.engine.speculation.head_proposer import HeadProposer
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.engine.step_cost import StepCost
from cppbatch.errors import LlamaError, ModelError, OutOfRange
from cppbatch.llama import Backend, Batch, Context, HeadContext, Model, library
from cppbatch.models.inspect import inspect_model
from cppbatch.sizing.buffers import Buffer, read_engine_buffers
from cppbatch.sizing.estimate import estimate_memory
from tests.support import tiny_models
from tests.support.fakes import greedy
from tests.support.native_engines import OpenEngine

PROMPTS = ["a", "Hello", "the cat " * 3, "é" * 20, "what will they say when ", "x" * 70, "one for all and " * 9, "1+1="]
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "flash_attn": "off",
    "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip
KINDS: dict[str, Callable[[Path], Path]] = {
    "random": tiny_models.with_head,
    "right": lambda path: tiny_models.with_head(path, head="right"),
    "wrong": lambda path: tiny_models.with_head(path, head="wrong"),
    "chain": lambda path: tiny_models.with_head(path, n_heads=3),
    "right-chain": lambda path: tiny_models.with_head(path, head="right", n_heads=3),
    "hybrid": lambda path: tiny_models.two_dimensional_hybrid(path, has_head=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: make(folder / f"{kind}.gguf") for kind, make in KINDS.items()}


@pytest.fixture
def eager() -> Iterator[None]:
    """The head is asked in every step, and drafts as far as it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCost, "rows_s", lambda cost, groups: 0.01)
        for proposer in (HeadProposer, ChainProposer):
            patch.setattr(proposer, "seconds", lambda proposer, n, k: 0.0)
        patch.setattr(HeadProposer, "_is_worth_another", lambda proposer, n_expected, n_sequences: True)
        patch.setattr(speculator, "_MIN_GAIN", 0.0)
        patch.setattr(draft_model, "_MIN_PROBABILITY", 0.0)
        yield


def texts(path: Path, params: SamplingParams, **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, and how many draft tokens were computed for them."""
    with BatchInferenceEngine(path, **{**SETTINGS, **settings}) as engine:
        results = engine.generate(PROMPTS, params)
        return [each.tokens for each in results], engine.stats().drafted_tokens


# --- drafts -------------------------------------------------------------------------------------------------------


class Alone:
    """What the head drafts for one sequence, in contexts of its own, from its first token on."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path, load_head=True)
        sizes: dict[str, Any] = {
            "n_ctx": 512, "n_batch": 512, "n_seq_max": 1, "n_threads": 1, "flash_attn": "off",
            "type_k": "f32", "type_v": "f32",
        }  # fmt: skip
        self.target = Context(self.model, n_ubatch=512, **sizes)
        self.heads = [HeadContext(self.model, **sizes, head=i) for i in range(self.model.n_draft_heads)]
        self.head = self.heads[0]
        self.target.give_hidden_rows()

    def draft(self, tokens: list[int], n: int) -> list[int]:
        return self._draft_with_chain(tokens, n) if len(self.heads) > 1 else self._draft(tokens, n)

    def _draft_with_chain(self, tokens: list[int], n: int) -> list[int]:
        """Each head reads everything from the first token on, and the hidden rows of those before it."""
        batch = Batch(512)
        batch.add_run(np.array(tokens, np.int32), 0, 0, n_logits=1)
        self.target.remove(0)
        self.target.decode(batch)
        hidden = np.concatenate([np.zeros((1, self.model.n_embd)), self.target.hidden_rows(len(tokens))[:-1]])
        drafted: list[int] = []
        for head in self.heads[:n]:
            head.remove(0)
            head_batch, read = head.new_batch(), np.array(tokens + drafted, np.int32)
            head_batch.add_hidden_run(read, hidden.astype(np.float32), 0, 0, n_logits=0)
            head_batch.wants_logits[:] = 1
            head_batch.n_outputs = len(read)
            head.decode(head_batch)
            drafted.append(int(head.logits(len(read))[-1].argmax()))
            hidden = np.concatenate([hidden, head.hidden_rows(len(read))[-1:]])
        return drafted

    def _draft(self, tokens: list[int], n: int) -> list[int]:
        for context in (self.target, self.head):
            context.remove(0)
        batch, head_batch = Batch(512), self.head.new_batch()
        known = np.array(tokens, np.int32)
        batch.add_run(known, 0, 0, n_logits=1)
        self.target.decode(batch)
        hidden = np.concatenate([np.zeros((1, self.model.n_embd)), self.target.hidden_rows(len(known))[:-1]])
        head_batch.add_hidden_run(known, hidden.astype(np.float32), 0, 0, n_logits=0)
        head_batch.wants_logits[:] = 1
        head_batch.n_outputs = len(known)
        self.head.decode(head_batch)
        drafted = [int(self.head.logits(len(known))[-1].argmax())]
        while len(drafted) < n:
            last = self.head.hidden_rows(head_batch.n_outputs)[-1:].copy()
            head_batch.clear()
            head_batch.add_hidden_rows(drafted[-1:], last, [len(tokens) + len(drafted) - 1], [0])
            self.head.decode(head_batch)
            drafted.append(int(self.head.logits(1)[0].argmax()))
        return drafted


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("kind", ["random", "chain", "hybrid"])
def test_drafts_are_those_of_the_head_alone(
    models: dict[str, Path], kind: str, layout: Any, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[list[int], list[int]]] = []
    propose = HeadProposer.propose

    def noted(proposer: HeadProposer, sequences: list[Seq], most: list[int]) -> list[Draft | None]:
        drafts = propose(proposer, sequences, most)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft:
                assert proposer.cells.get(sequence).start == 0  # type: ignore[union-attr]
                made.append((sequence.tokens[: sequence.n_tokens].tolist(), draft.tokens.tolist()))
        return drafts

    monkeypatch.setattr(HeadProposer, "propose", noted)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
    texts(models[kind], params, spec="mtp", kv_layout=layout, draft_max=3, prefix_cache=False)
    assert len(made) > 40
    alone = Alone(models[kind])
    for tokens, drafted in made[:: len(made) // 8]:
        assert drafted == alone.draft(tokens, len(drafted))
    alone.model.close()


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_the_model_alone(
    models: dict[str, Path], kind: str, layout: Any, temperature: float, eager: None
) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=30, ignore_eos=True)
    expected, _ = texts(models[kind], params, kv_layout=layout, spec="off")
    with_drafts, n_drafted = texts(models[kind], params, kv_layout=layout, spec="mtp")
    assert with_drafts == expected
    assert n_drafted > 100


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [0, 64])
@pytest.mark.parametrize("kind", ["right", "right-chain", "hybrid"])
def test_sequences_that_lose_their_cells_keep_their_texts(
    models: dict[str, Path], kind: str, swap_space: int, eager: None, open_engine: OpenEngine
) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=50, ignore_eos=True)
    expected, _ = texts(models[kind], params, spec="off")
    engine = open_engine(
        models[kind], **{**SETTINGS, "n_ctx": 256}, kv_layout="unified", spec="mtp", swap_space=swap_space
    )
    results = engine.generate(PROMPTS, params)
    stats = engine.stats()
    assert stats.swaps + stats.recomputes > 0
    assert [each.tokens for each in results] == expected
    assert stats.drafted_tokens > 0


def test_samples_and_chats_share_prefixes_with_the_head(models: dict[str, Path], eager: None) -> None:
    prompt = "one prompt that all of them begin with " * 3
    samples = [SamplingParams(temperature=0.9, seed=i, max_tokens=10, ignore_eos=True) for i in range(6)]
    answers: list[list[list[int]]] = []
    for spec in ("off", "mtp", "auto"):
        with BatchInferenceEngine(models["random"], **{**SETTINGS, "n_batch": 256}, spec=spec) as engine:
            results = engine.generate([prompt] * 6, samples)
            results += engine.generate([prompt + each.text + " and then?" for each in results], samples)
            answers.append([each.tokens for each in results])
    assert answers[1:] == answers[:1] * 2


def test_the_head_continues_when_the_layout_is_switched(models: dict[str, Path], eager: None) -> None:
    """A prompt that is longer than a stream."""
    prompts, params = [*PROMPTS[:3], "x" * 700], SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    answers = []
    for spec in ("off", "mtp"):
        with BatchInferenceEngine(models["right"], **SETTINGS, spec=spec, kv_layout="auto") as engine:
            first = engine.generate(prompts[:3], params)
            answers.append([each.tokens for each in first + engine.generate(prompts, params)])
            stats = engine.stats()
            assert stats.layout_switches > 0
    assert answers[0] == answers[1]
    assert stats.accepted_tokens > 30


def test_deterministic_texts_stay_the_same_bits(models: dict[str, Path], eager: None) -> None:
    settings: dict[str, Any] = {**SETTINGS, "deterministic": True, "flash_attn": "auto"}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    answers = []
    for spec in ("off", "mtp"):
        with BatchInferenceEngine(models["right"], **settings, spec=spec) as engine:
            answers.append([(each.tokens, each.logprobs) for each in engine.generate(PROMPTS, params)])
    assert answers[0] == answers[1]


@pytest.mark.each_value
@pytest.mark.parametrize("n_parallel", [1, 4, 16])
@pytest.mark.parametrize("kind", ["right", "right-chain"])
def test_a_head_that_is_right_by_construction_is_always_right(
    models: dict[str, Path], kind: str, n_parallel: int, eager: None
) -> None:
    settings = {**SETTINGS, "n_parallel": n_parallel, "n_ctx": 256 * n_parallel, "n_batch": 512, "n_ubatch": 512}
    with BatchInferenceEngine(models[kind], **settings, spec="mtp", draft_max=7) as engine:
        engine.generate([[20 + i, 40] for i in range(n_parallel)], greedy(64, ignore_eos=True))
        stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.accepted_tokens > (0.75 if kind == "right" else 0.6) * 64 * n_parallel  # three of four at most


# --- what is loaded -----------------------------------------------------------------------------------------------


def test_a_file_without_a_head_drafts_without_one_and_is_refused_with_mtp(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        assert engine.core.runtime.head is None
        assert not engine.core.runtime.context.gives_hidden_rows  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"spec \(--spec\) is 'mtp', but tiny-llama.gguf has no draft head"):
        BatchInferenceEngine(tiny_llama, **SETTINGS, spec="mtp")


@pytest.mark.parametrize("spec", ["off", "suffix"])
def test_a_head_that_is_not_used_is_not_loaded(models: dict[str, Path], spec: Any) -> None:
    with BatchInferenceEngine(models["right"], **SETTINGS, spec=spec) as engine:
        assert engine.core.runtime.head is None
    with (
        Model(models["right"]) as model,
        pytest.raises(OutOfRange, match=r"draft head 0 of right\.gguf is not loaded"),
    ):
        HeadContext(model, n_ctx=64, n_batch=8, n_seq_max=1, n_threads=1, flash_attn="off", type_k="f16",
                    type_v="f16")  # fmt: skip


def test_functions_missing_in_the_library_are_one_line_in_the_log(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.nextn.cache_clear()
    monkeypatch.setattr(library, "_NEEDED_BY_HEADS", ("llama_set_embeddings_nextn", "llama_renamed"))
    try:
        with pytest.raises(LlamaError, match="lacks llama_renamed"):
            library.nextn()
        with caplog.at_level(logging.INFO), BatchInferenceEngine(models["right"], **SETTINGS) as engine:
            assert engine.core.runtime.head is None
            assert engine.generate(PROMPTS[:1], greedy(4))[0].tokens
    finally:
        library.nextn.cache_clear()
    lines = [record.getMessage() for record in caplog.records if "draft head" in record.getMessage()]
    assert lines == ["the draft head is not used: this llama-cpp-python lacks llama_renamed"]


def test_an_unsupported_architecture_is_named(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.models.draft_files.USABLE_HEADS", frozenset())
    with pytest.raises(ModelError, match=r"unsupported architecture \(hy_v3\)"):
        runtimes.uses_head(EngineConfig(str(models["right"]), spec="mtp"))
    assert not runtimes.uses_head(EngineConfig(str(models["right"])))


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["off", "auto"])
def test_the_first_lines_and_the_metadata_name_the_head(models: dict[str, Path], spec: Any) -> None:
    config = EngineConfig(str(models["right"]), **SETTINGS, spec=spec)
    facts = inspect_model(models["right"])
    assert facts.draft_heads == 1
    line = model_line(config, facts, estimate_memory([config]))
    assert f"with a draft head{'' if spec == 'auto' else ' that is not used'} (--spec {spec});" in line


@pytest.mark.parametrize("kind", ["hybrid", "chain"])
def test_the_memory_of_the_head_is_measured_as_predicted(models: dict[str, Path], kind: str) -> None:
    def sums(buffers: list[Buffer]) -> Counter[tuple[str, str]]:
        n_bytes: Counter[tuple[str, str]] = Counter()
        for each in buffers:
            n_bytes[each.owner, each.kind] += each.n_bytes
        return n_bytes

    config = EngineConfig(str(models[kind]), **SETTINGS, spec="mtp", kv_layout="unified")
    (footprint,) = estimate_memory([config]).footprints
    predicted = sums([each for each in footprint.buffers if each.kind in ("cells", "compute", "states")])
    with Backend.get().lines() as lines:
        load_runtime(config).close()
    measured = sums(read_engine_buffers(lines))
    assert {owner for owner, _ in predicted} == {"", "draft head"}
    for key, n_bytes in predicted.items():
        assert measured[key] == pytest.approx(n_bytes, rel=0.05), key


def test_the_memory_of_the_head_is_predicted(models: dict[str, Path]) -> None:
    def rows(spec: Any) -> dict[str, float]:
        report = memory_report(EngineConfig(str(models["right"]), **SETTINGS, spec=spec))
        return {row["what"]: row["predicted_mib"] for row in report.rows}

    without, with_head = rows("off"), rows("mtp")
    assert with_head["draft head: KV cells"] == pytest.approx(without["KV cells"] / 2, rel=0.02)  # one layer of three
    assert {"draft head: compute buffers", "draft head: hidden rows"} <= with_head.keys()
    assert not any(what.startswith("draft head") for what in without)
