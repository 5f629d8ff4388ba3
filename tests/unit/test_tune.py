"""How settings are chosen, on made-up machines; and once on a real one with a tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cppbatch.bench.tune import tuner
from cppbatch.bench.tune.measurement import Measurement, MeasurementTask
from cppbatch.bench.tune.tuner import (
    Speed,
    Tuner,
    TuningResult,
    check_limits,
    contradicting,
    doublings,
    fastest,
    knee,
    largest_fitting,
)
from cppbatch.bench.tune.tuning_report import tuning_report
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError
from cppbatch.sizing.buffers import Buffer
from cppbatch.sizing.estimate import Footprint, MemoryEstimate
from cppbatch.sizing.machine import this_machine
from cppbatch.sizing.profile import TunedSettings

CONFIG = EngineConfig(model_path="model.gguf", n_threads=2)


def curve(*tokens_per_s: float) -> list[Speed]:
    return [Speed(1 << i, speed, 1000 * (1 << i) / speed) for i, speed in enumerate(tokens_per_s)]


def test_the_smallest_parallelism_that_is_about_as_fast_as_the_fastest_is_chosen() -> None:
    assert knee(curve(100, 190, 350, 600, 640)).n_parallel == 8
    assert knee(curve(100, 190, 350, 600, 640, 900)).n_parallel == 32
    assert knee(curve(100, 105, 111)).n_parallel == 2
    assert knee(curve(100, 60)).n_parallel == 1


def test_nothing_is_chosen_that_is_much_slower_than_what_was_measured() -> None:
    for speeds in itertools.permutations((100.0, 160.0, 300.0, 90.0, 280.0)):
        assert knee(curve(*speeds)).tokens_per_s >= 0.9 * max(speeds)


def test_a_measurement_that_cannot_be_right_beside_its_neighbour_was_disturbed() -> None:
    one, two = curve(100, 190)
    assert contradicting(one, two) is None
    assert contradicting(one, slow := Speed(2, 90, 22)) is slow  # two together are slower than one
    assert contradicting(Speed(1, 40, 25), two) == Speed(1, 40, 25)  # one alone waits longer for a token than two


def test_a_target_latency_bounds_the_parallelism() -> None:
    speeds = curve(100, 190, 350, 600)  # 10, 10.5, 11.4 and 13.3 ms
    assert knee(speeds, target_ms=11).n_parallel == 2
    assert knee(speeds, target_ms=1).n_parallel == 1  # nothing keeps to it
    assert knee(speeds, target_ms=50).n_parallel == 8


@pytest.mark.parametrize("limit", [0, 1, 2, 37, 63, 64, 1000])
def test_the_largest_that_fits_is_found_with_few_trials(limit: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= limit

    assert largest_fitting(fits, 1, 64) == (min(limit, 64) or None)
    assert len(asked) <= 8
    assert len(set(asked)) == len(asked)


def test_another_setting_must_be_clearly_faster() -> None:
    assert fastest([100, 102]) == 0
    assert fastest([100, 104]) == 1
    assert fastest([None, 50, 40]) == 1
    assert fastest([None, None]) is None


def test_parallelism_is_doubled_up_to_the_most() -> None:
    assert doublings(1) == [1]
    assert doublings(16) == [1, 2, 4, 8, 16]
    assert doublings(20) == [1, 2, 4, 8, 16, 20]


def test_targets_and_times_must_make_sense() -> None:
    check_limits(None, 5)
    for target, minutes in ((0, 5), (-1, 5), (float("nan"), 5), (10, 0)):
        with pytest.raises(ConfigError, match="must be more than 0"):
            check_limits(target, minutes)


def machine(task: MeasurementTask, timeout: float) -> Measurement:
    """Fastest with one thread, per-sequence streams, flash attention off and -ub 256; no gain beyond 8 sequences."""
    config = task.config
    speed = 100.0 * min(config.n_parallel, 8)
    speed *= 1.5 if config.kv_layout == "per-sequence" else 1
    speed *= 1.2 if config.flash_attn == "off" else 1
    speed *= 1.1 if config.n_threads == 1 else 1
    reading = 1000.0 if config.n_ubatch == 256 else 900.0
    return Measurement(
        tokens_per_s=speed, inter_token_ms=1000 * config.n_parallel / speed, prompt_tokens_per_s=reading, steps=9
    )


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Room for this number of sequences by the estimate."""

    def room(n: int) -> None:
        def survey(configs: list[EngineConfig]) -> MemoryEstimate:
            needs = [[Buffer("cells", "CPU", config.n_parallel)] for config in configs]
            return MemoryEstimate([Footprint(buffers=buffers, n_ctx_train=1024) for buffers in needs], [])

        monkeypatch.setattr(tuner, "estimate_memory", survey)
        monkeypatch.setattr(tuner, "free_host_memory", lambda: n)
        monkeypatch.setattr(tuner, "_threads", lambda config: [2, 1, 4])
        monkeypatch.setattr(tuner, "available_threads", lambda: 2)

    room(1000)
    return room


