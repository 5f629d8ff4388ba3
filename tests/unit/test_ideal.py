"""The ideal time is a lower bound that an engine without losses reaches, and every loss is found in its place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.engine.ideal import LOST, BareCosts, RequestSize, StepWork, TimeSplit, ideal_seconds
from tests.support.fakes import context_of, drain, fake_engine, greedy
from tests.support.randomised import cases

AFFINE = BareCosts.of([(n, 0.008 + 0.001 * n) for n in (1, 4, 8, 16)], [(16, 0.002), (256, 0.001), (512, 0.0011)])
TILED = BareCosts.of(
    [(1, 0.0051), (2, 0.0086), (4, 0.0102), (7, 0.0178), (8, 0.0133), (12, 0.0196), (15, 0.0298), (16, 0.0207)],
    [(4, 0.004), (16, 0.0015), (64, 0.0012), (512, 0.001)],
    row_cell_s=1e-6,
    token_cell_s=2e-7,
)
N_ROWS = 16


# --- a load -----------------------------------------------------------------------------------------------------------


class Simulation:
    """An engine that computes a load, and its time. `losses`: it randomly does things that cost time."""

    def __init__(
        self, costs: BareCosts, requests: list[RequestSize], clients: int | None, losses: random.Random | None
    ):
        self.costs, self.losses, self.now = costs, losses, 0.0
        self.clients = clients
        self.queue = requests.copy() if clients else sorted(requests, key=lambda request: request.arrives)
        self.decoding: list[tuple[RequestSize, list[int]]] = []  # with the rows that each sample still needs

    def run(self) -> float:
        """The seconds until the last token."""
        while self.queue or self.decoding:
            self.take()
            self.step()
            self.decoding = [(request, left) for request, each in self.decoding if (left := [n for n in each if n])]
        return self.now

    def take(self) -> None:
        """Computes the prompts of the requests that are here."""
        while self.queue and (not self.clients or len(self.decoding) < self.clients):
            request = self.queue[0]
            if not self.clients and request.arrives > self.now:
                if self.decoding:
                    return
                self.now = request.arrives
            if not self.clients and sum(len(left) for _, left in self.decoding) + request.samples > N_ROWS:
                return
            self.queue.pop(0)
            n, token_s = request.prompt_tokens, self.costs.token_s
            if self.losses:
                token_s = self.costs.token_s_of(self.losses.choice([4, 16, 64, 256]))
            self.now += n * (token_s + self.costs.token_cell_s * (request.cached_tokens + n / 2))
            self.decoding.append((request, [request.output_tokens - 1] * request.samples))

    def step(self) -> None:
        """Computes rows: one of each sample, as far as there is room."""
        rows = [(request, left, i) for request, left in self.decoding for i in range(len(left)) if left[i]]
        if self.losses:
            rows = self.losses.sample(rows, self.losses.randint(min(1, len(rows)), len(rows)))
        rows = rows[:N_ROWS]
        if not rows:
            return
        self.now += self.costs.step_s(len(rows))
        for request, left, i in rows:
            position = request.cached_tokens + request.prompt_tokens + request.output_tokens - left[i]
            self.now += self.costs.row_cell_s * (position + 0.5)
            left[i] -= 1


def a_load(draw: random.Random, *, apart_s: float = 0.0, samples: int = 1) -> list[RequestSize]:
    arrives, requests = 0.0, []
    for _ in range(draw.randint(1, 80)):
        cached = draw.choice([0, 0, 300])
        size = RequestSize(draw.randint(1, 900), draw.randint(1, 128), cached, draw.randint(1, samples), arrives)
        requests.append(size)
        arrives += draw.expovariate(1 / apart_s) if apart_s else 0.0
    return requests


@cases(ring=10, nightly=25, soak=100)
@pytest.mark.parametrize("clients", [1, 5, 16])
@pytest.mark.parametrize(("costs", "least"), [(AFFINE, 0.99), (TILED, 0.95)], ids=["affine", "tiled"])
def test_an_engine_without_losses_reaches_the_ideal_time_of_a_closed_loop(
    costs: BareCosts, least: float, clients: int, n_cases: int
) -> None:
    """Where rows come in tiles, an engine that lets rows pause to fill them would be up to 5% faster."""
    for seed in range(n_cases):
        requests = a_load(random.Random(seed))
        of_ideal = ideal_seconds(requests, costs, N_ROWS, clients) / Simulation(costs, requests, clients, None).run()
        assert least <= of_ideal <= 1 + 1e-9


def test_the_tail_of_one_long_output_is_not_a_loss() -> None:
    requests = [RequestSize(100, 20)] * 15 + [RequestSize(100, 400)]
    needed = ideal_seconds(requests, AFFINE, N_ROWS)
    assert needed == pytest.approx(1600 * 0.001 + 19 * AFFINE.step_s(16) + 380 * AFFINE.step_s(1))
    assert needed == pytest.approx(Simulation(AFFINE, requests, None, None).run())


@cases(ring=15, nightly=40, soak=200)
@pytest.mark.parametrize("costs", [AFFINE, TILED], ids=["affine", "tiled"])
@pytest.mark.parametrize(
    ("clients", "samples", "apart_s"), [(8, 1, 0), (16, 1, 0), (4, 4, 0), (None, 1, 0), (None, 4, 0.3)]
)
def test_no_engine_is_faster_than_the_ideal_time(
    costs: BareCosts, clients: int | None, samples: int, apart_s: float, n_cases: int
) -> None:
    for seed in range(n_cases):
        draw = random.Random(seed)
        requests = a_load(draw, apart_s=apart_s, samples=samples)
        for losses in (None, draw):
            took = Simulation(costs, requests, clients, losses).run()
            assert ideal_seconds(requests, costs, N_ROWS, clients) <= took + 1e-9


def test_requests_that_arrive_late_are_not_computed_before() -> None:
    requests = [RequestSize(100, 20, arrives=10.0 * i) for i in range(5)]
    alone = ideal_seconds(requests[:1], AFFINE, N_ROWS)
    assert ideal_seconds(requests, AFFINE, N_ROWS) == pytest.approx(40 + alone)


# --- a step -----------------------------------------------------------------------------------------------------------

STEPS = {
    "nothing": (StepWork(16, (16,), 0, 0, 0, 0, 16), {}),
    "few rows because few are unfinished": (StepWork(3, (3,), 0, 0, 0, 0, 3), {}),
    "few rows": (StepWork(4, (4,), 0, 0, 0, 0, 16), {"few_rows": 0.012 - 4 * 0.0015}),
    "padding": (StepWork(12, (16,), 0, 0, 0, 0, 16), {"padding": 4 * 0.0015}),
    "drafts": (StepWork(4, (16,), 12, 5, 0, 0, 16), {"drafts": 7 * 0.0015}),
    "small pieces": (StepWork(0, (), 0, 0, 16, 0, 16), {"small_pieces": 16 * 0.001}),
    "computed again": (StepWork(0, (), 0, 0, 256, 100, 16), {"computed_again": 100 * 0.001}),
}


def best_s(work: StepWork) -> float:
    """The time of `llama_decode` for it."""
    tokens_s = work.prompt_tokens * AFFINE.token_s_of(work.prompt_tokens) if work.prompt_tokens else 0.0
    return sum(map(AFFINE.step_s, work.groups)) + tokens_s


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("slower_s", [0.0, 0.02])
def test_the_lost_time_of_a_step_is_attributed_to_its_cause(name: str, slower_s: float) -> None:
    work, lost = STEPS[name]
    split = TimeSplit()
    decode_s = best_s(work) + slower_s
    split.add_steps(work, AFFINE, decode_s, 0.0, 0.003)
    split.add_pause(0.004, 0.5)
    expected = {"engine": 0.003, "serving": 0.004, "waiting": 0.5, "slower": slower_s, **lost}
    assert split.lost == pytest.approx({reason: expected.get(reason, 0.0) for reason in LOST})
    assert split.ideal == pytest.approx(best_s(work) - sum(lost.values()))
    assert split.busy == pytest.approx(decode_s + 0.007)


def test_the_parts_of_any_steps_are_not_negative_and_add_up_to_the_time() -> None:
    draw, split, took = random.Random(1), TimeSplit(), 0.0
    for _ in range(2000):
        rows, drafted, padding = draw.randint(0, 16), draw.choice([0, 5]), draw.choice([0, 3])
        groups = (rows + drafted + padding,) if rows else ()
        drafted = drafted if rows else 0
        n_prompt = draw.choice([0, 1, 7, 300])
        work = StepWork(
            rows, groups, drafted, draw.randint(0, drafted), n_prompt, draw.randint(0, n_prompt), draw.randint(0, 16)
        )
        seconds = [draw.expovariate(50) for _ in range(5)]
        split.add_steps(work, draw.choice([AFFINE, TILED, BareCosts.of([], [])]), *seconds[:3])
        split.add_pause(*seconds[3:])
        took += sum(seconds)
        assert min(split.ideal, *split.lost.values()) >= -1e-9
    assert split.ideal + sum(split.lost.values()) == pytest.approx(took)


# --- an engine --------------------------------------------------------------------------------------------------------


class Machine:
    """An engine over a fake context in virtual time: only the steps defined here take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 1000.0
        for module in ("core", "observe.metrics", "input_processor"):
            monkeypatch.setattr(f"cppbatch.engine.{module}.perf_counter", lambda: self.now)
        sizes: dict[str, Any] = {"n_ctx": 4096, "n_batch": 512, "n_ubatch": 512, "n_parallel": 16, "max_queue": 1000}
        self.engine: BatchInferenceEngine = fake_engine(on_plan=self._take, **sizes | settings)
        self.slowness = 1.0
        self._delay(context_of(self.engine), "decode", self._decode_s)
        self._plan: Any = None

    def _take(self, plan: Any) -> None:
        self._plan = plan

    def _decode_s(self) -> float:
        plan = self._plan
        n = plan.n_tokens - plan.n_decode - plan.n_beside
        tokens_s = n * AFFINE.token_s_of(n) if n else 0.0
        return (sum(map(AFFINE.step_s, plan.row_groups)) + tokens_s) * self.slowness

    def _delay(self, owner: Any, name: str, seconds: Callable[[], float]) -> None:
        call = getattr(owner, name)

        def delayed(*args: Any, **named: Any) -> Any:
            self.now += seconds()
            return call(*args, **named)

        setattr(owner, name, delayed)

    def slow_down(self, owner: Any, name: str, seconds: float) -> None:
        """A call takes this much longer."""
        self._delay(owner, name, lambda: seconds)

    def run(self, n: int, *, prompt_tokens: int = 100, new_tokens: int = 40, pause_s: float = 0.0) -> None:
        """`n` requests at once."""
        for _ in range(n):
            self.engine.add_request([5] * prompt_tokens, greedy(new_tokens, ignore_eos=True))
        while self.engine.has_work:
            self.engine.step()
            self.now += pause_s

    def lost(self, run: Callable[[], object]) -> dict[str, float]:
        """The parts that each kind of loss has of the time that this takes, and `ideal`."""
        before, began = self._parts(), self.now
        run()
        took = self.now - began
        return {name: (seconds - before[name]) / took for name, seconds in self._parts().items()}

    def _parts(self) -> dict[str, float]:
        stats = self.engine.stats()
        return {**stats.lost_seconds, "ideal": stats.ideal_seconds}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = warm(Machine(monkeypatch))
    yield machine
    drain(machine.engine)


