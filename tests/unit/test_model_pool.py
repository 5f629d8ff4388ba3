"""Which models are loaded: fake engines in virtual time, and a loader with a budget of memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from cppbatch.cluster.model_pool import ModelPool
from cppbatch.errors import (
    DoesNotFit,
    EngineClosed,
    LoadInterrupted,
    ModelError,
    ModelLoadFailed,
    ModelNotLoaded,
    QueueFull,
)
from tests.support.randomised import seeds
from tests.support.virtual_time import run_in_virtual_time

LOAD_S, CLOSE_S = 2.0, 0.5


class FakeEngine:
    """Takes `seconds` to load. Notes when it is closed while requests use it."""

    def __init__(self, loader: FakeLoader, size: int, error: Exception | None, seconds: float) -> None:
        self.loader, self.size, self.error, self.seconds = loader, size, error, seconds
        self.used_by = 0
        self.closed = False
        loader.in_memory += size
        assert loader.in_memory <= loader.budget, "more is loaded than fits"

    async def loaded(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error

    async def close(self) -> None:
        if self.used_by:
            self.loader.cut_off += self.used_by
        await asyncio.sleep(self.loader.close_s)
        self.closed = True
        self.loader.in_memory -= self.size


class FakeLoader:
    """Models of `sizes` fit together up to `budget`. A plan is the model's size."""

    def __init__(self, sizes: dict[str, int], budget: int = 2) -> None:
        self.sizes, self.budget = sizes, budget
        self.in_memory = self.cut_off = self.n_plans = 0
        self.errors: dict[str, list[Exception]] = {}
        """By model: what the next loads raise."""
        self.seconds: dict[str, list[float]] = {}
        """By model: how long the next loads take."""
        self.plan_s, self.close_s = 0.1, CLOSE_S
        self.n_started = 0

    async def plan(self, name: str, others: Sequence[int], pinned: Sequence[int]) -> int:
        self.n_plans += 1
        await asyncio.sleep(self.plan_s)
        size = self.sizes[name]
        if size + sum(others) > self.budget:
            raise DoesNotFit(f"needs {size}", never=size + sum(pinned) > self.budget)
        return size

    def start(self, name: str, plan: int) -> FakeEngine:
        self.n_started += 1
        errors, seconds = self.errors.get(name, []), self.seconds.get(name, [])
        return FakeEngine(self, plan, errors.pop(0) if errors else None, seconds.pop(0) if seconds else LOAD_S)


Pool = ModelPool[int, FakeEngine]


def pool_of(loader: FakeLoader, *, max_loaded: int = 0, ttl: float = -1, pinned: Sequence[str] = ()) -> Pool:
    pool: Pool = ModelPool(loader, max_loaded=max_loaded)
    for name in loader.sizes:
        pool.add(name, ttl=ttl, pinned=name in pinned, max_waiting=100)
    return pool


async def use(pool: Pool, name: str, seconds: float, timeout: float | None = None) -> float:
    """A request. Returns the time at which it began to run."""
    lease = await pool.lease(name, timeout=timeout)
    began = now()
    lease.engine.used_by += 1
    try:
        await asyncio.sleep(seconds)
        assert not lease.engine.closed
    finally:
        lease.engine.used_by -= 1
        lease.release()
    return began


def now() -> float:
    return asyncio.get_running_loop().time()


def states(pool: Pool) -> dict[str, str]:
    return {name: model.state for name, model in pool.models.items()}


async def later(seconds: float, pool: Pool, name: str, duration: float) -> float:
    await asyncio.sleep(seconds)
    return await use(pool, name, duration)


def test_a_model_is_loaded_by_its_first_request_and_stays() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1}))
        assert states(pool) == {"a": "unloaded", "b": "unloaded"}
        asked = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(1)
        assert states(pool) == {"a": "loading", "b": "unloaded"}
        assert await asked >= LOAD_S
        before = now()
        assert await use(pool, "a", 1) == before, "a loaded model answers at once"
        assert (pool.models["a"].loads, pool.models["a"].state) == (1, "loaded")
        await pool.close()

    run_in_virtual_time(main())