def tuned(
    config: EngineConfig = CONFIG, measure: Callable[[MeasurementTask, float], Measurement] = machine, **options: Any
) -> TuningResult:
    settings: dict[str, Any] = {"most_parallel": 64, "seconds": 60.0, "measure": measure, **options}
    return Tuner(config, **settings).run()


@pytest.mark.usefixtures("memory_for")
def test_every_setting_is_found() -> None:
    found = tuned()
    settings = found.settings()
    assert (settings.n_threads, settings.kv_layout, settings.flash_attn) == (1, "per-sequence", "off")
    assert (settings.n_parallel, settings.n_ctx, settings.n_ubatch) == (8, 16384, 256)
    assert [speed.n_parallel for speed in found.curve] == [1, 2, 4, 8, 16]  # nothing beyond what shows the knee
    assert found.speed.tokens_per_s == pytest.approx(800 * 1.5 * 1.2 * 1.1)
    assert not found.notes


@pytest.mark.usefixtures("memory_for")
def test_cells_grow_with_parallelism_unless_they_are_given() -> None:
    def scales(task: MeasurementTask, timeout: float) -> Measurement:
        n = task.config.n_parallel
        return Measurement(tokens_per_s=100.0 * n, inter_token_ms=10, prompt_tokens_per_s=1000, steps=9)

    assert tuned(measure=scales).settings().n_ctx == 64 * 1024
    given = tuned(EngineConfig(model_path="model.gguf", n_ctx=20), measure=scales, given={"n_ctx"}).settings()
    assert (given.n_parallel, given.n_ctx) == (20, 20)


@pytest.mark.usefixtures("memory_for")
def test_given_batch_sizes_are_all_compared_and_no_others() -> None:
    found = tuned(batch_sizes=(3, 1, 12, 40))
    assert [speed.n_parallel for speed in found.curve] == [1, 3, 12, 40]
    assert found.settings().n_parallel == 12, "the made-up machine gains nothing beyond 8"


def test_batch_sizes_that_do_not_fit_into_memory_are_left_out(memory_for: Callable[[int], None]) -> None:
    memory_for(12)
    found = tuned(batch_sizes=(1, 4, 64))
    assert [speed.n_parallel for speed in found.curve] == [1, 4]


