"""EAGLE-3, DFlash and Gemma 4 assistant draft models over real llama.cpp contexts: their drafts are what they compute
alone, the text stays the model's own, and files that would abort the process are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.memory_report import memory_report
from cppbatch.cli.plan_start import model_line
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import load_runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation import draft_model, speculator
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.engine.speculation.runtimes import choose_row_draft
from cppbatch.engine.step_cost import StepCost
from cppbatch.errors import ConfigError, LlamaError, ModelError, OutOfRange
from cppbatch.llama import (
    AssistantContext,
    Backend,
    Batch,
    Context,
    DFlashContext,
    EagleContext,
    HeadContext,
    Model,
    library,
)
from cppbatch.models.draft_files import TARGETS, read_draft_file
from cppbatch.models.inspect import inspect_model
from cppbatch.models.synthetic import LlamaShape, byte_vocab
from cppbatch.sizing.buffers import read_engine_buffers
from cppbatch.sizing.estimate import estimate_memory
from tests.support import tiny_models
from tests.support.fakes import greedy
from tests.support.native_engines import OpenEngine

PROMPTS = ["a", "Hello", "the cat " * 3, "é" * 20, "what will they say when ", "x" * 70, "one for all and " * 9, "1+1="]
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "flash_attn": "off",
    "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip
TARGET_FILES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_models.llama(path, shape=LlamaShape(n_layer=4)),
    "qwen35": tiny_models.two_dimensional_hybrid,
    "echo": tiny_models.echo,
    "gemma4": tiny_models.gemma4,
    "gemma4-echo": lambda path: tiny_models.gemma4(path, echoes=True),
}
DRAFTS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "eagle3": ("llama", tiny_models.eagle3),
    "eagle3-shared": ("llama", lambda path: tiny_models.eagle3(path, own=False)),
    "eagle3-hybrid": (
        "qwen35",
        lambda path: tiny_models.eagle3(path, layers=(0, 1, 1), vocab=tiny_models.vision_vocab()),
    ),
    "dflash": ("llama", tiny_models.dflash),
    "dflash-shared": ("llama", lambda path: tiny_models.dflash(path, own=False)),
    "dflash-swa": ("llama", lambda path: tiny_models.dflash(path, kind="swa")),
    "dflash2": ("llama", lambda path: tiny_models.dflash(path, kind="dflash2")),
    "dspark": ("llama", lambda path: tiny_models.dflash(path, kind="dspark", own=False)),
    "dspark-bonus": ("llama", lambda path: tiny_models.dflash(path, kind="dspark-bonus")),
    "assistant": ("gemma4", tiny_models.gemma4_assistant),
    "assistant-echo": ("gemma4-echo", lambda path: tiny_models.gemma4_assistant(path, echoes=True)),
    "eagle3-echo": ("echo", lambda path: tiny_models.eagle3(path, echoes=True)),
    "dflash-echo": ("echo", lambda path: tiny_models.dflash(path, echoes=True)),
}
RANDOM = [kind for kind in DRAFTS if not kind.endswith("echo")]


class Files:
    """A target and a draft model of each kind."""

    def __init__(self, folder: Path) -> None:
        self._targets = {name: make(folder / f"target-{name}.gguf") for name, make in TARGET_FILES.items()}
        self._drafts = {name: make(folder / f"{name}.gguf") for name, (_, make) in DRAFTS.items()}
        self._texts: dict[Any, list[list[int]]] = {}

    def target(self, kind: str) -> Path:
        return self._targets[DRAFTS[kind][0]]

    def draft(self, kind: str) -> Path:
        return self._drafts[kind]

    def config(self, kind: str, **settings: Any) -> EngineConfig:
        return EngineConfig(str(self.target(kind)), draft_model=str(self.draft(kind)), **{**SETTINGS, **settings})

    def text_alone(self, kind: str, temperature: float, n: int, layout: Any) -> list[list[int]]:
        """What the target writes without drafts."""
        key = DRAFTS[kind][0], temperature, n, layout
        if key not in self._texts:
            with BatchInferenceEngine(self.target(kind), **SETTINGS, kv_layout=layout, spec="off") as engine:
                self._texts[key] = [each.tokens for each in engine.generate(PROMPTS, sampled(temperature, n))]
        return self._texts[key]


def sampled(temperature: float, n: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=n, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def eager() -> Iterator[None]:
    """The draft model is asked in every step, and drafts as far as it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCost, "rows_s", lambda cost, groups: 0.01)
        patch.setattr(RowProposer, "seconds", lambda proposer, n, k: 0.0)
        patch.setattr(RowProposer, "_is_worth_another", lambda proposer, n_expected, n_sequences: True)
        patch.setattr(speculator, "_MIN_GAIN", 0.0)
        patch.setattr(draft_model, "_MIN_PROBABILITY", 0.0)
        yield


