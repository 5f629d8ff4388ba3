"""What a start avoids: importing unused modules, and repeating measurements that are cached."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cppbatch import EngineConfig, SamplingParams, findings
from cppbatch.cluster.worker import process
from cppbatch.config import Sharing
from cppbatch.llama import Context, Model, find_prefix_sharing, probes, vocab
from cppbatch.sizing import estimate
from tests.support.native_engines import OpenEngine

GREEDY = SamplingParams(temperature=0, max_tokens=16)
HEAVY = {"gguf", "yaml", "llguidance", "aiohttp", "rich", "prometheus_client"}
NATIVE = {"numpy", "llama_cpp", "jinja2"}
SERVE = """
import cppbatch.cli.serve_command, cppbatch.cli.plan_start, cppbatch.cluster.deployment
import cppbatch.server.settings, cppbatch.server.http.limits, cppbatch.server.http.hosts, cppbatch.server.settings
"""
"""What `cppbatch serve` imports before its worker starts."""
IMPORTS: dict[str, set[str]] = {
    "import cppbatch": HEAVY | NATIVE | {"asyncio", "click", "msgspec", "psutil", "typing", "zmq"},
    "from cppbatch import Llama": HEAVY | {"asyncio", "click", "zmq"},
    "import cppbatch.cluster.worker.main": HEAVY | {"asyncio", "click"},
    SERVE: HEAVY | NATIVE | {"zmq"},
}


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Path:
    """An empty folder for cached measurements."""
    return empty_cache


@pytest.mark.parametrize("program", IMPORTS)
def test_a_process_imports_no_large_module_that_it_has_no_use_for(program: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not IMPORTS[program] & set(printed.stdout.split())


async def test_a_worker_that_was_started_early_is_the_first_that_is_used() -> None:
    process.start_early()
    started = process._early[0]
    early, later = process.worker_process(), process.worker_process()
    process.start_early()
    unused = process._early[0]
    process.end_early()
    try:
        assert started is early is not later
        assert await asyncio.wait_for(unused.wait(), 60) == -signal.SIGKILL
    finally:
        for each in (early, later):
            each.set_up(b"{}")  # not a setup
            assert await asyncio.wait_for(each.wait(), 60) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[EngineConfig]]:
    """The settings that each child process was asked about."""
    questions: list[list[EngineConfig]] = []
    ask = estimate._ask

    def record(configs: list[EngineConfig]) -> estimate.MemoryEstimate:
        questions.append(configs)
        return ask(configs)

    monkeypatch.setattr(estimate, "_ask", record)
    return questions


def test_llama_cpp_is_queried_once_for_the_memory_of_an_engine(
    asked: list[list[EngineConfig]], tiny_llama: Path
) -> None:
    config = EngineConfig(model_path=str(tiny_llama), n_ctx=512)
    first = estimate.estimate_memory([config])
    assert estimate.estimate_memory([config]) == first
    assert len(asked) == 1


def test_a_footprint_is_of_these_kernel_times_which_decide_whether_weights_are_repacked(
    asked: list[list[EngineConfig]], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = tmp_path / "times.json"
    monkeypatch.setattr(estimate, "times_path", lambda: times)
    config = EngineConfig(model_path=str(tiny_llama), n_ctx=768)
    estimate.estimate_memory([config])
    times.write_text("{}")
    estimate.estimate_memory([config])
    assert len(asked) == 2


def test_a_footprint_is_of_these_settings_this_file_and_this_library(
    asked: list[list[EngineConfig]], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_llama.read_bytes())
    config = EngineConfig(model_path=str(model), n_ctx=512)
    estimate.estimate_memory([config])
    estimate.estimate_memory([replace(config, n_ctx=1024)])
    assert len(asked) == 2
    before = model.stat()
    model.write_bytes(tiny_llama.read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archive or rsync does
    estimate.estimate_memory([config])
    assert len(asked) == 3
    monkeypatch.setenv("GGML_SOMETHING", "1")
    estimate.estimate_memory([config])
    assert len(asked) == 4
    monkeypatch.setattr(findings, "_cpu", lambda: "another CPU")
    estimate.estimate_memory([config])
    assert len(asked) == 5


def test_a_failed_estimate_and_one_for_a_gpu_are_computed_again(
    asked: list[list[EngineConfig]], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_llama.read_bytes()[:-1000])
    for _ in range(2):
        assert estimate.estimate_memory([EngineConfig(model_path=str(damaged))]).footprints[0].error
    assert len(asked) == 2
    monkeypatch.setattr(estimate, "computes_on_cpu_only", lambda folder: False)
    for _ in range(2):
        estimate.estimate_memory([EngineConfig(model_path=str(tiny_llama), n_ctx=512)])
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("files", "is_cpu_only"),
    [
        (["libllama.so", "libggml.so", "libggml-base.so.0", "libggml-cpu-zen4.so", "libggml-rpc.so"], True),
        (["libllama.so", "libggml-base.so", "libggml-cpu.so", "libggml-cuda.so"], False),
        (["libggml-base.dylib", "libggml-cpu.dylib", "libggml-blas.dylib", "libggml-metal.dylib"], False),
        (["llama.dll", "ggml-base.dll", "ggml-cpu.dll", "ggml-vulkan.dll"], False),
        (["libllama.so"], False),
    ],
)
def test_a_build_for_gpus_is_detected_by_its_libraries(files: list[str], is_cpu_only: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert findings.computes_on_cpu_only(tmp_path) == is_cpu_only


def test_sharing_that_works_is_probed_once_for_each_setting(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[bool] = []
    probe = probes.probe_prefix_sharing

    def record(context: Context) -> Sharing:
        probed.append(context.kv_unified)
        return probe(context)

    monkeypatch.setattr(probes, "probe_prefix_sharing", record)
    with Model(tiny_llama) as model:
        for unified, expected in ((True, "cells"), (True, "cells"), (False, "copy"), (False, "copy")):
            context = Context(model, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=unified)
            assert find_prefix_sharing(context, "setting") == expected
            context.close()
    assert probed == [True, False]


def test_sharing_that_does_not_work_is_probed_each_time(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Sharing] = ["whole", "none", "cells"]
    monkeypatch.setattr(probes, "probe_prefix_sharing", lambda context: answers.pop(0))
    with Model(tiny_llama) as model:
        context = Context(model, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=True)
        assert [find_prefix_sharing(context) for _ in range(4)] == ["whole", "none", "cells", "cells"]


def test_a_vocabulary_is_the_same_when_it_is_read_from_the_cache(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(vocab, "_MANY_TOKENS", 1)
    asked: list[int] = []
    ask = vocab._ask_tokens

    def record(handle: Any, n_tokens: int) -> Any:
        asked.append(n_tokens)
        return ask(handle, n_tokens)

    monkeypatch.setattr(vocab, "_ask_tokens", record)
    seen = []
    for _ in range(2):
        with Model(tiny_llama) as model:
            one = model.vocab
            special = "<s>a</s> b"
            seen.append((one.eog, one.longest_piece, one.markers.tolist(), one.tokenize(special * 900).tolist()))
    assert seen[0] == seen[1]
    assert len(asked) == 1


def test_text_after_a_second_start_is_the_text_after_the_first(tiny_llama: Path, open_engine: OpenEngine) -> None:
    first, second = (open_engine(tiny_llama, n_ctx=512).generate(["a b", "a b c"], GREEDY) for _ in range(2))
    assert [each.tokens for each in first] == [each.tokens for each in second]


def test_of_each_kind_the_oldest_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MOST_FILES", 3)
    paths = [findings.finding_path("kind", str(i)) for i in range(5)]
    for i, path in enumerate(paths):
        findings.write_finding(path, i)
        os.utime(path, (i, i))
    findings.write_finding(paths[0], 0)
    assert [findings.read_finding(path, int) for path in paths] == [0, None, None, 3, 4]
