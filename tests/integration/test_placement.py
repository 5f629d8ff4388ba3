"""A model larger than its device: parts of it stay on the CPU, as llama-server's flags say or as chosen, and the texts
stay the same. The device is an RPC worker of this machine, which llama.cpp treats as a GPU."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, MediaPrompt, SamplingParams
from cppbatch.config import CHOICES, CPU_PARTS, EngineConfig, LoadMode
from cppbatch.errors import ConfigError, DoesNotFit, ModelError
from cppbatch.llama import Backend
from cppbatch.models.kernels import DeviceTimes
from cppbatch.models.synthetic import LlamaShape
from cppbatch.sizing import placement
from cppbatch.sizing.buffers import Buffer, read_buffers
from cppbatch.sizing.demand import HOST, memory_demands
from cppbatch.sizing.device_times import CPU
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate, estimate_memory
from cppbatch.sizing.memory_check import check_planned, first_ample
from cppbatch.sizing.sizes import LoadedSizes, candidates_for, first_beside
from tests.support import tiny_models, tiny_projectors
from tests.support.media_files import image
from tests.support.native_engines import PROMPTS
from tests.support.rpc_workers import RpcWorker

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SIZES: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 1, "spec": "off", "kv_layout": "unified"}
N_LAYERS = 4
AMPLE = 1 << 40  # bytes


@pytest.fixture(scope="module")
def cards() -> Iterator[tuple[RpcWorker, RpcWorker]]:
    with RpcWorker(memory=AMPLE) as one, RpcWorker(memory=AMPLE) as two:
        yield one, two


@pytest.fixture(scope="module")
def endpoints(cards: tuple[RpcWorker, RpcWorker]) -> tuple[str, str]:
    return cards[0].endpoint, cards[1].endpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("placement")
    return {
        "experts": tiny_models.experts(folder / "experts.gguf", n_layers=N_LAYERS),
        "dense": tiny_models.echo(folder / "dense.gguf", n_layers=N_LAYERS),
        "hybrid": tiny_models.two_dimensional_hybrid(folder / "hybrid.gguf", n_layers=N_LAYERS),
        "window": tiny_models.sliding_window(folder / "window.gguf", n_layers=N_LAYERS),
        "wide heads": tiny_models.llama(folder / "wide.gguf", shape=LlamaShape(n_head=2, n_head_kv=1)),
    }


def texts(model: Path, **settings: Any) -> list[str]:
    with BatchInferenceEngine(model, **SIZES, **settings) as engine:
        return [each.text for each in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[str]]:
    """The texts of the CPU."""
    return {kind: texts(path, n_gpu_layers=0) for kind, path in models.items()}


def bytes_by_place(model: Path, kind: str, **settings: Any) -> dict[str, int]:
    """The estimated bytes of buffers of this kind by the kind of their device."""
    (footprint,) = estimate_memory([EngineConfig(str(model), **SIZES, **settings)]).footprints
    assert footprint.error is None
    found = {"device": 0, "host": 0}
    for buffer in footprint.buffers:
        if buffer.kind == kind:
            found["device" if buffer.buffer_type.startswith("RPC") else "host"] += buffer.n_bytes
    return found


PLACEMENTS: dict[str, dict[str, Any]] = {
    "experts": {"cpu_moe": True},
    "experts of layers": {"n_cpu_moe": 2},
    "one tensor": {"override_tensor": (r"blk\.1\.ffn_down=CPU", "output=CPU")},
    "layers": {"n_gpu_layers": 2},
    "layers and experts": {"n_gpu_layers": 3, "n_cpu_moe": 2},
    "cells": {"kv_offload": False},
    "no large batches": {"cpu_moe": True, "op_offload": False},
}


@pytest.mark.parametrize("settings", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_texts_are_those_of_the_cpu_wherever_parts_of_the_model_are(
    settings: dict[str, Any], models: dict[str, Path], expected: dict[str, list[str]], endpoints: tuple[str, str]
) -> None:
    assert texts(models["experts"], rpc=endpoints[:1], **settings) == expected["experts"]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "window"])
def test_texts_of_every_kind_of_memory_are_those_of_the_cpu(
    kind: str, models: dict[str, Path], expected: dict[str, list[str]], endpoints: tuple[str, str]
) -> None:
    given: dict[str, Any] = {"rpc": endpoints, "tensor_split": (1.0, 3.0), "n_gpu_layers": 3, "n_cpu_ffn": 3}
    assert texts(models[kind], **given, kv_offload=False) == expected[kind]


def test_images_are_encoded_on_the_device_that_is_named(tmp_path: Path, endpoints: tuple[str, str]) -> None:
    projector, rpc = str(tiny_projectors.vision(tmp_path / "vision.gguf")), endpoints[:1]
    model = tiny_models.llama(tmp_path / "llama.gguf")
    prompts = [MediaPrompt(["What is it? ", image(seed), " the end"]) for seed in range(2)]

    def answers(**settings: Any) -> list[str]:
        with BatchInferenceEngine(model, mmproj=projector, flash_attn="off", **SIZES, **settings) as engine:
            return [each.text for each in engine.generate(prompts, GREEDY)]

    expected = answers(n_gpu_layers=0)
    places: list[dict[str, Any]] = [
        {"mmproj_device": "RPC0"}, {"mmproj_device": "RPC0", "n_gpu_layers": 1}, {"mmproj_device": "none"},
    ]  # fmt: skip
    for place in places:
        assert answers(rpc=rpc, **place) == expected
        on = bytes_by_place(model, "projector", rpc=rpc, mmproj=projector, **place)
        assert [name for name, n in on.items() if n] == ["device" if place["mmproj_device"] == "RPC0" else "host"]
    with pytest.raises(ModelError, match=r"mmproj_device \(-mmdev\) names the device 'CUDA7'; available: RPC0 \("):
        answers(rpc=rpc, mmproj_device="CUDA7")


def test_the_estimate_knows_where_the_parts_are(models: dict[str, Path], endpoints: tuple[str, str]) -> None:
    rpc = endpoints[:1]
    weights = {
        n: bytes_by_place(models["experts"], "weights", rpc=rpc, n_cpu_moe=n)["device"] for n in range(N_LAYERS + 1)
    }
    per_layer = weights[0] - weights[1]
    assert per_layer > 0
    assert [weights[n] - weights[n + 1] for n in range(N_LAYERS)] == [per_layer] * N_LAYERS
    assert bytes_by_place(models["experts"], "weights", rpc=rpc, cpu_moe=True)["device"] == weights[N_LAYERS]
    dense = [bytes_by_place(models["dense"], "weights", rpc=rpc, n_cpu_ffn=n)["device"] for n in (0, 1, N_LAYERS)]
    assert dense[0] > dense[1] > dense[2] > 0
    assert bytes_by_place(models["dense"], "cells", rpc=rpc, kv_offload=False)["device"] == 0
    assert bytes_by_place(models["dense"], "cells", rpc=rpc)["host"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"n_gpu_layers": 1, "n_batch": 64},  # logits, and top-k of them
        {"kv_offload": False, "flash_attn": "off", "n_ctx": 8192},
        {"kv_offload": False, "flash_attn": "off", "n_ctx": 8192, "n_gpu_layers": 2},
    ],
    ids=["top-k on the device", "attention on the host", "layers and attention on the host"],
)
def test_the_device_and_the_host_reserve_what_was_estimated(
    settings: dict[str, Any], models: dict[str, Path], endpoints: tuple[str, str]
) -> None:
    config = EngineConfig(str(models["dense"]), rpc=endpoints[:1], **{**SIZES, **settings})
    estimated = computed_by_place(estimate_memory([config]).footprints[0].buffers)
    with Backend.get().lines() as lines, BatchInferenceEngine(config):
        pass
    real = computed_by_place(read_buffers(lines))
    for place in ("device", "host"):
        assert estimated[place] == pytest.approx(real[place], rel=0.1, abs=30_000)  # the log rounds to 0.01 MiB


def computed_by_place(buffers: list[Buffer]) -> Counter[str]:
    """The bytes of compute buffers on the device and on the host."""
    found: Counter[str] = Counter()
    for each in buffers:
        if each.kind == "compute":
            found["device" if each.buffer_type.startswith("RPC") else "host"] += each.n_bytes
    return found


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are ten times as fast as the CPU."""

    def fixed(config: EngineConfig, devices: Sequence[Device], *_: object, **__: object) -> dict[str, DeviceTimes]:
        cpu, device = (
            DeviceTimes({"F32": {1: 0.1, 16: 1.0}}, 0, 0),
            DeviceTimes({"F32": {1: 0.01, 16: 0.1}}, 0.001, 0.1),
        )
        return {CPU: cpu, **dict.fromkeys((each.name for each in devices), device)}

    monkeypatch.setattr(placement, "device_times", fixed)