@pytest.mark.usefixtures("memory_for")
def test_the_report_compares_each_parallelism_with_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.bench.tune.tuning_report.this_machine", lambda: this_machine(with_llama=False))

    def on_gpu(task: MeasurementTask, timeout: float) -> Measurement:
        return msgspec.structs.replace(machine(task, timeout), gpu_percent=10.0 * task.config.n_parallel)

    report = tuning_report(tuned(batch_sizes=(1, 4), measure=on_gpu))
    one, four = (row for row in report.rows if row["what"] == "parallel")
    assert (one["speedup"], four["speedup"]) == (1, 4)
    assert (one["memory_overhead"], four["memory_overhead"]) == (0, 300), "the estimate has a byte for each"
    assert four["memory_mib"] == 4 / 2**20
    assert (four["gpu_percent"], "gpu_percent" in {column.key for column in report.columns}) == (40, True)
    assert all("speedup" not in row for row in report.rows if row["what"] != "parallel")
    without = tuning_report(tuned(batch_sizes=(1, 4)))
    assert "gpu_percent" not in {column.key for column in without.columns}


@pytest.mark.usefixtures("memory_for")
def test_streams_that_could_not_hold_the_longest_text_are_not_tried() -> None:
    found = tuned(EngineConfig(model_path="model.gguf", n_ctx=16 * 1023))
    assert found.settings().kv_layout == "unified"
    assert not [point for point in found.points if "per-sequence" in point["setting"]]


@pytest.mark.usefixtures("memory_for")
def test_a_disturbed_measurement_does_not_end_the_curve() -> None:
    tries: list[int] = []

    def disturbed(task: MeasurementTask, timeout: float) -> Measurement:
        n = task.config.n_parallel
        tries.append(n)
        point = machine(task, timeout)
        return msgspec.structs.replace(point, tokens_per_s=1.0) if n == 4 and tries.count(4) == 1 else point

    found = tuned(measure=disturbed)
    assert found.settings().n_parallel == 8
    assert tries.count(4) == 2


@pytest.mark.usefixtures("memory_for")
def test_a_disturbed_prefill_does_not_change_the_ubatch() -> None:
    tries: list[int] = []

    def disturbed(task: MeasurementTask, timeout: float) -> Measurement:
        if task.prompt_tokens:
            tries.append(task.config.n_ubatch)
        slowed = tries == [512]
        return msgspec.structs.replace(machine(task, timeout), prompt_tokens_per_s=500.0 if slowed else 900.0)

    assert tuned(measure=disturbed).settings().n_ubatch == 512
    assert tries == [512, 256, 128, 1024, 512, 256]


@pytest.mark.usefixtures("memory_for")
@pytest.mark.parametrize("slowed", [{2}, {1, 2}, {2, 4}, {4, 8}, {2, 4, 8}])
def test_beside_a_busy_core_nothing_slower_is_chosen_than_what_was_measured(slowed: set[int]) -> None:
    def busy(task: MeasurementTask, timeout: float) -> Measurement:
        point = machine(task, timeout)
        speed = point.tokens_per_s / 9 if task.config.n_parallel in slowed else point.tokens_per_s
        ms = 1000 * task.config.n_parallel / speed
        return msgspec.structs.replace(point, tokens_per_s=speed, inter_token_ms=ms, busy_cores=0.9)

    found = tuned(measure=busy)
    assert found.settings().n_threads == CONFIG.n_threads  # how many are best now says nothing about an idle machine
    best = max(point["tokens_per_s"] for point in found.points)
    assert found.speed.tokens_per_s >= 0.9 * best
    assert found.settings().n_parallel == 8 if 8 not in slowed else 16
    assert [note for note in found.notes if note.startswith("other programs used 0.9 of ")]


@pytest.mark.usefixtures("memory_for")
def test_a_candidate_slower_than_another_point_is_measured_again() -> None:
    """Other programs were quiet only while one thread was measured, and are quiet again after the curve."""
    tries = 0

    def disturbed(task: MeasurementTask, timeout: float) -> Measurement:
        nonlocal tries
        point, is_other = machine(task, timeout), task.config.n_threads != 1
        tries += is_other and task.config.n_parallel == 16
        slowed = 4 if is_other and (task.config.n_parallel != 16 or tries <= 8) else 1
        speed, ms = point.tokens_per_s / slowed, point.inter_token_ms * slowed
        return msgspec.structs.replace(point, tokens_per_s=speed, inter_token_ms=ms, busy_cores=0.9)

    found = tuned(measure=disturbed)
    assert found.speed.tokens_per_s >= 0.9 * max(point["tokens_per_s"] for point in found.points)
    assert found.settings().n_parallel == 16


