"""--sampling backend: sampling on the device gives the same texts as complete rows. The CPU is a device too."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.child_processes import child_command
from cppbatch.config import KvLayout
from cppbatch.errors import LlamaError, ModelError
from cppbatch.llama import Backend, Batch, Context, Model, probes, selfcheck
from cppbatch.llama.library import C
from cppbatch.llama.selfcheck import Failure
from tests.unit.test_device_sampling import FROM_ALL_LOGITS, FROM_CANDIDATES

PROMPTS = ["The capital of France is", "Once upon a time", "def f(x):", "1, 2, 3,"] * 4

MIXED = [SamplingParams(max_tokens=12, seed=i, **kind) for i, kind in enumerate(FROM_CANDIDATES + FROM_ALL_LOGITS)]


def texts(
    model: Path, layout: KvLayout, sampling: Literal["host", "backend"], params: list[SamplingParams], **settings: Any
) -> list[Completion]:
    settings = {"n_ctx": 2048, "n_parallel": 8, "n_threads": 1, **settings}
    with BatchInferenceEngine(
        model, kv_layout=layout, sampling=sampling, flash_attn="off", prefix_cache=False, **settings
    ) as engine:
        assert engine.info.sampling == sampling
        return engine.generate(PROMPTS[: len(params)], params)


@pytest.fixture
def context(make_context: Callable[..., Context]) -> Context:
    return make_context(n_seq_max=4)


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_backend_and_host_give_the_same_texts_whatever_the_requests_ask_for(tiny_llama: Path, layout: KvLayout) -> None:
    host = texts(tiny_llama, layout, "host", MIXED)
    backend = texts(tiny_llama, layout, "backend", MIXED)
    for ours, theirs, params in zip(backend, host, MIXED, strict=True):
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason), params


def test_backend_and_host_agree_when_sequences_are_preempted(tiny_llama: Path) -> None:
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True, top_k=10 if i % 2 else 0) for i in range(8)]
    ample = texts(tiny_llama, "unified", "host", params)
    tight = texts(tiny_llama, "unified", "backend", params, n_ctx=256, n_batch=64)
    assert [result.tokens for result in tight] == [result.tokens for result in ample]


def test_a_seq_id_may_go_from_candidates_to_whole_rows_and_back_as_often_as_requests_want(tiny_llama: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"top_k": 0}] * 8
    params = [SamplingParams(max_tokens=3, seed=i, **kind) for i, kind in enumerate(kinds)]
    with BatchInferenceEngine(tiny_llama, n_ctx=256, n_parallel=1, n_threads=1, sampling="backend") as engine:
        assert all(len(engine.generate(["Hello"], its)[0].tokens) == 3 for its in params)


def test_a_device_that_cannot_sample_leaves_it_to_the_host(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "llama_set_sampler", lambda *_: False)
    with Model(tiny_llama) as model, Context(model, n_ctx=256, n_threads=1) as context:
        assert not context.enable_backend_sampling()
        assert context.backend_sampling is None


def test_prompts_are_scored_where_the_device_samples(tiny_llama: Path) -> None:
    params = [SamplingParams(max_tokens=4, temperature=0, echo=True, logprobs=1), SamplingParams(max_tokens=4)] * 2
    host, backend = (texts(tiny_llama, "unified", where, params) for where in ("host", "backend"))
    assert host[0].logprobs == backend[0].logprobs
    assert len(backend[0].logprobs) == backend[0].usage.prompt_tokens + 4


def test_the_device_finds_the_most_likely_tokens_and_whole_rows_remain_for_requests_that_need_them(
    llama_model: Model, context: Context
) -> None:
    assert context.enable_backend_sampling(16)
    backend = context.backend_sampling
    assert backend
    backend.set_enabled(2, False)
    batch = Batch(64)
    for seq_id in range(4):
        batch.add_run(np.arange(10, 20 + seq_id, dtype=np.int32), 0, seq_id, n_logits=1)
    context.decode(batch)
    ids, values = backend.candidates([0, 1, 3], 4)
    rows = context.logits(4)
    assert np.isfinite(rows[2]).all()
    again = Batch(64)
    for seq_id in range(4):
        backend.set_enabled(seq_id, False)
        context.remove(seq_id)
        again.add_run(np.arange(10, 20 + seq_id, dtype=np.int32), 0, seq_id, n_logits=1)
    context.decode(again)
    whole = context.logits(4)
    for i, row in enumerate(whole[[0, 1, 3]]):
        assert sorted(ids[i].tolist()) == sorted(np.argsort(-row, kind="stable")[:16].tolist())
        assert np.allclose(values[i], row[ids[i]], atol=1e-4)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
def test_the_device_finds_the_most_likely_tokens_of_a_model_with_a_window_in_batches_of_several_ubatches(
    tiny_swa: Path, unified: bool
) -> None:
    sizes: dict[str, Any] = {
        "n_ctx": 4096, "n_batch": 256, "n_ubatch": 64, "n_seq_max": 8, "n_threads": 1, "kv_unified": unified,
        "flash_attn": "off", "type_k": "f32", "type_v": "f32",
    }  # fmt: skip
    random, length, n_parts = np.random.default_rng(1), [0] * 8, 0
    with Model(tiny_swa) as model, Context(model, **sizes) as host, Context(model, **sizes) as device:
        assert device.enable_backend_sampling(16)
        backend = device.backend_sampling
        assert backend
        for _ in range(60):
            batches = Batch(256), Batch(256)
            for seq_id in random.permutation(8)[: random.integers(1, 8)].tolist():
                tokens = random.integers(1, 100, 1 if random.random() < 0.6 else random.integers(2, 30))
                for batch in batches:
                    batch.add_run(tokens.astype(np.int32), length[seq_id], seq_id, n_logits=1)
                length[seq_id] += len(tokens)
            host.decode(batches[0])
            device.decode(batches[1])
            n = batches[0].n_outputs
            ids, values = backend.candidates(list(range(n)), n)
            n_parts = max(n_parts, len(backend.kept))
            likely = np.take_along_axis(ids, values.argmax(axis=1)[:, None], axis=1)[:, 0]
            assert likely.tolist() == host.logits(n).argmax(axis=1).tolist()
    assert n_parts > 1


def test_the_host_samples_from_a_model_with_recurrent_states_whose_candidates_llama_cpp_mixes_up(
    tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "offloads", lambda *settings: True)
    monkeypatch.setattr("cppbatch.engine.runtime._MAX_HOST_TOKENS", 100)
    with BatchInferenceEngine(tiny_hybrid, n_ctx=512, n_threads=1) as engine:
        assert engine.info.sampling == "host"
    with pytest.raises(ModelError, match=r"sampling \(--sampling\) is 'backend', but .*; use 'host'"):
        BatchInferenceEngine(tiny_hybrid, n_ctx=512, n_threads=1, sampling="backend")


@pytest.mark.parametrize(
    ("settings", "sampling", "drafts"),
    [
        ({}, "backend", False),
        ({"spec": "suffix"}, "host", True),
        ({"spec": "suffix", "sampling": "backend"}, "backend", False),
        ({"sampling": "host"}, "host", False),
        ({"spec": "off"}, "backend", False),
    ],
)
def test_a_gpu_samples_unless_drafts_are_requested(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sampling: str, drafts: bool
) -> None:
    monkeypatch.setattr(Backend, "offloads", lambda *settings: True)
    monkeypatch.setattr("cppbatch.engine.runtime._MAX_HOST_TOKENS", 100)
    with BatchInferenceEngine(tiny_llama, n_ctx=2048, n_parallel=4, n_threads=1, **settings) as engine:
        assert engine.info.sampling == sampling
        assert bool(engine.core.runtime.proposers) == drafts
        assert len(engine.generate(["Hello there " * 3] * 4, SamplingParams(max_tokens=12))) == 4


def test_a_driver_that_crashes_when_it_samples_costs_a_child_process_once(
    tiny_llama: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[list[str]] = []

    def crash(command: list[str], _timeout_s: float | None) -> Failure:
        tried.append(command[3:])
        return Failure("killed by SIGABRT", crashed=True)

    monkeypatch.setattr("cppbatch.engine.runtime.find_sampling_crash", probes.find_sampling_crash)
    monkeypatch.setattr(Backend, "offloads", lambda *settings: True)
    monkeypatch.setattr("cppbatch.engine.runtime._MAX_HOST_TOKENS", 100)
    monkeypatch.setattr(selfcheck, "run_child", crash)
    settings: dict[str, Any] = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1}
    for _ in range(2):
        with BatchInferenceEngine(tiny_llama, **settings) as engine:
            assert engine.info.sampling == "host"
            assert len(engine.generate(["Hello"], SamplingParams(max_tokens=4))[0].tokens) == 4
    assert tried == [["cppbatch.llama.sampling_child", "512", ""]]
    reason = "the CPU samples: llama.cpp crashed in a trial of sampling on the GPU (killed by SIGABRT)"
    assert caplog.messages == [f"{reason}. sampling (--sampling) backend tries it again"] * 2
    with pytest.raises(LlamaError, match=r"'backend', but llama\.cpp crashes when it samples .*SIGABRT.*use 'host'"):
        BatchInferenceEngine(tiny_llama, sampling="backend", **settings)


def test_the_trial_of_sampling_passes_on_a_device_that_samples() -> None:
    subprocess.run(child_command("cppbatch.llama.sampling_child", "40000", ""), check=True, timeout=60)


def test_a_gpu_leaves_short_rows_of_logits_to_the_host(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "offloads", lambda *settings: True)
    with BatchInferenceEngine(tiny_llama, n_ctx=512, n_threads=1) as engine:
        assert engine.info.sampling == "host"


def test_on_a_gpu_equal_prompts_in_streams_are_computed_once_and_copied_there(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["one for all and " * 6 + str(i) for i in range(4)]

    def results(on_gpu: bool) -> list[Completion]:
        monkeypatch.setattr(Backend, "offloads", lambda *settings: on_gpu)
        with BatchInferenceEngine(
            tiny_llama, n_ctx=2048, n_parallel=4, n_threads=1, kv_layout="per-sequence", flash_attn="off", spec="off",
            sampling="host", cache_type_k="f32", cache_type_v="f32",
        ) as engine:  # fmt: skip
            if on_gpu:
                monkeypatch.setattr(engine.core.runtime.context, "save_sequence", lambda seq_id: pytest.fail("saved"))
            return engine.generate(prompts, params)

    ours, theirs = results(True), results(False)
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
    assert [r.usage.cached_tokens for r in ours] == [r.usage.cached_tokens for r in theirs]
    assert sum(r.usage.cached_tokens > 0 for r in ours) == 3
