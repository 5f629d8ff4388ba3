"""The placement of a model that its devices cannot hold, by what steps cost, with made-up devices and times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from cppbatch.config import EngineConfig, Preference
from cppbatch.models.kernels import DeviceTimes
from cppbatch.models.synthetic import LlamaShape, byte_vocab, write_llama
from cppbatch.sizing import placement, placement_search
from cppbatch.sizing.buffers import Buffer
from cppbatch.sizing.device_times import CPU
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.placement import Placed, describe_placements, placements, ranked, scores
from cppbatch.sizing.placement_search import Speeds
from tests.support import tiny_models

GIB, MIB = 2**30, 2**20
SHAPE = LlamaShape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336)
PER_TOKEN = 2 * 32 * 8 * 128 * 2  # bytes of a cell, in all layers
COMPUTE = 300 * MIB
SIZES = [(16, 16384), (8, 8192), (4, 4096), (2, 4096), (1, 4096)]

SLOW_CPU = DeviceTimes({"Q4_0": {1: 0.02, 16: 0.16, 512: 5.0}}, 0, 0)  # 30 GB/s, and four cores
CARD = DeviceTimes({"Q4_0": {1: 0.002, 16: 0.0024, 512: 0.03}}, 0.03, 0.05)  # 280 GB/s; copies at 20 GB/s
OLD_CARD = DeviceTimes({"Q4_0": {1: 0.008, 16: 0.01, 512: 0.2}}, 0.03, 0.1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of an 8B in Q4_0: 3.7 GiB of weights."""
    path = tmp_path_factory.mktemp("placement") / "8B.gguf"
    return write_llama(path, SHAPE, quant="Q4_0", vocab=byte_vocab(8192), is_hollow=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.experts(tmp_path_factory.mktemp("placement") / "experts.gguf", n_layers=8, n_experts=64)


def gpu(name: str, free: int) -> Device:
    return Device(name, f"card {name}", free, free)


def rpc(name: str, free: int) -> Device:
    return Device(f"desk:50052 ({name})", "", free, free, (name, f"{name}[desk:50052]"))


class Machine:
    """Devices with times; an estimate of a model places its buffers as llama.cpp would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *devices: tuple[Device, DeviceTimes], cpu: DeviceTimes) -> None:
        self.devices = [device for device, _ in devices]
        self._times = {CPU: cpu, **{device.name: times for device, times in devices}}
        monkeypatch.setattr(placement, "device_times", lambda *_, **__: self._times)
        monkeypatch.setattr(placement_search, "kernel_times", lambda _: {})
        monkeypatch.setattr(placement, "estimate_memory", self._estimate)

    def _estimate(self, configs: Sequence[EngineConfig]) -> MemoryEstimate:
        return MemoryEstimate([self._footprint(config) for config in configs], self.devices)

    def _footprint(self, config: EngineConfig) -> Footprint:
        """All weights on each device: whether the chosen ones fit is the calculation's, which these tests read."""
        names = [next(iter(each.buffer_types), each.name) for each in self.devices]
        is_whole = not config.is_placed and not config.tensor_split
        weights = [Buffer("weights", name, MIB if is_whole else 0) for name in names]
        cells = Buffer("cells", names[0], config.n_ctx * PER_TOKEN if is_whole else 0)
        return Footprint(buffers=[*weights, cells, Buffer("compute", names[0], COMPUTE)])

    def place(self, model: Path, sizes: Sequence[tuple[int, int]] = SIZES, **settings: Any) -> Placed | None:
        return next(placements(self.candidates(model, sizes, **settings), one_engine, self.devices), None)

    def candidates(self, model: Path, sizes: Sequence[tuple[int, int]] = SIZES, **settings: Any) -> list[EngineConfig]:
        config = replace(EngineConfig(str(model)), **settings)
        return [replace(config, n_parallel=n, n_ctx=cells) for n, cells in sizes]


def one_engine(config: EngineConfig) -> list[EngineConfig]:
    return [config]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A card of 3 GiB beside a slow CPU."""
    return Machine(monkeypatch, (gpu("CUDA0", 3 * GIB), CARD), cpu=SLOW_CPU)


def test_as_much_of_the_model_is_on_the_device_as_fits(card: Machine, dense: Path) -> None:
    placed = card.place(dense, [(1, 4096)])
    assert placed
    assert placed.config.is_placed
    on_cpu = placed.config.n_cpu_ffn + (33 - placed.config.n_gpu_layers if placed.config.n_gpu_layers > 0 else 0)
    assert 8 <= on_cpu <= 24  # of 32 layers; 2.7 GiB are used for weights of 3.7, cells and compute buffers


def test_more_sequences_are_chosen_for_throughput_than_for_latency(card: Machine, dense: Path) -> None:
    sizes = {}
    for prefer in ("throughput", "balanced", "latency"):
        placed = card.place(dense, prefer=prefer)
        assert placed
        sizes[prefer] = placed.config.n_parallel
    assert sizes["throughput"] >= sizes["balanced"] >= sizes["latency"]
    assert sizes["throughput"] > sizes["latency"]


def test_balanced_takes_a_fifth_of_the_speed_of_one_sequence_at_most(card: Machine, dense: Path) -> None:
    alone = [each.speeds.alone for each in ranked(card.candidates(dense), one_engine, card.devices)]
    placed = card.place(dense)
    assert placed
    assert placed.speeds.alone >= 0.78 * max(alone)


def test_a_device_that_is_slower_than_the_cpu_computes_nothing(monkeypatch: pytest.MonkeyPatch, dense: Path) -> None:
    slow = DeviceTimes({"Q4_0": {1: 0.1, 16: 1.6, 512: 50.0}}, 1.0, 1.0)
    placed = Machine(monkeypatch, (gpu("Vulkan0", 3 * GIB), slow), cpu=SLOW_CPU).place(dense)
    assert placed
    assert placed.config.n_gpu_layers == 0


def test_rpc_workers_are_used_even_if_the_cpu_seems_faster(monkeypatch: pytest.MonkeyPatch, dense: Path) -> None:
    slow = DeviceTimes({"Q4_0": {1: 0.1, 16: 1.6, 512: 50.0}}, 1.0, 1.0)
    placed = Machine(monkeypatch, (rpc("RPC0", 3 * GIB), slow), cpu=SLOW_CPU).place(dense)
    assert placed
    assert placed.config.n_gpu_layers != 0


def test_prompts_are_read_in_large_pieces_where_a_gpu_copies_weights_of_the_cpu(card: Machine, dense: Path) -> None:
    assert all(each and each.config.n_ubatch == 2048 for each in [card.place(dense)])
    kept = placements(card.candidates(dense), one_engine, card.devices, {"n_ubatch"})
    assert next(kept).config.n_ubatch == 512
    placed = card.place(dense, op_offload=False)
    assert placed
    assert placed.config.n_ubatch == 512


def test_the_faster_of_two_gpus_is_filled_first_and_rpc_workers_last(
    monkeypatch: pytest.MonkeyPatch, dense: Path
) -> None:
    machine = Machine(
        monkeypatch,
        (gpu("CUDA0", 2 * GIB), OLD_CARD),
        (gpu("CUDA1", 2 * GIB), CARD),
        (rpc("RPC0", 3 * GIB), CARD),
        cpu=SLOW_CPU,
    )
    placed = machine.place(dense, [(4, 4096)])
    assert placed
    assert placed.config.device_names == ("CUDA1", "CUDA0", "RPC0")
    first, second, last = placed.config.tensor_split
    assert round(first + 0.5) + second + round(last - 0.5) == 33
    assert first > 10
    assert second > 10


def test_a_given_split_is_kept(monkeypatch: pytest.MonkeyPatch, dense: Path) -> None:
    machine = Machine(monkeypatch, (gpu("CUDA0", 2 * GIB), OLD_CARD), (gpu("CUDA1", 2 * GIB), CARD), cpu=SLOW_CPU)
    placed = machine.place(dense, [(4, 4096)], tensor_split=(1.0, 1.0))
    assert placed
    assert placed.config.tensor_split == (1.0, 1.0)
    assert placed.config.device_names == ()


def test_experts_stay_on_the_cpu_rather_than_whole_layers(monkeypatch: pytest.MonkeyPatch, experts: Path) -> None:
    """Few of them are read in a step, but attention is read in every one."""
    slow = DeviceTimes({"F32": {1: 100.0, 16: 1600.0}}, 0, 0)
    fast = DeviceTimes({"F32": {1: 0.1, 16: 0.2}}, 0, 0)
    machine = Machine(monkeypatch, (gpu("CUDA0", COMPUTE + 47 * MIB), fast), cpu=slow)
    monkeypatch.setattr("tests.unit.test_placement.PER_TOKEN", 64)
    placed = next(placements(machine.candidates(experts, [(1, 512)]), one_engine, machine.devices), None)
    assert placed
    assert placed.config.n_cpu_moe > 0
    assert placed.config.n_gpu_layers == -1


def test_the_alternatives_name_their_flags_and_speeds(card: Machine, dense: Path) -> None:
    lines = describe_placements(card.candidates(dense), card.devices, set())
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "8", "16"]
    assert all("tokens/s for one sequence" in line and "-c " in line for line in lines)


def test_a_given_placement_has_no_alternatives(card: Machine, dense: Path) -> None:
    assert card.place(dense, n_gpu_layers=12) is None
    assert card.place(dense, n_cpu_ffn=3) is None


def test_prompts_count_as_much_as_answers() -> None:
    among = [Speeds(10, 40, 1000), Speeds(10, 40, 20)]
    for prefer in get_args(Preference):
        fast_prompts, slow_prompts = scores(among, prefer)
        assert fast_prompts > slow_prompts


def test_each_preference_counts_its_own_speed() -> None:
    among = [Speeds(12, 20, 100), Speeds(10, 40, 100), Speeds(4, 90, 100)]
    by_speed: tuple[Preference, ...] = ("latency", "balanced", "throughput")
    for i, prefer in enumerate(by_speed):
        ranks = scores(among, prefer)
        assert ranks.index(max(ranks)) == i