# --- drafts -------------------------------------------------------------------------------------------------------


class Alone:
    """What a draft model drafts for one sequence, in contexts of its own, from its first token on."""

    def __init__(self, target: Path, draft: Path, n_drafted: int) -> None:
        self.file = read_draft_file(draft, target)
        self.models = Model(target), Model(draft)
        sizes: dict[str, Any] = {
            "n_ctx": 512, "n_batch": 512, "n_seq_max": 1, "n_threads": 1, "flash_attn": "off", "type_k": "f32",
            "type_v": "f32",
        }  # fmt: skip
        self.target = Context(self.models[0], n_ubatch=512, **sizes)
        self.target.give_hidden_rows(self.file.layers)
        self.eagle = self.dflash = self.assistant = None
        if self.file.kind == "gemma4-assistant":
            self.assistant = AssistantContext(self.models[1], self.target, n_threads=1, type_k="f32", type_v="f32")
        elif self.file.kind == "eagle3":
            self.eagle = EagleContext(self.models[1], self.file, self.target, **sizes)
        else:
            self.dflash = DFlashContext(self.models[1], self.file, self.target, n_drafted=n_drafted, **sizes)

    def draft(self, tokens: list[int], n: int) -> list[int]:
        known = np.array(tokens, np.int32)
        if self.assistant:
            return self._draft_assistant(known, n)
        batch = Batch(512)
        batch.add_run(known, 0, 0, n_logits=1)
        self.target.remove(0)
        self.target.decode(batch)
        rows = self.target.hidden_rows(len(known))[:-1]
        return self._draft_eagle(known, rows, n) if self.eagle else self._draft_block(known, rows)[:n]

    def _draft_eagle(self, known: Any, rows: Any, n: int) -> list[int]:
        """With the positions of training: those of the rows."""
        assert self.eagle
        self.eagle.remove(0)
        batch = self.eagle.new_batch()
        batch.add_hidden_run(known[1:], self.eagle.encode(rows), 0, 0, n_logits=len(rows))
        self.eagle.decode(batch)
        drafted = [int(self.eagle.logits(len(rows))[-1].argmax())]
        while len(drafted) < n:
            last = self.eagle.hidden_rows(batch.n_outputs)[-1:].copy()
            batch.clear()
            batch.add_hidden_rows(drafted[-1:], last, [len(rows) + len(drafted) - 1], [0])
            self.eagle.decode(batch)
            drafted.append(int(self.eagle.logits(1)[0].argmax()))
        return drafted

    def _draft_assistant(self, known: Any, n: int) -> list[int]:
        """The cells of the target hold all tokens but the last one; all drafts start at its position."""
        assert self.assistant
        before = Batch(512)
        before.add_run(known[:-1], 0, 0, n_logits=1)
        self.target.remove(0)
        self.target.decode(before)
        hidden, drafted = self.target.hidden_rows(len(known) - 1)[-1:].copy(), [int(known[-1])]
        batch = self.assistant.new_batch()
        while len(drafted) <= n:
            batch.clear()
            batch.add_hidden_rows(drafted[-1:], hidden, [len(known) - 1], [0])
            self.assistant.decode(batch)
            drafted.append(int(self.assistant.logits(1)[0].argmax()))
            hidden = self.assistant.hidden_rows(1).copy()
        return drafted[1:]

    def _draft_block(self, known: Any, rows: Any) -> list[int]:
        assert self.dflash
        self.dflash.remove(0)
        batch = self.dflash.new_rows()
        batch.add_runs([(rows, 0, 0)])
        self.dflash.decode(batch)
        found, _ = self.dflash.draft([int(known[-1])], [len(rows)], [0])
        assert self.dflash.last_position(0) == len(rows) - 1
        return [int(token) for token in found[0]]

    def close(self) -> None:
        self.models[1].close()
        self.models[0].close()


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("kind", RANDOM)
def test_drafts_of_a_batch_are_those_of_each_sequence_alone(
    files: Files, kind: str, layout: Any, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[list[int], list[int]]] = []
    propose = RowProposer.propose

    def noted(proposer: RowProposer, sequences: list[Seq], most: list[int]) -> list[Draft | None]:
        drafts = propose(proposer, sequences, most)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft:
                assert proposer.cells.get(sequence).start <= 1  # type: ignore[union-attr]
                made.append((sequence.tokens[: sequence.n_tokens].tolist(), draft.tokens.tolist()))
        return drafts

    monkeypatch.setattr(RowProposer, "propose", noted)
    settings = {**SETTINGS, "kv_layout": layout, "draft_max": 3, "prefix_cache": False, "spec": "draft"}
    with BatchInferenceEngine(files.target(kind), draft_model=str(files.draft(kind)), **settings) as engine:
        engine.generate(PROMPTS, sampled(0.7, 24))  # beside other work, reading the prompts takes steps
    assert len(made) > 40
    alone = Alone(files.target(kind), files.draft(kind), 3)
    for tokens, drafted in made[:: len(made) // 8]:
        assert drafted == alone.draft(tokens, len(drafted))
    alone.close()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_tokens_of_a_block_see_each_other_unless_the_file_says_otherwise(
    files: Files, tmp_path: Path, is_causal: bool
) -> None:
    """So the first drafted token depends on how many there are."""
    draft = tiny_models.dflash(tmp_path / "draft.gguf", is_causal=is_causal)
    found = []
    for n in (1, 5):
        alone = Alone(files.target("dflash"), draft, n)
        assert alone.dflash
        alone.draft([20, 30, 40, 50], n)
        found.append(alone.dflash.draft([50], [3], [0])[1][0, 0])
        alone.close()
    assert (found[0] == pytest.approx(found[1], rel=1e-4)) == is_causal


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_the_model_alone(
    files: Files, kind: str, layout: Any, temperature: float, eager: None
) -> None:
    expected = files.text_alone(kind, temperature, 24, layout)
    settings = {**SETTINGS, "kv_layout": layout, "spec": "auto"}
    with BatchInferenceEngine(files.target(kind), draft_model=str(files.draft(kind)), **settings) as engine:
        results = engine.generate(PROMPTS, sampled(temperature, 24))
        assert engine.stats().drafted_tokens > 100
    assert [each.tokens for each in results] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [0, 64])