def test_the_least_recently_used_idle_model_leaves() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1, "c": 1}))
        for name in ("a", "b", "a"):
            await use(pool, name, 1)
        await use(pool, "c", 1)
        assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert pool.models["b"].unloads == {"evicted": 1}
        await pool.close()

    run_in_virtual_time(main())


def test_a_busy_model_is_drained_and_never_cut_off() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1, "b": 1}, budget=1)
        pool = pool_of(loader)
        long = asyncio.create_task(use(pool, "a", 100))
        await asyncio.sleep(10)
        other = asyncio.create_task(use(pool, "b", 1))
        await asyncio.sleep(10)
        assert pool.models["a"].state == "unloading"
        late = asyncio.create_task(use(pool, "a", 1))  # does not extend the drain
        began = await long
        assert await other > began + 100
        assert await late > await other
        assert loader.cut_off == 0
        await pool.close()

    run_in_virtual_time(main())


def test_an_idle_model_leaves_instead_of_one_that_is_being_drained() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1, "c": 1}))
        a, b = asyncio.create_task(use(pool, "a", 1000)), asyncio.create_task(use(pool, "b", 50))
        await asyncio.sleep(20)
        c, more_a = asyncio.create_task(use(pool, "c", 1)), asyncio.create_task(later(1, pool, "a", 1))
        assert await c < 70, "it waited for the shorter request of b"
        assert await more_a < 70, "a gets requests again"
        assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert await a + 1000 > await b + 50
        await pool.close()

    run_in_virtual_time(main())


def test_a_client_that_disconnects_causes_no_model_to_be_unloaded() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1}, budget=1))
        busy = asyncio.create_task(use(pool, "a", 30))
        await asyncio.sleep(10)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.lease("b"), 5)
        before = now()
        assert await use(pool, "a", 1) == before, "a is not drained any more"
        await busy
        await asyncio.sleep(10)
        assert states(pool) == {"a": "loaded", "b": "unloaded"}
        await pool.close()

    run_in_virtual_time(main())


def test_requests_for_one_model_share_a_load_and_models_are_loaded_in_the_order_of_requests() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1, "c": 1}, budget=1))
        busy = asyncio.create_task(use(pool, "a", 10))
        await asyncio.sleep(5)
        first = asyncio.create_task(use(pool, "b", 1))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(use(pool, "c", 1))
        thirds = [asyncio.create_task(use(pool, "b", 1)) for _ in range(5)]
        await asyncio.gather(busy, first, second, *thirds)
        assert first.result() < second.result()
        assert {third.result() for third in thirds} == {first.result()}
        assert [pool.models[name].loads for name in "abc"] == [1, 1, 1]
        await pool.close()

    run_in_virtual_time(main())


def test_at_most_max_loaded_models_are_loaded() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader(dict.fromkeys("abc", 1), budget=10), max_loaded=2)
        for name in "abc":
            await use(pool, name, 1)
        assert states(pool) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        await pool.close()

    run_in_virtual_time(main())


def test_a_pinned_model_is_loaded_at_the_start_and_stays() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1, "b": 1, "c": 1, "huge": 2})
        pool = pool_of(loader, pinned="a", ttl=60)
        await asyncio.sleep(5)
        assert pool.models["a"].state == "loaded"
        for name in "bcb":
            await use(pool, name, 1)
        await asyncio.sleep(100)
        assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded", "huge": "unloaded"}
        await use(pool, "b", 1)
        with pytest.raises(ModelLoadFailed, match="needs 2"):
            await pool.lease("huge")
        assert pool.models["b"].state == "loaded", "no model left for one that cannot fit"
        await pool.close()

    run_in_virtual_time(main())


def test_an_idle_model_leaves_after_its_ttl() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1}), ttl=60)
        await asyncio.gather(use(pool, "a", 100), use(pool, "b", 1))
        await asyncio.sleep(1)
        assert states(pool) == {"a": "loaded", "b": "unloaded"}
        await asyncio.sleep(58)
        assert pool.models["a"].state == "loaded"
        await asyncio.sleep(3)
        assert pool.models["a"].unloads == {"idle": 1}
        await pool.close()

    run_in_virtual_time(main())