def warm(machine: Machine) -> Machine:
    """The machine, after steps of all sizes."""
    for n in (1, 2, 4, 8, 16):
        machine.run(n)
    return machine


def test_an_engine_that_wastes_nothing_reports_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = warm(Machine(monkeypatch, prefer="throughput"))
    parts = machine.lost(lambda: machine.run(16))
    assert parts["ideal"] >= 0.97
    assert machine.engine.stats().recent_steps.of_ideal is not None
    drain(machine.engine)


def test_pieces_that_are_shorter_for_the_streams_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {}
    for prefer in ("throughput", "balanced", "latency"):
        machine = warm(Machine(monkeypatch, prefer=prefer))
        lost[prefer] = machine.lost(partial(machine.run, 16))["small_pieces"]
        drain(machine.engine)
    assert max(lost["throughput"], lost["balanced"]) < lost["latency"]
    assert lost["balanced"] < 0.08


@pytest.mark.parametrize(
    ("reason", "owner", "name"), [("sampling", "_sampler", "sample"), ("engine", "scheduler", "plan")]
)
def test_an_engine_finds_what_its_own_phases_take(machine: Machine, reason: str, owner: str, name: str) -> None:
    clean = machine.lost(lambda: machine.run(16))
    machine.slow_down(getattr(machine.engine.core, owner), name, 0.002)
    n_before, began = machine.engine.stats().steps, machine.now
    parts = machine.lost(lambda: machine.run(16))
    injected = 0.002 * (machine.engine.stats().steps - n_before) / (machine.now - began)
    assert injected > 0.03
    assert parts[reason] == pytest.approx(injected, abs=0.01)
    assert parts["ideal"] == pytest.approx(clean["ideal"] - injected, abs=0.02)


