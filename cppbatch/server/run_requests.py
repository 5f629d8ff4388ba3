"""Runs the engine requests of one HTTP request or batch line, and joins their events into one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import AbstractContextManager
from time import perf_counter

import msgspec

from cppbatch.cluster.engines.client import EngineClient
from cppbatch.engine.params import replace_fields
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, is_long
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull, client_names
from cppbatch.retries import Pauses
from cppbatch.server.http.api_errors import api_error

Event = tuple[int, GenerationEvent]
"""The index of a request, and one of its events."""

OnEvent = Callable[[int, GenerationEvent], object]
"""Called with the index of a request, and one of its events."""

_PAUSES = Pauses(0.02, 0.5)  # before a full queue is tried again


async def run_requests(
    client: EngineClient,
    requests: list[GenerationRequest],
    *,
    n_candidates: int = 1,
    check_first: bool = False,
    wait_when_full: bool = False,
    errors_as_events: bool = False,
    cancelled: Container[str] = (),
    waited: float = 0.0,
) -> AsyncGenerator[Event, None]:
    """Runs the requests in their order and yields (index, event) as events come. Closing it cancels all requests.

    At most `target_concurrency` requests are in the engine at once, so that requests of other clients run in between.
    Time spent waiting here counts as time in the queue.

    `n_candidates`: consecutive requests for each prompt. Errors name the prompt's index, if there are several prompts.
    `check_first`: no request starts before every prompt has been validated, so that a stream is refused as a whole or
    not at all. Long prompts are always checked first, because each request sends its own copy of the prompt.
    `wait_when_full`: retries while the queue is full, with increasing pauses, as long as the request's timeouts allow.
    Otherwise raises `QueueFull`; only a list too large to run at once waits, from its second request on.
    `errors_as_events`: a failed request ends with an event that has the error, and the others continue. Otherwise the
    others are cancelled and the exception is raised here.
    `cancelled`: with `wait_when_full`, ids of requests that must not start; ids may be added while this runs. Such a
    request has one event.
    `waited`: the seconds for which the requests have already waited for their model. They count as time in the queue.
    """
    if len(requests) > 1 and not errors_as_events:  # a single request is refused by the engine on submission
        await _check(client, requests[::n_candidates], only_long=not check_first)
    at_once, began = len(requests), perf_counter() - waited
    if at_once > client.config.n_parallel:  # `target_concurrency` asks the workers, which takes time
        at_once = min(at_once, await target_concurrency(client))

    if len(requests) == 1 and not errors_as_events and not wait_when_full:  # the common case needs no task
        async with contextlib.aclosing(client.submit(_with_less_time(requests[0], waited))) as stream:
            async for event in stream:
                yield 0, _with_wait(event, waited)
        return

    # two events are buffered for each running request while the reader is slow
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(2 * at_once)
    indices = iter(range(len(requests)))

    async def run_one(index: int) -> None:
        """Puts the events of a request into `events`. If it may wait, retries while the engine's queue is full."""
        request, pauses = requests[index], iter(_PAUSES)
        may_wait = wait_when_full or (len(requests) > at_once and index > 0)
        timeouts = [seconds for seconds in (request.timeout, request.queue_timeout) if seconds is not None]
        while request.id not in cancelled:
            so_far = perf_counter() - began if may_wait else waited
            has_started = False
            try:
                async with contextlib.aclosing(client.submit(_with_less_time(request, so_far))) as stream:
                    async for event in stream:
                        has_started = True
                        await events.put((index, _with_wait(event, so_far)))
                return
            except QueueFull:
                if has_started or not may_wait or so_far >= min(timeouts, default=float("inf")):
                    raise
            await asyncio.sleep(next(pauses))
        await events.put((index, GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)))

    async def run_one_after_another() -> None:
        for index in indices:
            try:
                with prompt_name(index // n_candidates, 1 if errors_as_events else len(requests) // n_candidates):
                    await run_one(index)
            except Exception as error:
                if not errors_as_events:
                    await events.put(error)
                    return
                await events.put((index, _error_event(requests[index], error)))

    tasks = [asyncio.create_task(run_one_after_another()) for _ in range(at_once)]
    n_running = len(requests)
    try:
        while n_running:
            item = await events.get()
            if isinstance(item, Exception):
                raise item
            n_running -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def target_concurrency(client: EngineClient) -> int:
    """The number of requests that keeps the engine busy: all that can run, plus up to the same number waiting, but at
    most half of the queue. If more workers can be started, enough requests wait to start all of them."""
    running = client.config.n_parallel * len(await client.workers())
    most = max(running, client.max_parallel)
    return running + min(2 * most - running, client.config.max_queue // 2)


async def _check(client: EngineClient, requests: list[GenerationRequest], *, only_long: bool) -> None:
    """Checks each prompt. `requests`: one for each."""
    for i, request in enumerate(requests):
        if not only_long or is_long(request.prompt):
            with prompt_name(i, len(requests)):
                await client.check(request)


def prompt_name(index: int, n_prompts: int, name: str = "prompt") -> AbstractContextManager[None]:
    """A context that names the prompt in errors about it: `name`, with its index if there are several prompts."""
    return client_names({"prompt": f"{name}[{index}]" if n_prompts > 1 else name})


def _with_less_time(request: GenerationRequest, waited: float) -> GenerationRequest:
    """The request with its timeouts reduced by the seconds that it has waited."""
    if not waited:
        return request
    left = {
        name: max(0.0, seconds - waited)
        for name in ("timeout", "queue_timeout")
        if (seconds := getattr(request, name)) is not None
    }
    return replace_fields(request, **left) if left else request


def _with_wait(event: GenerationEvent, waited: float) -> GenerationEvent:
    """The event with the waiting time added to the times in its usage."""
    if event.usage is None or not waited:
        return event
    usage = msgspec.structs.replace(
        event.usage,
        queue_seconds=event.usage.queue_seconds + waited,
        first_token_seconds=event.usage.first_token_seconds + waited if event.usage.first_token_seconds else 0.0,
        total_seconds=event.usage.total_seconds + waited,
    )
    return msgspec.structs.replace(event, usage=usage)


def _error_event(request: GenerationRequest, error: Exception) -> GenerationEvent:
    """The last event of a request that ended with an exception."""
    if isinstance(error, InvalidRequest):
        return GenerationEvent(
            request_id=request.id,
            finish_reason=FinishReason.ERROR,
            error=error.message,
            error_field=error.field,
            overflow=error.overflow,
        )
    if isinstance(error, EngineClosed):
        return GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
    return GenerationEvent(request_id=request.id, finish_reason=FinishReason.ERROR, error=api_error(error).message)