def test_a_failure_to_load_affects_only_its_requests_and_is_retried_with_growing_delays() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1, "bad": 1})
        loader.errors["bad"] = [ModelError("broken file"), ModelError("still broken")]
        pool = pool_of(loader)
        good = asyncio.create_task(use(pool, "a", 100))
        for pause in (1, 2):
            with pytest.raises(ModelLoadFailed, match="broken"):
                await pool.lease("bad")
            with pytest.raises(ModelLoadFailed) as refused:  # at once, without another load
                await pool.lease("bad")
            assert refused.value.retry_after == pytest.approx(pause)
            await asyncio.sleep(pause)
        await use(pool, "bad", 1)
        assert (pool.models["bad"].load_failures, pool.models["bad"].error) == (2, None)
        await good
        await pool.close()

    run_in_virtual_time(main())


def test_a_load_that_was_killed_from_outside_is_repeated() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1})
        loader.errors["a"] = [LoadInterrupted("killed"), LoadInterrupted("killed")]
        pool = pool_of(loader)
        await use(pool, "a", 1)
        loader.errors["a"] = [LoadInterrupted("killed")] * 3
        pool.unload("a")
        with pytest.raises(ModelLoadFailed, match="killed"):
            await use(pool, "a", 1)
        await pool.close()

    run_in_virtual_time(main())


def test_load_and_unload_by_hand() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1, "b": 1}, budget=1)
        pool = pool_of(loader)
        with pytest.raises(ModelNotLoaded):
            await pool.lease("a", load=False)
        pool.load("a")
        await asyncio.sleep(5)
        busy = asyncio.create_task(use(pool, "a", 20))
        await asyncio.sleep(1)
        pool.unload("a")
        waits = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(1)
        assert states(pool)["a"] == "unloading"
        assert await waits > await busy + 20
        assert (pool.models["a"].loads, pool.models["a"].unloads) == (2, {"asked": 1})
        pool.unload("a")
        pool.load("a")  # it stays, or comes back
        await asyncio.sleep(10)
        assert pool.models["a"].state == "loaded"
        assert loader.cut_off == 0
        await pool.close()

    run_in_virtual_time(main())


def test_a_removed_model_ends_its_requests_and_makes_room_for_its_successor() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1}, budget=1)
        pool = pool_of(loader)
        busy = asyncio.create_task(use(pool, "a", 20))
        await asyncio.sleep(5)
        pool.remove("a")
        pool.add("a")  # the file has changed
        assert await use(pool, "a", 1) > await busy + 20
        assert loader.cut_off == 0
        await pool.close()
        assert loader.in_memory == 0

    run_in_virtual_time(main())


def test_requests_for_a_model_that_changes_while_it_is_loaded_get_the_new_one() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1}, budget=1)
        pool = pool_of(loader)
        waiting = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(1)
        pool.add("a")  # its settings have changed
        left = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(0)
        left.cancel()
        both = asyncio.gather(waiting, use(pool, "a", 1))
        for began in await asyncio.wait_for(both, 60):
            assert began == pytest.approx(1 + CLOSE_S + 0.1 + LOAD_S), "the load of the old one is stopped"
        assert (pool.models["a"].leases, pool.models["a"].waiting) == (0, 0)
        await pool.close()
        assert loader.in_memory == 0

    run_in_virtual_time(main())


def test_a_pinned_model_that_has_changed_is_loaded_in_place_of_the_old_one() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 2}, budget=2)
        pool = pool_of(loader, pinned="a")
        await asyncio.sleep(5)
        pool.add("a", pinned=True)
        await asyncio.sleep(5)
        assert (pool.models["a"].state, pool.models["a"].error) == ("loaded", None)
        await pool.close()

    run_in_virtual_time(main())