def test_time_between_steps_counts_as_serving_while_there_is_work_and_as_waiting_otherwise(machine: Machine) -> None:
    n_before, began = machine.engine.stats().steps, machine.now
    machine.now += 7.0
    parts = machine.lost(lambda: machine.run(16, pause_s=0.001))
    n_steps, took = machine.engine.stats().steps - n_before, machine.now - began - 7.0
    assert parts["serving"] * took == pytest.approx(0.001 * (n_steps - 1), abs=1e-6)
    assert parts["waiting"] * took == pytest.approx(7.0)


def test_steps_that_take_longer_than_before_are_slower(machine: Machine) -> None:
    clean = machine.lost(lambda: machine.run(16))
    machine.slowness = 1.25
    parts = machine.lost(lambda: machine.run(16))
    assert parts["slower"] == pytest.approx(0.2, abs=0.04)
    assert parts["ideal"] == pytest.approx(clean["ideal"] / 1.25, abs=0.04)


def test_a_load_of_one_request_loses_nothing_to_few_rows_and_one_that_waits_does(machine: Machine) -> None:
    assert machine.lost(lambda: machine.run(1))["few_rows"] < 0.01
    machine.engine.core.scheduler._choose = lambda plan: _one_row(machine.engine.core.scheduler, plan)  # type: ignore[method-assign]
    parts = machine.lost(lambda: machine.run(16, prompt_tokens=1))
    assert parts["few_rows"] > 0.5


def _one_row(scheduler: Any, plan: Any) -> None:
    """A policy that computes one sequence at a time."""
    sequence = scheduler.running[0]
    scheduler._kv.ensure_free(sequence.n_pending)
    plan.scheduled = [(sequence, sequence.n_pending)]
    plan.n_decode = int(sequence.status.value == "decode")
    plan.row_groups = (1,) * plan.n_decode


def test_tokens_of_a_preempted_sequence_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, n_ctx=400, n_parallel=4, swap_space=0, prefix_cache=False)
    parts = machine.lost(lambda: machine.run(4, prompt_tokens=60, new_tokens=100))
    stats = machine.engine.stats()
    assert stats.recomputes
    again = stats.prompt_tokens - 4 * 60
    assert stats.lost_seconds["computed_again"] == pytest.approx(again * AFFINE.token_s, rel=0.05)
    assert parts["computed_again"] > 0.01