@pytest.mark.parametrize("kind", ["eagle3-shared", "eagle3-hybrid", "dflash", "dspark", "assistant"])
def test_sequences_that_lose_their_cells_keep_their_texts(
    files: Files, kind: str, swap_space: int, eager: None, open_engine: OpenEngine
) -> None:
    expected = files.text_alone(kind, 0.8, 40, "unified")
    engine = open_engine(
        files.target(kind), draft_model=str(files.draft(kind)), **{**SETTINGS, "n_ctx": 256}, kv_layout="unified",
        spec="draft", swap_space=swap_space,
    )  # fmt: skip
    results = engine.generate(PROMPTS, sampled(0.8, 40))
    stats = engine.stats()
    assert stats.swaps + stats.recomputes > 0
    assert [each.tokens for each in results] == expected
    assert stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3-shared", "dflash-shared", "assistant-echo"])
def test_ubatches_smaller_than_the_sequences_are_enough(files: Files, kind: str) -> None:
    """llama.cpp aborted: the context of a draft model has one more sequence than the engine."""
    settings = {**SETTINGS, "n_parallel": 16, "n_ubatch": 8}
    with BatchInferenceEngine(files.target(kind), draft_model=str(files.draft(kind)), **settings) as engine:
        assert all(each.tokens for each in engine.generate(PROMPTS[:2], sampled(0.8, 4)))