def test_more_requests_than_the_queue_holds_are_refused_and_closing_ends_the_others() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1})
        pool: Pool = ModelPool(loader)
        pool.add("a", max_waiting=2)
        waiting = [asyncio.create_task(pool.lease("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await pool.lease("a")
        await asyncio.sleep(1)
        await pool.close()
        for each in waiting:
            with pytest.raises(EngineClosed):
                await each
        assert loader.in_memory == 0

    run_in_virtual_time(main())


HANGS = 1e6


@pytest.mark.parametrize("phase", ["planning", "loading"])
def test_a_load_stops_when_its_last_request_leaves_and_the_next_model_is_loaded(phase: str) -> None:
    async def main() -> None:
        loader = FakeLoader({"slow": 1, "b": 1})
        loader.plan_s = HANGS if phase == "planning" else 0.1
        loader.seconds["slow"] = [HANGS]
        loader.close_s = HANGS  # killing a process that waits for a disk has no effect yet
        pool = pool_of(loader)
        clients = [asyncio.create_task(use(pool, "slow", 1)) for _ in range(3)]
        await asyncio.sleep(1)
        for client in clients[:2]:
            client.cancel()
        await asyncio.sleep(1)
        assert states(pool)["slow"] == "loading", "one request still waits for it"
        clients[2].cancel()
        loader.plan_s = 0.1
        await asyncio.sleep(0.01)
        assert states(pool)["slow"] == ("unloading" if phase == "loading" else "unloaded")
        before = now()
        assert await use(pool, "b", 1) == pytest.approx(before + 0.1 + LOAD_S)
        model = pool.models["slow"]
        assert (model.loads, model.load_failures, model.error, dict(model.unloads)) == (0, 0, None, {})
        await pool.close()

    run_in_virtual_time(main())


def test_a_request_that_comes_while_a_load_is_being_stopped_gets_a_new_one() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1}, budget=1)
        loader.seconds["a"] = [HANGS]
        pool = pool_of(loader)
        client = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(1)
        client.cancel()
        await asyncio.sleep(0)
        before = now()
        for began in await asyncio.gather(use(pool, "a", 1), later(0.2, pool, "a", 1)):
            assert began == pytest.approx(before + CLOSE_S + 0.1 + LOAD_S)
        await pool.close()
        assert (loader.in_memory, loader.n_started) == (0, 2)

    run_in_virtual_time(main())


def test_a_request_that_joins_a_load_at_the_moment_when_another_one_leaves_keeps_it() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1})
        pool = pool_of(loader)
        first = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(1)
        second = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == pytest.approx(0.1 + LOAD_S)
        assert loader.n_started == 1
        await pool.close()

    run_in_virtual_time(main())


def test_keeping_a_model_for_no_time_does_not_end_requests_that_wait_for_it() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1}, budget=1))
        waiting = asyncio.create_task(use(pool, "a", 1))
        await asyncio.sleep(LOAD_S / 2)
        pool.keep("a", 0)
        await waiting
        states: list[str] = [pool.models["a"].state]
        pool.keep("a", 0)
        await asyncio.sleep(2 * CLOSE_S)
        states.append(pool.models["a"].state)
        assert states == ["loaded", "unloaded"]
        await pool.close()

    run_in_virtual_time(main())


def test_unload_stops_a_load_and_ends_the_requests_that_wait_for_it() -> None:
    async def main() -> None:
        loader = FakeLoader({"a": 1, "b": 1}, budget=1)
        loader.seconds["a"] = [HANGS, HANGS]
        pool = pool_of(loader)
        waiting, other = asyncio.create_task(use(pool, "a", 1)), asyncio.create_task(later(0.1, pool, "b", 1))
        await asyncio.sleep(1)
        pool.unload("a")
        with pytest.raises(ModelLoadFailed, match="was unloaded while it was loading") as failed:
            await waiting
        assert failed.value.retry_after == 1
        assert states(pool)["a"] == "unloading"
        assert await other == pytest.approx(1 + CLOSE_S + 0.1 + LOAD_S)
        pool.load("a")
        await asyncio.sleep(3)
        assert states(pool) == {"a": "loading", "b": "unloaded"}
        pool.unload("a")
        await asyncio.sleep(CLOSE_S + 0.1)
        assert states(pool)["a"] == "unloaded"
        await use(pool, "a", 1)
        assert (pool.models["a"].loads, pool.models["a"].load_failures) == (1, 0)
        await pool.close()

    run_in_virtual_time(main())


