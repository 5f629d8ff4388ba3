"""Several engine requests of one HTTP request: concurrency, retries, errors, cancellation, memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, RequestUsage
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull
from cppbatch.retries import Pauses
from cppbatch.server import run_requests as module
from cppbatch.server.run_requests import Event, run_requests, target_concurrency

N_EVENTS = 3
USAGE = RequestUsage(
    prompt_tokens=1, completion_tokens=N_EVENTS, queue_seconds=1.0, first_token_seconds=2.0, total_seconds=3.0
)


class FakeClient:
    """An engine client that sends `N_EVENTS` tokens for each request. What `before` raises, `submit` raises."""

    def __init__(self, *, n_parallel: int = 2, n_workers: int = 1, max_queue: int = 100, most_workers: int = 0) -> None:
        self.config = SimpleNamespace(n_parallel=n_parallel, max_queue=max_queue)
        self.max_parallel = n_parallel * (most_workers or n_workers)
        self.n_workers = n_workers
        self.n_asked_for_workers = 0
        self.checked: list[str] = []
        self.submitted: list[GenerationRequest] = []
        self.running = self.most_running = self.n_events = 0
        self.cancelled: list[str] = []
        self.before: Callable[[GenerationRequest], None] = lambda _: None

    async def workers(self) -> list[None]:
        self.n_asked_for_workers += 1
        return [None] * self.n_workers

    async def check(self, request: GenerationRequest) -> None:
        self.checked.append(str(request.prompt))
        if request.prompt == "bad":
            raise InvalidRequest("prompt", "is bad")

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.before(request)
        self.submitted.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended = False
        try:
            for i in range(N_EVENTS):
                await asyncio.sleep(0)
                self.n_events += 1
                yield GenerationEvent(request_id=request.id, text="x", tokens=[i])
            ended = True
            yield GenerationEvent(request_id=request.id, finish_reason=FinishReason.STOP, usage=USAGE)
        finally:
            self.running -= 1
            if not ended:
                self.cancelled.append(request.id)


def requests(n: int, prompt: str = "p", **options: Any) -> list[GenerationRequest]:
    return [GenerationRequest(id=f"r{i}", prompt=f"{prompt}{i}", **options) for i in range(n)]


def run(client: FakeClient, of: list[GenerationRequest], **options: Any) -> AsyncGenerator[Event, None]:
    return run_requests(client, of, **options)  # type: ignore[arg-type]


async def read(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", Pauses(0.001, 0.002))


# --- concurrency ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 50])
@pytest.mark.parametrize("errors_as_events", [False, True])
async def test_every_request_has_all_its_events_in_order(n: int, errors_as_events: bool) -> None:
    client = FakeClient()
    events = await read(run(client, requests(n), errors_as_events=errors_as_events))
    assert Counter(index for index, _ in events) == dict.fromkeys(range(n), N_EVENTS + 1)
    for i in range(n):
        own = [event for index, event in events if index == i]
        assert [event.tokens for event in own] == [[0], [1], [2], []]
        assert all(event.request_id == f"r{i}" for event in own)
    assert [request.id for request in client.submitted] == [f"r{i}" for i in range(n)]


async def test_no_requests_have_no_events() -> None:
    assert await read(run(FakeClient(), [], errors_as_events=True)) == []


async def test_the_number_of_workers_is_queried_only_if_not_all_requests_can_run_at_once() -> None:
    client = FakeClient(n_parallel=4)
    await read(run(client, requests(4)))
    assert (client.n_asked_for_workers, client.most_running) == (0, 4)
    await read(run(client, requests(5)))
    assert client.n_asked_for_workers == 1


async def test_a_job_has_enough_requests_in_the_engine_to_start_every_worker() -> None:
    client = FakeClient(n_parallel=16, n_workers=1, most_workers=4, max_queue=4096)
    assert await target_concurrency(client) == 2 * 4 * 16  # type: ignore[arg-type]
    client = FakeClient(n_parallel=16, n_workers=1, most_workers=4, max_queue=20)
    assert await target_concurrency(client) == 16 + 10  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"wait_when_full": True}, {"wait_when_full": True, "errors_as_events": True}])
async def test_no_more_requests_are_in_the_engine_than_keep_it_busy(options: dict[str, bool]) -> None:
    client = FakeClient(n_parallel=2, n_workers=2, max_queue=6)
    assert await target_concurrency(client) == 2 * 2 + 3  # type: ignore[arg-type]
    await read(run(client, requests(40), **options))
    assert client.most_running == 7


async def test_a_slow_reader_leaves_few_events_in_memory() -> None:
    client = FakeClient(n_parallel=2, max_queue=0)
    async with contextlib.aclosing(run(client, requests(30))) as events:
        await anext(events)
        await asyncio.sleep(0.02)
        assert client.n_events <= 1 + 2 * 2 + 2  # read, buffered, and one in the hands of each task


# --- validity and errors --------------------------------------------------------------------------------------------


async def test_no_request_starts_when_one_prompt_is_invalid_and_each_prompt_is_checked_once() -> None:
    client = FakeClient()
    of = [GenerationRequest(id=f"choice{i}", prompt=prompt) for prompt in ("same", "bad") for i in range(3)]
    with pytest.raises(InvalidRequest, match=r"prompt\[1\]: is bad"):
        await read(run(client, of, n_candidates=3, check_first=True))
    assert client.checked == ["same", "bad"]
    assert client.submitted == []


async def test_by_default_only_long_prompts_are_checked_first() -> None:
    client = FakeClient()
    long = GenerationRequest(id="long", prompt="x" * 40_000)
    await read(run(client, [*requests(2), long]))
    assert client.checked == [long.prompt]


@pytest.mark.parametrize(
    ("n_candidates", "field", "error_field"),
    [(1, "prompt", "prompt[4]"), (2, "prompt", "prompt[2]"), (6, "prompt", "prompt"), (1, "prompt[3]", "prompt[4][3]")],
)
async def test_an_error_names_the_prompt_that_the_engine_refuses(
    n_candidates: int, field: str, error_field: str
) -> None:
    client = FakeClient()

    def fail(request: GenerationRequest) -> None:
        if request.id == "r4":
            raise InvalidRequest(field, "is bad")

    client.before = fail
    with pytest.raises(InvalidRequest) as raised:
        await read(run(client, requests(6), n_candidates=n_candidates))
    assert raised.value.field == error_field


async def test_an_error_cancels_the_other_requests() -> None:
    client = FakeClient(n_parallel=3)

    def fail(request: GenerationRequest) -> None:
        if request.id == "r2":
            raise InvalidRequest("seed", "is odd")

    client.before = fail
    with pytest.raises(InvalidRequest, match="is odd"):
        await read(run(client, requests(3)))
    assert sorted(client.cancelled) == ["r0", "r1"]
    assert client.running == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("seed", "is odd"), (FinishReason.ERROR, "is odd", "seed")),
        (EngineClosed("closed"), (FinishReason.CANCELLED, None, None)),
        (RuntimeError("broken"), (FinishReason.ERROR, "internal error (RuntimeError)", None)),
    ],
)
@pytest.mark.parametrize("n", [1, 9])
async def test_an_error_can_be_the_last_event_of_its_request(error: Exception, expected: Any, n: int) -> None:
    client = FakeClient()

    def fail(request: GenerationRequest) -> None:
        if request.id == "r0":
            raise error

    client.before = fail
    events = await read(run(client, requests(n), errors_as_events=True))
    (failed,) = [event for index, event in events if index == 0]
    assert failed.finish_reason is expected[0]
    assert (failed.error or "").startswith(expected[1] or "")
    assert failed.error_field == expected[2]
    assert Counter(index for index, _ in events) == {0: 1, **dict.fromkeys(range(1, n), N_EVENTS + 1)}


@pytest.mark.parametrize("n", [1, 2, 20])
async def test_closing_cancels_every_running_request_and_starts_no_more(n: int) -> None:
    client = FakeClient()
    events = run(client, requests(n))
    await anext(events)
    await events.aclose()
    n_submitted = len(client.submitted)
    assert client.running == 0
    assert len(client.cancelled) == min(n, n_submitted)
    await asyncio.sleep(0.01)
    assert len(client.submitted) == n_submitted


# --- a full queue ---------------------------------------------------------------------------------------------------


def full_for(client: FakeClient, times: dict[str, int]) -> None:
    """The queue is full for this number of first requests."""
    left = Counter(times)

    def refuse(request: GenerationRequest) -> None:
        if left[request.id] > 0:
            left[request.id] -= 1
            raise QueueFull(8, 1.0)

    client.before = refuse


@pytest.mark.parametrize("n", [1, 2])
async def test_a_full_queue_refuses_requests_that_could_run_at_once(n: int) -> None:
    client = FakeClient(n_parallel=2)
    full_for(client, {f"r{n - 1}": 1})
    with pytest.raises(QueueFull):
        await read(run(client, requests(n)))


async def test_of_many_requests_the_first_is_refused_and_the_others_wait() -> None:
    client = FakeClient(n_parallel=2, max_queue=2)
    full_for(client, {"r4": 3, "r7": 2})
    assert len(await read(run(client, requests(9)))) == 9 * (N_EVENTS + 1)
    full_for(client, {"r0": 1})
    with pytest.raises(QueueFull):
        await read(run(client, requests(9)))


@pytest.mark.parametrize("n", [1, 2, 9])
async def test_all_requests_may_wait_and_their_times_count_from_the_start(n: int) -> None:
    client = FakeClient()
    full_for(client, {f"r{i}": 4 for i in range(n)})
    events = await read(run(client, requests(n, timeout=60.0, queue_timeout=30.0), wait_when_full=True))
    waited = 0.001 + 3 * 0.002
    for request in client.submitted:
        assert request.timeout is not None
        assert request.timeout < 60 - waited
        assert request.queue_timeout == pytest.approx(request.timeout - 30)
    for event in (event for _, event in events if event.finish_reason):
        assert event.usage is not None
        assert event.usage.queue_seconds > 1 + waited
        assert event.usage.first_token_seconds > 2 + waited
        assert event.usage.total_seconds > 3 + waited


async def test_waiting_ends_with_the_shorter_timeout() -> None:
    client = FakeClient()
    full_for(client, {"r0": 10_000})
    with pytest.raises(QueueFull):
        await read(run(client, requests(1, timeout=60.0, queue_timeout=0.02), wait_when_full=True))
    (index, event), *_ = await read(run(client, requests(1, timeout=0.02), wait_when_full=True, errors_as_events=True))
    assert (index, event.finish_reason) == (0, FinishReason.ERROR)


async def test_a_request_that_is_cancelled_before_its_turn_is_never_submitted() -> None:
    client = FakeClient(n_parallel=1, max_queue=0)
    cancelled = {"r2"}
    events = await read(run(client, requests(4), wait_when_full=True, cancelled=cancelled))
    assert [request.id for request in client.submitted] == ["r0", "r1", "r3"]
    assert [event.finish_reason for index, event in events if index == 2] == [FinishReason.CANCELLED]
    assert sum(event.finish_reason is FinishReason.STOP for _, event in events) == 3


async def test_a_request_that_is_cancelled_while_the_queue_is_full_is_not_tried_again() -> None:
    client = FakeClient()
    cancelled: set[str] = set()

    def refuse(request: GenerationRequest) -> None:
        cancelled.add(request.id)
        raise QueueFull(1, 1)

    client.before = refuse
    events = await read(run(client, requests(1), wait_when_full=True, errors_as_events=True, cancelled=cancelled))
    assert [event.finish_reason for _, event in events] == [FinishReason.CANCELLED]