@pytest.fixture
def limit_devices(cards: tuple[RpcWorker, RpcWorker]) -> Iterator[Callable[..., None]]:
    """Gives the devices this memory, in bytes; more than that they refuse."""

    def limit(*memory: int) -> None:
        for card, n_bytes in zip(cards, memory, strict=False):
            card.set_memory(n_bytes)

    yield limit
    limit(AMPLE, AMPLE)


def on_devices(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """The bytes that each device must hold, and its free bytes."""
    return [(each.firm, each.free) for each in memory_demands(estimate, 1 << 40) if each.where != HOST]


@pytest.mark.parametrize(("kind", "share"), [("experts", 0.1), ("experts", 0.7), ("dense", 0.7), ("dense", 1.2)])
def test_a_model_that_does_not_fit_on_its_device_is_placed_and_gives_the_same_texts(
    kind: str,
    share: float,
    *,
    models: dict[str, Path],
    expected: dict[str, list[str]],
    endpoints: tuple[str, str],
    limit_devices: Callable[..., None],
) -> None:
    config = EngineConfig(str(models[kind]), rpc=endpoints[:1], **SIZES)
    ((whole, _),) = on_devices(estimate_memory([config]))
    limit_devices(int(whole * share))
    planned = first_ample([config])
    check_planned(planned)  # raises for settings that do not fit
    assert planned.estimate
    assert all(firm <= free for firm, free in on_devices(planned.estimate))
    assert planned.config.is_placed == (share < 1)
    settings = {name: getattr(planned.config, name) for name in ("n_gpu_layers", "n_cpu_moe", "n_cpu_ffn")}
    assert texts(models[kind], rpc=endpoints[:1], **settings) == expected[kind]


def test_more_memory_holds_more_of_the_model(
    models: dict[str, Path], endpoints: tuple[str, str], limit_devices: Callable[..., None]
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints[:1], **SIZES)
    ((whole, _),) = on_devices(estimate_memory([config]))
    held = []
    for share in (0.5, 0.8, 1.2):
        limit_devices(int(whole * share))
        estimate = first_ample([config]).estimate
        assert estimate
        held += [firm for firm, _ in on_devices(estimate)]
    assert held == sorted(held)
    assert held[-1] == whole
    assert held[0] > 0


def test_two_unequal_devices_each_hold_what_fits(
    models: dict[str, Path],
    expected: dict[str, list[str]],
    endpoints: tuple[str, str],
    limit_devices: Callable[..., None],
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints, tensor_split=(1.0, 3.0), **SIZES)
    needs = [firm for firm, _ in on_devices(estimate_memory([config]))]
    limit_devices(*(int(n * 0.8) for n in needs))
    planned = first_ample([config])
    check_planned(planned)
    assert planned.estimate
    assert all(firm <= free for firm, free in on_devices(planned.estimate))
    settings = {name: getattr(planned.config, name) for name in ("override_tensor", "n_cpu_moe", "n_gpu_layers")}
    placed = texts(models["experts"], rpc=endpoints, tensor_split=(1.0, 3.0), **settings)
    assert placed == expected["experts"]


def test_a_model_of_several_is_placed_where_unloading_others_would_not_help(
    models: dict[str, Path], endpoints: tuple[str, str], limit_devices: Callable[..., None]
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints[:1], **SIZES)
    limit_devices(1 << 20)
    loaded = first_beside([config], [], [], engines=lambda each: [each])
    assert loaded.config.is_placed
    other = LoadedSizes(config, None)
    with pytest.raises(DoesNotFit) as refused:  # so that the other one is unloaded
        first_beside([config], [other], [], engines=lambda each: [each])
    assert not refused.value.never


@pytest.mark.parametrize("given", [{"n_gpu_layers": -2}, {"n_cpu_moe": 1}, {"override_tensor": ("output=CPU",)}])
def test_a_given_placement_is_not_changed(
    given: dict[str, Any], models: dict[str, Path], endpoints: tuple[str, str], limit_devices: Callable[..., None]
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints[:1], **SIZES, **given)
    limit_devices(1 << 16)
    planned = first_ample([config])
    assert planned.config == config
    with pytest.raises(ConfigError, match=r"but only 0\.1 MiB are free"):
        check_planned(planned)


def test_without_fit_nothing_is_chosen(
    models: dict[str, Path], endpoints: tuple[str, str], limit_devices: Callable[..., None]
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints[:1], fit_params=False, n_threads=1)
    limit_devices(1 << 16)
    candidates = candidates_for(config, set())
    planned = first_ample(candidates)
    assert candidates == [planned.config]
    assert not any(getattr(planned.config, name) for name in ("override_tensor", *CPU_PARTS))
    with pytest.raises(ConfigError, match="MiB are free"):
        check_planned(planned)


def test_fit_target_leaves_that_much_of_the_device_free(
    models: dict[str, Path], endpoints: tuple[str, str], limit_devices: Callable[..., None]
) -> None:
    config = EngineConfig(str(models["experts"]), rpc=endpoints[:1], **SIZES)
    ((whole, _),) = on_devices(estimate_memory([config]))
    limit_devices(whole + (1 << 20))
    held = []
    for mib in (1, 2):
        estimate = first_ample([replace(config, fit_target=(mib,))]).estimate
        assert estimate
        held += [firm for firm, _ in on_devices(estimate)]
    assert held[0] == whole
    assert held[1] <= whole - (1 << 20)


def test_devices_are_listed_as_llama_server_does(endpoints: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "cppbatch", "serve", "--list-devices"]
    given = {"--rpc": [*command, "--rpc", ",".join(endpoints)], "": command}
    listed = {
        name: subprocess.run(each, capture_output=True, text=True, check=True).stdout for name, each in given.items()
    }
    names = "".join(rf"  RPC{i}: {each} \(\d+ MiB, \d+ MiB free\)\n" for i, each in enumerate(endpoints))
    assert re.fullmatch(f"Available devices:\n{names}", listed["--rpc"])
    assert listed[""] == "Available devices:\n  (none)\n"


# --- loading and cells ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CHOICES["load_mode"])
def test_weights_are_the_same_however_they_are_read(
    mode: Any, models: dict[str, Path], expected: dict[str, list[str]]
) -> None:
    assert texts(models["dense"], load_mode=mode) == expected["dense"]


@pytest.mark.parametrize("mode", CHOICES["lazy_mode"])
def test_texts_are_the_same_whichever_tensors_are_read_when_needed(
    mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_models.gemma4(tmp_path / "per_layer.gguf", n_per_layer=16)
    with caplog.at_level(logging.DEBUG, "cppbatch.llama"):
        found = texts(model, lazy_mode=mode)
    is_lazy = "per_layer_token_embd.weight (size = 0 MiB) lazy read enabled" in caplog.text
    assert is_lazy == (mode == "on")
    assert found == texts(model, load_mode="none", lazy_mode="off")


@pytest.mark.parametrize("numa", CHOICES["numa"])
def test_texts_do_not_depend_on_where_threads_run(numa: str, models: dict[str, Path], expected: Any) -> None:
    program = (
        "import sys, json; from cppbatch import BatchInferenceEngine, SamplingParams\n"
        "model, prompts, settings = json.loads(sys.argv[1])\n"
        "with BatchInferenceEngine(model, **settings) as engine:\n"
        "    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)\n"
        "    print(json.dumps([each.text for each in engine.generate(prompts, greedy)]))\n"
    )
    given = json.dumps([str(models["dense"]), PROMPTS, {**SIZES, "n_threads": 2, "numa": numa}])
    done = subprocess.run([sys.executable, "-c", program, given], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == expected["dense"]


def without_process(footprint: Footprint) -> Footprint:
    """The process grows between two estimates."""
    return replace(footprint, buffers=[each for each in footprint.buffers if each.kind != "process"])


def test_copied_weights_count_as_memory_that_must_be_free(models: dict[str, Path]) -> None:
    modes: tuple[LoadMode, ...] = ("mmap", "none")
    answer = estimate_memory([EngineConfig(str(models["dense"]), load_mode=mode, **SIZES) for mode in modes])
    mapped, copied = (
        memory_demands(MemoryEstimate([without_process(each)], answer.devices), 1 << 40)[0]
        for each in answer.footprints
    )
    assert mapped.mapped > 0
    assert copied.mapped == 0
    assert copied.firm >= mapped.firm + mapped.mapped // 2  # mapped ranges include what is between tensors


@pytest.mark.parametrize("kind", CHOICES["cache_type_k"])
def test_every_type_of_cells_gives_texts_that_start_as_those_of_floats(
    kind: Any, models: dict[str, Path], expected: dict[str, list[str]]
) -> None:
    given = {"cache_type_k": kind, "cache_type_v": kind, "flash_attn": "on"}
    starts = [[text[:1] for text in each] for each in (texts(models["wide heads"], **given), expected["wide heads"])]
    assert sum(map(str.__eq__, *starts)) >= len(PROMPTS) // 2


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_unknown_devices_are_named_with_those_that_exist(models: dict[str, Path]) -> None:
    wrong: list[dict[str, Any]] = [{"device_names": ("CUDA7",)}, {"override_tensor": ("exps=CUDA7",)}]
    for given in wrong:
        with pytest.raises(ModelError, match=r"names the device 'CUDA7'; available: none"):
            BatchInferenceEngine(models["experts"], **SIZES, **given)


@pytest.mark.parametrize("given", ["exps", "=CPU", "exps=", "(=CPU"])
def test_a_pattern_that_cannot_be_used_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="override_tensor"):
        EngineConfig("m.gguf", override_tensor=(given,))