@pytest.mark.parametrize("kind", ["eagle3-shared", "dflash-shared", "eagle3-echo", "assistant-echo"])
def test_a_switch_of_the_layout_makes_the_context_of_the_draft_model_again(
    files: Files, kind: str, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is longer than a stream. The draft model uses matrices of the model by way of its context."""
    prompts = [*PROMPTS[:3], "x" * 700]
    answers, made_again = [], []
    open_again = HeadContext.open_again

    def noted(context: HeadContext) -> None:
        assert context._owned is None  # it was closed before the model's
        open_again(context)
        assert context._params.ctx_other == context._target.handle  # type: ignore[union-attr]
        made_again.append(context)

    monkeypatch.setattr(HeadContext, "open_again", noted)
    for spec in ("off", "draft"):
        settings = {**SETTINGS, "spec": spec, "kv_layout": "auto"}
        with BatchInferenceEngine(files.target(kind), draft_model=str(files.draft(kind)), **settings) as engine:
            first = engine.generate(prompts[:3], sampled(0.8, 12))
            answers.append([each.tokens for each in first + engine.generate(prompts, sampled(0.8, 12))])
            stats = engine.stats()
    assert answers[0] == answers[1]
    assert stats.drafted_tokens > 0  # how many depends on the times of the steps
    assert len(made_again) == stats.layout_switches > 0


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["eagle3-echo", "dflash-echo", "assistant-echo"])
@pytest.mark.parametrize("n_parallel", [1, 4, 16])
def test_a_draft_model_that_is_right_by_construction_is_always_right(
    files: Files, kind: str, n_parallel: int, eager: None
) -> None:
    settings = {**SETTINGS, "n_parallel": n_parallel, "n_ctx": 256 * n_parallel, "n_batch": 512, "n_ubatch": 512}
    spec: Any = kind.removesuffix("-echo").replace("assistant", "mtp")
    with BatchInferenceEngine(
        files.target(kind), draft_model=str(files.draft(kind)), **settings, spec=spec, draft_max=5
    ) as engine:
        engine.generate([[70 + i] * 3 for i in range(n_parallel)], greedy(64, ignore_eos=True))
        stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.accepted_tokens > 0.7 * 64 * n_parallel


def test_samples_and_chats_share_prefixes(files: Files, eager: None) -> None:
    prompt = "one prompt that all of them begin with " * 3
    samples = [SamplingParams(temperature=0.9, seed=i, max_tokens=10, ignore_eos=True) for i in range(6)]
    for kind in ("eagle3", "dflash", "assistant"):
        answers: list[list[list[int]]] = []
        for spec in ("off", "draft"):
            settings = {**SETTINGS, "n_batch": 256, "spec": spec}
            with BatchInferenceEngine(files.target(kind), draft_model=str(files.draft(kind)), **settings) as engine:
                results = engine.generate([prompt] * 6, samples)
                results += engine.generate([prompt + each.text + " and then?" for each in results], samples)
                answers.append([each.tokens for each in results])
        assert answers[0] == answers[1]


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(target: Path, draft: Path, reason: str, **settings: Any) -> None:
    with pytest.raises(ModelError, match=reason):
        load_runtime(EngineConfig(str(target), draft_model=str(draft), **{**SETTINGS, **settings}))


def test_a_target_that_gives_no_rows_is_refused(files: Files, tmp_path: Path) -> None:
    swa = tiny_models.sliding_window(tmp_path / "swa.gguf")
    draft = tiny_models.eagle3(tmp_path / "draft.gguf", layers=(0, 1, 1))
    reason = r"cannot be used as a draft model for swa\.gguf \(-md\): .* does not export .* architecture gemma3"
    refused(swa, draft, reason)
    assert "gemma3" not in TARGETS


def test_an_assistant_that_does_not_fit_is_refused(files: Files, tmp_path: Path) -> None:
    """llama.cpp reads cells of other sizes as if they fitted."""
    assistant = files.draft("assistant")
    reason = "reads the KV cells of a gemma4 model, but target-llama.gguf is llama"
    refused(files.target("eagle3"), assistant, reason)
    wide = tiny_models.gemma4_assistant(tmp_path / "wide.gguf", n_target=96)
    refused(files.target("assistant"), wide, "expects rows of 96 numbers, but the rows of the model have 64")
    odd = tiny_models.gemma4(tmp_path / "odd.gguf", n_layers=3)
    refused(odd, assistant, "last two layers of the model are not one with a sliding window and one without")
    heads = tiny_models.gemma4_assistant(tmp_path / "heads.gguf", n_head_kv=4)
    reason = "its layer 0 reads cells of 4 KV heads of 16 numbers, but those of the model have 2 KV heads of 16 numbers"
    refused(files.target("assistant"), heads, reason)


def test_another_vocabulary_is_refused(files: Files, tmp_path: Path) -> None:
    vocab = byte_vocab()
    pieces = list(vocab.pieces)
    pieces[300] = "other"
    other = msgspec.structs.replace(vocab, pieces=pieces)
    refused(files.target("eagle3"), tiny_models.eagle3(tmp_path / "e.gguf", vocab=other), "token 300 is 'other'")
    refused(files.target("dflash"), tiny_models.dflash(tmp_path / "d.gguf", vocab=other), "token 300 is 'other'")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda path: tiny_models.eagle3(path, n_target=32),
            "expects rows of 32 numbers, but the rows of the model have 64",
        ),
        (lambda path: tiny_models.eagle3(path, layers=(1, 2, 4)), r"reads layers \[1, 2, 4\], .* layers 0 to 3"),
        (lambda path: tiny_models.eagle3(path, layers=(-1, 2, 3)), r"reads layers \[-1, 2, 3\]"),
        (lambda path: tiny_models.eagle3(path, n_layers=2), "has 2 layers, but llama.cpp supports only one"),
        (lambda path: tiny_models.eagle3(path, d2t=(3, 9, 512)), r"values outside 0 to 511"),
        (lambda path: tiny_models.eagle3(path, d2t=(-3, 9, 11)), r"values outside 0 to 511"),
        (lambda path: tiny_models.dflash(path, layers=(1, 4)), r"reads layers \[1, 4\]"),
        (lambda path: tiny_models.dflash(path, mask=None), "its mask token is None"),
        (lambda path: tiny_models.dflash(path, mask=512), "its mask token is 512"),
        (lambda path: tiny_models.dflash(path, block=1), "blocks of 1 tokens"),
    ],
)
def test_a_file_that_would_abort_the_process_is_refused(
    files: Files, tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    refused(files.target("eagle3"), make(tmp_path / "draft.gguf"), reason)


def test_another_kind_than_that_of_spec_is_refused(files: Files, tiny_llama: Path, tiny_mamba: Path) -> None:
    target = files.target("eagle3")
    refused(
        target, files.draft("dflash"), "'eagle3', but dflash.gguf is a DFlash draft model; .* 'dflash'", spec="eagle3"
    )
    refused(target, files.draft("eagle3"), "'dflash', but eagle3.gguf is an EAGLE-3 draft model", spec="dflash")
    refused(target, tiny_llama, "'dflash', but tiny-llama.gguf is another kind of model; .* 'draft'", spec="dflash")
    refused(target, files.draft("eagle3"), "'mtp', but eagle3.gguf is an EAGLE-3 draft model; .* 'eagle3'", spec="mtp")
    assistant = files.draft("assistant")
    reason = "'eagle3', but assistant.gguf is a Gemma 4 assistant draft model; .* 'mtp'"
    refused(files.target("assistant"), assistant, reason, spec="eagle3")
    refused(
        tiny_mamba,
        files.draft("eagle3"),
        "'eagle3', but drafts are not possible with a model whose state",
        spec="eagle3",
    )
    with pytest.raises(ConfigError, match=r"spec \(--spec\) is 'eagle3', which requires a draft model"):
        EngineConfig("x", spec="eagle3")


@pytest.mark.parametrize("settings", [{"draft_gpu_layers": 0}, {"rpc": ("127.0.0.1:1",)}], ids=["cpu", "rpc"])
def test_matrices_of_the_model_on_other_devices_are_refused(
    files: Files, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "offloads", lambda backend, n, rpc=(): n != 0)
    with pytest.raises(ModelError, match="which are on different devices"):
        choose_row_draft(files.config("eagle3-shared", **settings))
    assert choose_row_draft(files.config("eagle3", **settings))[0]
    assert choose_row_draft(files.config("eagle3-shared"))[0]


def test_a_function_missing_in_the_library_is_one_line_in_the_log(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.layer_rows.cache_clear()
    lacking = {**library._LAYER_ROWS, "get_rows": ("_Z7renamed", None, ())}
    monkeypatch.setattr(library, "_LAYER_ROWS", lacking)
    config = files.config("eagle3")
    try:
        with pytest.raises(LlamaError, match="does not export _Z7renamed"):
            library.layer_rows()
        with caplog.at_level(logging.INFO), load(config) as engine:
            assert engine.core.runtime.head is None
            assert engine.generate(PROMPTS[:1], greedy(4))[0].tokens
        refused(
            files.target("eagle3"), files.draft("eagle3"), "'eagle3', but .* does not export _Z7renamed", spec="eagle3"
        )
        assert not any(buffer.owner for buffer in estimate_here(config))
    finally:
        library.layer_rows.cache_clear()
    lines = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert lines == ["eagle3.gguf is not used: this build of llama.cpp does not export _Z7renamed"]


def load(config: EngineConfig) -> BatchInferenceEngine:
    return BatchInferenceEngine(config.model_path, draft_model=config.draft_model, **SETTINGS)


def estimate_here(config: EngineConfig) -> list[Any]:
    """As the child process of `estimate_memory`, in this one."""
    from cppbatch.sizing.estimate_child import footprints

    return list(next(iter(footprints([config]))).buffers)


def test_bad_rows_and_drafts_do_not_reach_llama_cpp(files: Files) -> None:
    alone = Alone(files.target("eagle3"), files.draft("eagle3"), 3)
    assert alone.eagle
    with pytest.raises(OutOfRange, match="hidden rows were requested"):
        alone.target.hidden_rows(1)  # before any decode: llama.cpp would abort
    with pytest.raises(OutOfRange, match="192 numbers"):
        alone.eagle.encode(np.zeros((3, 64), np.float32))
    many = np.random.default_rng(0).standard_normal((1200, 192)).astype(np.float32)  # more than n_ubatch
    assert np.allclose(alone.eagle.encode(many)[700:], alone.eagle.encode(many[700:]), atol=1e-5)
    alone.close()
    with pytest.raises(OutOfRange, match="drafts of 6 tokens were requested, but blocks have 6"):
        Alone(files.target("dflash"), files.draft("dflash"), 6)


# --- what is said, and memory -------------------------------------------------------------------------------------


def test_the_first_lines_and_the_metadata_name_the_draft_model(files: Files) -> None:
    facts = inspect_model(files.draft("eagle3"))
    assert facts.drafts_as == "EAGLE-3 draft model, reads layers 1, 2, 3"
    assert inspect_model(files.target("eagle3")).drafts_as is None
    assistant = "Gemma 4 assistant draft model, reads the KV cells of its model"
    assert inspect_model(files.draft("assistant")).drafts_as == assistant
    config = files.config("dflash", spec="dflash")
    line = model_line(config, inspect_model(files.target("dflash")), estimate_memory([config]))
    assert "with dflash.gguf (DFlash draft model, reads layers 1, 2, 3, --spec dflash);" in line


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-shared", "dflash-swa", "assistant"])
def test_the_memory_of_the_draft_model_is_measured_as_predicted(files: Files, kind: str) -> None:
    config = files.config(kind, kv_layout="unified")
    (footprint,) = estimate_memory([config]).footprints
    predicted = {(b.owner, b.kind): b.n_bytes for b in footprint.buffers if b.kind in ("cells", "compute")}
    own = {"weights", "compute", "hidden"} | ({"cells"} if kind != "assistant" else set())
    assert {b.kind for b in footprint.buffers if b.owner} >= own
    with Backend.get().lines() as lines:
        load_runtime(config).close()
    measured = {(b.owner, b.kind): b.n_bytes for b in read_engine_buffers(lines)}
    assert {owner for owner, _ in predicted} == {"", "draft model"}
    for key, n_bytes in predicted.items():
        assert measured[key] == pytest.approx(n_bytes, rel=0.05), key
    rows = {row["what"] for row in memory_report(config).rows}
    assert {"draft model: compute buffers", "draft model: hidden rows"} <= rows
    assert ("draft model: KV cells" in rows) == ("cells" in own)
