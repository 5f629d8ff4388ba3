"""Workers come and go with the load: no request is lost, cut off or sent to a worker that is to end.

The group, its engines and their supervisors are real; the worker processes are not (`FakeWorker`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from random import Random
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppbatch import EngineConfig, EngineProcess, FinishReason, GenerationRequest, SamplingParams
from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines import autoscaled, supervisor
from cppbatch.cluster.engines.autoscaled import AutoscaledGroup, _follow_load
from cppbatch.cluster.engines.client import ScalingState
from cppbatch.cluster.rules import ScalingRule
from cppbatch.config import available_threads
from cppbatch.errors import ConfigError
from cppbatch.retries import Pauses
from tests.support.fake_workers import FakeWorker, fake_workers, text_of
from tests.support.listening import until
from tests.support.randomised import cases
from tests.support.submitting import Reader

__all__ = ["fake_workers"]

N_PARALLEL = 2
NEVER = 1e9


class CheckedGroup(AutoscaledGroup):
    """Fails if a request goes to a worker that starts, drains or has ended."""

    def _choose(self, request: GenerationRequest) -> EngineProcess:
        chosen = super()._choose(request)
        assert chosen in self._engines
        assert chosen not in [self._starting, *self._draining]
        return chosen


def request(name: str, n_tokens: int, priority: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=n_tokens, temperature=0)
    return GenerationRequest(id=name, prompt=name, params=params, priority=priority)


class Fleet:
    """An autoscaled group with time and steps under the test's control."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, most: int = 3, least: int = 1, n_threads: int = 1, delay: float = 60.0
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr(autoscaled, "monotonic", lambda: self.now)
        self.config = EngineConfig(model_path="m.gguf", n_parallel=N_PARALLEL, n_ctx=512, n_threads=n_threads)
        self.rule = ScalingRule(min_workers=least, max_workers=most, n_parallel=N_PARALLEL, downscale_delay=delay)
        self.shortage: str | None = None
        self.group = CheckedGroup(self._start, self.rule, shortage=self._shortage, interval=NEVER)
        self.streams: list[Reader] = []

    def _start(self, number: int) -> EngineProcess:
        return EngineProcess(self.config, name=str(number))

    async def _shortage(self, number: int) -> str | None:
        return self.shortage

    async def submit(self, n: int, n_tokens: int = 3, priority: int = 0) -> list[Reader]:
        new = [Reader(self.group, request(f"r{len(self.streams) + i}", n_tokens, priority)) for i in range(n)]
        self.streams += new
        await settle()
        return new

    async def look(self, seconds: float = 0.5) -> None:
        """Time passes, and the group looks at its load once."""
        self.now += seconds
        await self.group._adapt()
        await settle()

    async def wait(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            await self.look()

    async def step(self, n: int = 1) -> None:
        for _ in range(n):
            for worker in alive():
                worker.step()
            await settle()

    async def finish(self) -> None:
        """Steps until every stream has ended."""
        for _ in range(2000):
            if all(stream.task.done() for stream in self.streams):
                break
            await self.step()
        for stream in self.streams:
            await asyncio.wait_for(stream.task, 1)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Running, starting, draining."""
        state = self.group.scaling()
        return state.running, state.starting, state.draining

    @property
    def loads(self) -> list[int]:
        return [engine.in_flight for engine in self.group._engines]


def alive() -> list[FakeWorker]:
    return [worker for worker in FakeWorker.started if not (worker.ended or worker.died)]


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
async def fleet(fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> Any:
    fleet = Fleet(monkeypatch)
    await fleet.group.loaded()
    await settle()
    yield fleet
    await fleet.group.close()


async def test_a_queue_starts_a_worker_which_gets_its_share_of_the_waiting_requests(fleet: Fleet) -> None:
    await fleet.submit(12)
    await fleet.step()
    assert (fleet.counts, fleet.loads) == ((1, 0, 0), [12])
    await fleet.wait(3)
    assert (fleet.counts, fleet.loads) == ((2, 0, 0), [6, 6])
    await fleet.wait(3)
    assert (fleet.counts, fleet.loads) == ((3, 0, 0), [4, 4, 4])
    await fleet.finish()
    assert [stream.text for stream in fleet.streams] == [text_of(f"r{i}", 3) for i in range(12)]
    assert fleet.group.scaling().scale_ups == 2


async def test_requests_that_have_started_and_those_of_better_rank_stay(fleet: Fleet) -> None:
    begun = await fleet.submit(2, n_tokens=50)
    await fleet.step()
    urgent = await fleet.submit(2, priority=-1)
    others = await fleet.submit(4)
    await fleet.wait(2.5)
    first, second = FakeWorker.started
    assert {each.request.prompt for each in first.sequences.values()} == {s.asked.id for s in [*begun, *urgent]}
    assert {each.request.prompt for each in second.sequences.values()} == {s.asked.id for s in others}


async def test_the_age_of_a_request_moves_with_it(fleet: Fleet) -> None:
    await fleet.submit(8)
    await fleet.step()
    await asyncio.sleep(0.05)
    await fleet.wait(2.5)
    assert all(each.resume.age >= 0.05 for each in FakeWorker.started[1].sequences.values())


async def test_workers_drain_when_fewer_are_enough_and_cut_nothing_off(fleet: Fleet) -> None:
    await fleet.submit(12)
    await fleet.wait(6)
    await fleet.finish()
    assert fleet.counts == (3, 0, 0)
    (long,) = await fleet.submit(1, n_tokens=500)
    await fleet.step()
    await fleet.wait(61)
    assert fleet.counts == (2, 0, 0), "the third had no request, and has ended"
    fleet.group._engines.reverse()  # the worker with the long request is the next one
    await fleet.wait(60)
    assert fleet.counts == (1, 0, 1)
    later = await fleet.submit(2)
    await fleet.finish()
    await fleet.look()
    assert fleet.counts == (1, 0, 0)
    assert long.text == text_of(long.asked.id, 500)
    assert all(stream.finish_reason is FinishReason.LENGTH for stream in [long, *later])
    assert not any(worker.cut_off for worker in FakeWorker.started)


async def test_a_draining_worker_gets_requests_again_when_the_load_returns(fleet: Fleet) -> None:
    await fleet.submit(5, n_tokens=3)
    await fleet.wait(6)
    await fleet.finish()
    assert fleet.counts == (2, 0, 0)
    await fleet.submit(1, n_tokens=500)
    fleet.group._engines.reverse()  # the worker with the request is the next one that drains
    await fleet.wait(61)
    assert fleet.counts == (1, 0, 1)
    await fleet.submit(8)
    await fleet.wait(3)
    assert fleet.counts == (2, 0, 0)
    assert len(FakeWorker.started) == 2, "no other worker was started"
    await fleet.finish()


async def test_requests_of_a_killed_draining_worker_continue_in_another_process(fleet: Fleet) -> None:
    await fleet.submit(5)
    await fleet.wait(6)
    await fleet.finish()
    (long,) = await fleet.submit(1, n_tokens=40)
    fleet.group._engines.reverse()
    await fleet.step(5)
    await fleet.wait(61)
    assert fleet.counts == (1, 0, 1)
    next(worker for worker in alive() if worker.sequences).die()
    await asyncio.sleep(0.01)
    await fleet.finish()
    await fleet.look()
    assert long.text == text_of(long.asked.id, 40)
    assert (fleet.counts, len(alive())) == ((1, 0, 0), 1)


async def test_no_worker_is_started_that_does_not_fit_and_one_line_says_so(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.shortage = "it needs 3.00 GiB of the host's memory, but only 1.00 GiB are free"
    await fleet.submit(12)
    with caplog.at_level(logging.INFO):
        await fleet.wait(25)
    (line,) = caplog.messages
    assert line == f"cannot start worker 1 for waiting requests: {fleet.shortage}. Next attempt in 30 s"
    assert (len(FakeWorker.started), fleet.group.scaling().held_back) == (1, fleet.shortage)
    with caplog.at_level(logging.INFO):
        await fleet.wait(300)
    assert len(caplog.messages) == 1, "it is not repeated at each attempt"
    fleet.shortage = None
    await fleet.wait(300)
    assert (fleet.counts[0], fleet.group.scaling().held_back) == (3, None)
    await fleet.finish()


async def test_a_worker_that_cannot_load_leaves_the_others_as_they_are(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeWorker, "can_load", False)
    await fleet.submit(8)
    await fleet.wait(10)
    assert (fleet.counts, fleet.group.health().status) == ((1, 0, 0), "ok")
    assert "cannot start worker 1 for waiting requests: out of memory. Next attempt in 30 s" in caplog.text
    await fleet.finish()
    assert all(stream.finish_reason is FinishReason.LENGTH for stream in fleet.streams)


async def test_a_request_that_is_cancelled_while_it_moves_ends_once(fleet: Fleet) -> None:
    await fleet.submit(8)
    await fleet.step()
    fleet.group._engines.append(other := EngineProcess(fleet.config, name="1"))
    await other.loaded()
    assert fleet.group._share_waiting_requests() == 4
    await fleet.group.cancel("r7")  # before it is in the other worker
    await settle()
    assert fleet.streams[7].finish_reason is FinishReason.CANCELLED
    await fleet.finish()
    assert all(stream.finish_reason for stream in fleet.streams)


async def test_a_group_can_be_closed_while_a_drained_worker_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.submit(5)
    await fleet.wait(6)
    await fleet.finish()
    ended = asyncio.Event()

    async def end_slowly(self: FakeWorker) -> None:
        await asyncio.sleep(0.02)
        self.ended = True
        ended.set()

    monkeypatch.setattr(FakeWorker, "end", end_slowly)
    fleet.group._task.cancel()
    fleet.group._task = asyncio.ensure_future(_follow_load(weakref.ref(fleet.group), [], 0.0))
    fleet.group._drain_one()
    await asyncio.sleep(0.01)
    assert not ended.is_set()
    await asyncio.wait_for(fleet.group.close(), 5)
    assert not alive()


async def test_the_state_of_each_worker_is_reported(fleet: Fleet) -> None:
    await fleet.submit(5)
    await fleet.wait(6)
    fleet.group._engines.reverse()
    fleet.group._drain_one()
    states = await fleet.group.workers()
    assert [(state.name, state.draining) for state in states] == [("1", False), ("0", True)]
    assert (await fleet.group.stats()).running > 0
    assert fleet.group.max_parallel == 3 * N_PARALLEL
    await fleet.finish()


async def test_workers_that_compute_share_the_cores(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaled, "available_threads", lambda: 4)
    fleet = Fleet(monkeypatch, n_threads=0)
    await fleet.group.loaded()
    await settle()
    assert [worker.threads for worker in alive()] == [4]
    await fleet.submit(8, n_tokens=2)
    await fleet.wait(2.5)
    assert [worker.threads for worker in alive()] == [2, 2]
    died = alive()[1]
    died.die()
    await until(lambda: died not in alive() and [worker.threads for worker in alive()] == [2, 2])  # the next one, too
    await fleet.wait(3)
    assert [worker.threads for worker in alive()] == [1, 1, 1]
    await fleet.finish()
    await fleet.wait(130)
    assert [worker.threads for worker in alive()] == [4]
    await fleet.group.close()


async def test_on_a_cpu_each_worker_needs_a_core(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaled, "available_threads", lambda: 2)
    fleet = Fleet(monkeypatch, most=5, n_threads=0)
    await fleet.group.loaded()
    await settle()
    assert fleet.group.scaling().max_workers == 2
    assert "limiting workers to 2 instead of 5: each needs its own core" in caplog.text
    await fleet.group.close()
    told = Fleet(monkeypatch, most=5, n_threads=1)
    await told.group.loaded()
    await settle()
    assert told.group.scaling().max_workers == 5
    await told.group.close()


OPERATIONS: list[tuple[int, str, list[Any]]] = [
    (6, "submit", [1, 2, 5, 9]),
    (8, "step", [1, 2, 4]),
    (8, "look", [0.5, 3.0, 11.0]),
    (2, "kill", [0, 1, 2]),
    (2, "cancel", [1, 2, 3, 5, 8]),
    (1, "leave", [1, 2, 3, 5, 8]),
    (1, "memory", [True, True, False]),
]
"""How often each occurs, and its values; those of cancel and leave count streams from the last one."""


def random_schedule(seed: int) -> list[tuple[str, Any]]:
    random = Random(seed)
    chosen = random.choices(OPERATIONS, [weight for weight, _, _ in OPERATIONS], k=80)
    return [(what, random.choice(values)) for _, what, values in chosen]


async def run_schedule(schedule: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> ScalingState:
    fleet = Fleet(monkeypatch, delay=20.0)
    await fleet.group.loaded()
    await settle()
    left: list[Reader] = []
    cancelled: set[str] = set()
    for what, value in schedule:
        if what == "submit":
            await fleet.submit(value, n_tokens=1 + len(fleet.streams) % 5, priority=len(fleet.streams) % 3)
        elif what == "step":
            await fleet.step(value)
        elif what == "look":
            for _ in range(3):
                await fleet.look(value)
        elif what == "memory":
            fleet.shortage = None if value else "too little"
        elif what == "kill" and value < len(alive()):
            alive()[value].die()
            await asyncio.sleep(0.001)
        elif what == "cancel" and value <= len(fleet.streams):
            cancelled.add(name := fleet.streams[-value].asked.id)
            await fleet.group.cancel(name)
        elif what == "leave" and value <= len(fleet.streams):
            left.append(stream := fleet.streams[-value])
            stream.task.cancel()
        assert len(fleet.group._all_engines()) <= 3
    await settle()
    await asyncio.gather(*(stream.task for stream in left), return_exceptions=True)
    fleet.streams = [stream for stream in fleet.streams if stream not in left]
    await fleet.finish()
    await fleet.look()
    assert not any(worker.cut_off for worker in FakeWorker.started)
    assert not any(worker.sequences for worker in alive())
    assert not fleet.group._without_output
    assert not fleet.group._moving
    for stream in fleet.streams:
        check_stream(stream, was_cancelled=stream.asked.id in cancelled)
    await fleet.group.close()
    return fleet.group.scaling()


def check_stream(stream: Reader, *, was_cancelled: bool) -> None:
    assert stream.events[-1].finish_reason is stream.finish_reason
    whole = text_of(stream.asked.id, stream.asked.params.max_tokens or 0)
    if stream.finish_reason is FinishReason.CANCELLED:
        assert was_cancelled
        assert whole.startswith(stream.text)
    else:
        assert (stream.finish_reason, stream.text) == (FinishReason.LENGTH, whole)


@cases(ring=15, nightly=40, soak=400)
def test_whatever_happens_each_request_ends_once_with_its_own_events(n_cases: int) -> None:
    ups = downs = 0
    for seed in range(n_cases):
        FakeWorker.started = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "WorkerHandle", FakeWorker)
            patch.setattr(supervisor, "_PAUSES", Pauses(0.0, 30.0))
            state = asyncio.run(run_schedule(random_schedule(seed), patch))
        ups, downs = ups + state.scale_ups, downs + state.scale_downs
    assert ups > n_cases
    assert downs > n_cases / 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_workers": 0}, r"--workers is 1\.\.0; the maximum must be from 1 to 64"),
        ({"workers": 3, "max_workers": 2}, r"--workers is 3\.\.2; the maximum must be from 3 to 64"),
        ({"max_workers": 65}, r"must be from 1 to 64"),
        ({"max_workers": 2, "devices": (0, 1, 2)}, r"fewer than the 3 devices in --devices"),
        ({"max_workers": 2, "in_process": True}, "--in-process runs a single engine"),
        ({"max_workers": 2, "downscale_delay": 0}, "--downscale-delay is 0; it must be more than 0"),
    ],
)
def test_invalid_values_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployment(**wrong)


async def test_each_worker_takes_a_device_in_turn_and_is_checked_for_that_device(
    fake_workers: list[FakeWorker],
) -> None:
    asked: list[int | None] = []

    def shortage(config: EngineConfig) -> str | None:
        asked.append(config.device)
        return None

    config = EngineConfig(model_path="m.gguf", n_parallel=N_PARALLEL, n_ctx=512)
    deployment = Deployment(max_workers=3, devices=(4, 7), memory_shortage=shortage)
    assert [(each.device, each.n_threads) for each in deployment.configs(config)] == [(4, 0)]
    group = deployment.start(config)
    assert isinstance(group, AutoscaledGroup)
    await group.loaded()
    for number in range(1, 3):
        assert await group._shortage(number) is None
        group._start_worker(number)
    await settle()
    assert asked == [7, 4]
    assert [worker.config.device for worker in fake_workers] == [4, 7, 4]
    await group.close()


@pytest.mark.parametrize(
    ("given", "counts"), [("3", (3, None)), ("1..4", (1, 4)), ("2..2", (2, 2)), ("0..2", None), ("4..1", None)]
)
def test_workers_are_a_number_or_a_range(given: str, counts: tuple[int, int | None] | None) -> None:
    found: list[Deployment] = []

    @click.command()
    @deployment_options
    def command(deployment: Deployment) -> None:
        found.append(deployment)

    for result in (
        CliRunner().invoke(command, ["--workers", given, "--downscale-delay", "5"]),
        CliRunner().invoke(command, ["--downscale-delay", "5"], env={"CPPBATCH_WORKERS": given}),
    ):
        assert isinstance(result.exception, ConfigError) == (counts is None)
    assert [(each.workers, each.max_workers, each.downscale_delay) for each in found] == (
        [(*counts, 5)] * 2 if counts else []
    )


@pytest.mark.parametrize("given", ["many", "1..", "1-4", "1...4", "1.5", ""])
def test_an_invalid_number_of_workers_is_refused_with_an_example(given: str) -> None:
    command = click.command()(deployment_options(lambda deployment: None))
    result = CliRunner().invoke(command, ["--workers", given])
    assert f"{given!r} is neither a number, such as 2, nor a range, such as 1..4" in result.output


def test_a_range_of_one_number_is_that_number() -> None:
    deployment = Deployment(workers=2, max_workers=2)
    assert not deployment.is_autoscaled
    assert [each.n_threads for each in deployment.configs(EngineConfig(model_path="m"))] == [
        max(1, available_threads() // 2)
    ] * 2