def test_a_model_that_is_pinned_or_loaded_by_hand_needs_no_request_to_wait_for_it() -> None:
    async def main() -> None:
        pool = pool_of(FakeLoader({"a": 1, "b": 1}), pinned="a")
        pool.load("b")
        for name in "ab":
            client = asyncio.create_task(use(pool, name, 1))
            await asyncio.sleep(0.5)
            client.cancel()
        await asyncio.sleep(5)
        assert states(pool) == {"a": "loaded", "b": "loaded"}
        await pool.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("other_waits", [False, True])
def test_a_load_for_a_request_that_ran_out_of_time_continues_while_no_other_model_waits(other_waits: bool) -> None:
    """Such a request is repeated, and would never be answered if each repetition started a load of its own."""

    async def main() -> None:
        loader = FakeLoader({"a": 1, "b": 1})
        loader.seconds["a"] = [10]
        pool = pool_of(loader)
        with pytest.raises(asyncio.TimeoutError):
            await pool.lease("a", timeout=5)
        assert states(pool)["a"] == "loading"
        if other_waits:
            assert await use(pool, "b", 1) == pytest.approx(5 + 0.1 + LOAD_S)
            assert states(pool)["a"] == "unloaded"
        await asyncio.sleep(5.1)
        assert states(pool)["a"] == ("unloaded" if other_waits else "loaded")
        await pool.close()
        assert loader.in_memory == 0

    run_in_virtual_time(main())


@seeds(ring=20, nightly=60)
def test_random_schedules(seed: int) -> None:
    """Requests, clients that leave, failures, loads and unloads by hand, files that change: every request ends, no
    running one is cut off, and no more is loaded than fits (`FakeEngine` asserts it)."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(rng.randint(2, 6))]
    budget = rng.randint(2, 6)
    loader = FakeLoader({name: rng.randint(1, budget) for name in names}, budget)
    ended: list[str] = []

    async def client(pool: Pool) -> None:
        for _ in range(20):
            name = rng.choice(names)
            await asyncio.sleep(rng.expovariate(1 / rng.choice((0.1, 3, 30))))
            patience, timeout = rng.choice((0.5, 5, 1e6)), rng.choice((None, 3))
            request = asyncio.create_task(use(pool, name, rng.expovariate(1 / rng.choice((0.1, 5, 50))), timeout))
            try:
                await asyncio.wait_for(request, patience)
                ended.append("ok")
            except asyncio.TimeoutError:
                ended.append("left")
            except (ModelLoadFailed, ModelNotLoaded) as error:
                ended.append(type(error).__name__)

    async def operator(pool: Pool) -> None:
        for _ in range(30):
            await asyncio.sleep(rng.expovariate(1 / 10))
            name = rng.choice(names)
            assert all(model.engine is None for model in pool.models.values() if model.state == "unloaded")
            action = rng.choice(("load", "unload", "change", "break", "kill", "slow"))
            if action == "load":
                pool.load(name)
            elif action == "unload":
                pool.unload(name)
            elif action == "change":
                if rng.random() < 0.5:
                    pool.remove(name)
                pool.add(name, ttl=rng.choice((-1, 5)), max_waiting=100)
            elif action == "slow":
                loader.seconds.setdefault(name, []).append(500)
            else:
                error = ModelError("broken") if action == "break" else LoadInterrupted("killed")
                loader.errors.setdefault(name, []).append(error)

    async def main() -> None:
        pool = pool_of(loader, max_loaded=rng.choice((0, 0, 1, 3)), ttl=rng.choice((-1, 20)))
        await asyncio.gather(*(client(pool) for _ in range(8)), operator(pool))
        assert len(ended) == 160
        assert loader.cut_off == 0
        assert all(model.leases == model.waiting == 0 for model in pool.models.values())
        await asyncio.sleep(1000)
        assert all(model.state in ("loaded", "unloaded") for model in pool.models.values())
        await pool.close()
        assert loader.in_memory == 0

    run_in_virtual_time(main())
