"""Steps use a thread for each core, but leave to other programs the cores that those keep busy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cppbatch.config import EngineConfig
from cppbatch.engine.compute_threads import ComputeThreads, CpuTimes, read_cpu_times, use_cpus
from cppbatch.errors import ConfigError


class Machine:
    """Cores that this process (`own`) and other programs (`others`) keep busy, in cores."""

    def __init__(self, n_cpus: int, most: int | None = None) -> None:
        self.time = self.own_s = self.others_s = 0.0
        self.threads = ComputeThreads(most or n_cpus, n_cpus, read=self._read, clock=lambda: self.time)

    def _read(self) -> CpuTimes:
        return CpuTimes(self.own_s + self.others_s, self.own_s)

    def run(self, seconds: float, *, others: float, step_s: float = 0.02) -> list[int]:
        """Steps for this time; the numbers of threads of the steps."""
        used = []
        for _ in range(round(seconds / step_s)):
            used.append(self.threads.now())
            self.time += step_s
            self.own_s += used[-1] * step_s
            self.others_s += others * step_s
        return used


def test_on_an_idle_machine_every_core_computes() -> None:
    assert set(Machine(4).run(5, others=0.1)) == {4}


def test_a_busy_core_is_left_to_the_program_that_has_it_and_taken_back_when_it_ends() -> None:
    machine = Machine(2)
    machine.run(2, others=0.0)
    assert machine.run(2, others=0.7)[-1] == 1
    assert set(machine.run(3, others=1.0)) == {1}
    assert machine.run(2, others=0.05)[-1] == 2


def test_a_program_that_pauses_for_less_than_a_second_does_not_get_its_core_taken() -> None:
    machine = Machine(2)
    machine.run(1, others=1.0)
    for _ in range(5):
        assert set(machine.run(0.6, others=0.0)) == {1}
        assert set(machine.run(0.6, others=1.0)) == {1}


def test_an_engine_that_is_loaded_beside_a_busy_program_starts_with_fewer_threads() -> None:
    machine = Machine(2)
    machine.time, machine.own_s, machine.others_s = 0.3, 0.3, 0.3
    assert machine.run(1, others=1.0)[0] == 1

    machine = Machine(2)
    machine.time, machine.own_s, machine.others_s = 1.0, 1.0, 0.7  # the server that starts the engine
    assert machine.run(1, others=0.0)[0] == 2

    machine = Machine(2)
    machine.time, machine.own_s = 30, 30  # a large model, a quiet machine
    assert machine.run(1, others=0.0)[0] == 2
    assert machine.run(1, others=1.0)[-1] == 1


def test_half_a_busy_core_changes_nothing_either_way() -> None:
    machine = Machine(2)
    assert set(machine.run(5, others=0.5)) == {2}
    machine.run(2, others=1.0)
    assert set(machine.run(5, others=0.5)) == {1}


@pytest.mark.parametrize(("others", "threads"), [(0.9, 7), (3.0, 5), (7.9, 1), (30.0, 1)])
def test_as_many_threads_as_cores_are_free_and_at_least_one(others: float, threads: int) -> None:
    assert Machine(8).run(3, others=others)[-1] == threads


def test_with_two_threads_a_core_one_busy_cpu_leaves_enough() -> None:
    assert set(Machine(16, most=8).run(3, others=1.0)) == {8}


def test_the_most_can_be_changed_while_it_runs() -> None:
    machine = Machine(4)
    machine.threads.limit(2)
    assert set(machine.run(3, others=0.1)) == {2}
    assert set(machine.run(3, others=2.0)) == {2}, "the others have the other cores"
    machine.threads.limit(4)
    assert machine.run(3, others=0.1)[-1] == 4
    assert machine.run(3, others=1.0)[-1] == 3


def test_a_given_number_is_the_most() -> None:
    machine = Machine(8, most=6)
    assert set(machine.run(3, others=2.0)) == {6}
    assert machine.run(3, others=4.0)[-1] == 4
    assert machine.run(3, others=0.0)[-1] == 6


@pytest.mark.parametrize("idle_s", [60, 1.5])
def test_load_while_the_engine_was_idle_does_not_count(idle_s: float) -> None:
    machine = Machine(2)
    machine.run(1, others=0.0, step_s=1.0)
    machine.threads.now()
    machine.time += idle_s
    machine.others_s += 0.9 * idle_s
    assert machine.run(0.1, others=0.0) == [2] * 5


@pytest.mark.parametrize("step_s", [0.5, 2.5, 6.0])
def test_a_core_is_taken_back_between_the_long_steps_of_a_long_prompt(step_s: float) -> None:
    machine = Machine(2)
    assert machine.run(1, others=1.0)[-1] == 1
    assert machine.run(6 * step_s, others=0.0, step_s=step_s)[3:] == [2] * 3
    assert machine.run(6 * step_s, others=1.0, step_s=step_s)[-1] == 1


def test_a_core_is_taken_back_after_a_quiet_time_without_requests() -> None:
    machine = Machine(2)
    assert machine.run(1, others=1.0)[-1] == 1
    machine.time += 60
    machine.others_s += 6
    assert machine.run(0.1, others=0.0) == [2] * 5


def test_the_times_of_this_machine_grow_by_what_this_process_computes() -> None:
    before = read_cpu_times()
    while (after := read_cpu_times()).this_process < before.this_process + 0.3:
        pass
    assert after.all_programs - before.all_programs >= 0.25, "this process is one of the programs"


def affinity_on_a_thread(**settings: str) -> set[int]:
    """The cores of a thread after `use_cpus`."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use_cpus, EngineConfig("m.gguf", **settings)).result()  # type: ignore[arg-type]
        return pool.submit(os.sched_getaffinity, 0).result()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_compute_threads_run_on_the_named_cores_only() -> None:
    mine = sorted(os.sched_getaffinity(0))
    last = mine[-1]
    assert affinity_on_a_thread(cpu_mask=f"0x{1 << last:x}") == {last}
    assert affinity_on_a_thread(cpu_range=f"{last}-{last}") == {last}
    assert affinity_on_a_thread(cpu_range=f"{last}-") == {last}
    assert affinity_on_a_thread(cpu_mask=f"{1 << mine[0]:x}", cpu_range=f"{last}-") == {mine[0], last}
    assert affinity_on_a_thread() == set(mine) == os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="none of the cores that this process may use"):
        affinity_on_a_thread(cpu_range="510-511")
    for wrong in ({"cpu_mask": "xyz"}, {"cpu_range": "3"}, {"cpu_range": "a-b"}):
        with pytest.raises(ConfigError, match="it must be"):
            EngineConfig("m.gguf", **wrong)  # type: ignore[arg-type]