def test_nothing_is_chosen_that_is_clearly_slower_than_what_was_measured_with_other_settings() -> None:
    speeds = [Speed(1, 50, 20), Speed(2, 95, 21), Speed(4, 100, 40)]
    assert knee(speeds).n_parallel == 2
    assert knee(speeds, others=[Speed(16, 106, 150)]).n_parallel == 4
    assert knee(speeds, others=[Speed(16, 300, 53)]).n_parallel == 4
    assert knee(speeds, target_ms=30, others=[Speed(16, 300, 53)]).n_parallel == 2


@pytest.mark.usefixtures("memory_for")
def test_settings_given_by_the_user_are_kept() -> None:
    given = {"n_parallel", "flash_attn", "n_ubatch", "n_threads", "kv_layout"}
    config = EngineConfig(model_path="model.gguf", n_parallel=3, n_ctx=999, flash_attn="on", n_ubatch=64, n_threads=4)
    found = tuned(config, given=given)
    assert found.settings() == TunedSettings(
        n_parallel=3, n_ctx=999, kv_layout="auto", flash_attn="on", n_ubatch=64, n_threads=4
    )


@pytest.mark.usefixtures("memory_for")
def test_quantised_values_are_never_tried_without_flash_attention() -> None:
    found = tuned(EngineConfig(model_path="model.gguf", cache_type_v="q8_0"))
    assert found.settings().flash_attn == "on"


@pytest.mark.usefixtures("memory_for")
def test_an_f32_cache_is_never_tried_with_flash_attention_which_would_cast_it() -> None:
    tried = set()

    def measure(task: MeasurementTask, timeout: float) -> Measurement:
        tried.add(task.config.flash_attn)
        return machine(task, timeout)

    config = EngineConfig(model_path="model.gguf", cache_type_k="f32", cache_type_v="f32")
    assert tuned(config, measure).settings().flash_attn == "off"
    assert "on" not in tried


def test_memory_bounds_parallelism_by_estimate_and_by_trying(memory_for: Callable[[int], None]) -> None:
    memory_for(5)  # so 4 of the doublings

    def only_three_load(task: MeasurementTask, timeout: float) -> Measurement:
        return machine(task, timeout) if task.config.n_parallel <= 3 else Measurement(error="out of memory")

    found = tuned(measure=only_three_load)
    assert found.most_parallel == 3
    assert found.settings().n_parallel == 3
    assert "memory allows at most -np 3 -c 16384" in found.notes


@pytest.mark.usefixtures("memory_for")
def test_when_the_time_is_over_the_results_so_far_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(tuner, "monotonic", lambda: float(next(clock)))
    found = tuned(seconds=10.5)  # memory, 3 threads, 4 layouts with 16 sequences, 2 of the curve
    assert [speed.n_parallel for speed in found.curve] == [1, 2, 16]
    assert found.settings().n_parallel == 16
    assert any("--max-minutes" in note for note in found.notes)


@pytest.mark.usefixtures("memory_for")
def test_a_model_that_does_not_run_is_an_error_with_the_reason() -> None:
    with pytest.raises(ModelError, match="even -np 1 -c 16384 does not run: it is cursed"):
        tuned(measure=lambda task, timeout: Measurement(error="it is cursed"))


@pytest.mark.usefixtures("memory_for")
def test_an_unreachable_latency_is_reported() -> None:
    found = tuned(target_ms=0.001)
    assert found.settings().n_parallel == 1
    assert found.notes == ["even a single sequence needs more than 0.001 ms per token here"]
