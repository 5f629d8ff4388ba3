"""Runs a workload on an engine: adds each request at its arrival time and records its tokens and latencies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter, sleep

from cppbatch.bench.resource_usage import ResourceUsage
from cppbatch.bench.strategies.offline_workload import TimedRequest
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import GenerationFailed

_POLL_S = 0.001  # between checks for arrivals and collected batches while no sequence runs


@dataclass(frozen=True)
class WorkloadRun:
    """The result of a workload. Lists are in the order of the requests; times are in seconds from arrival."""

    seconds: float
    tokens: list[list[int]]
    first_token: list[float]
    latency: list[float]
    wait: list[float]
    """Until a request is admitted."""
    padding_percent: float
    """Share of the computed tokens that no request needed."""
    mean_rows: float
    """Mean number of sequences in a decode step."""
    cpu_percent: float
    gpu_percent: float | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the whole run."""
        return sum(map(len, self.tokens)) / self.seconds


def run_workload(engine: BatchInferenceEngine, requests: list[TimedRequest]) -> WorkloadRun:
    """Runs the requests greedily and to their full length, each from its arrival time.

    A request that arrives during a step is added after it, and the wait counts. Raises `GenerationFailed` if a request
    ends early.
    """
    n = len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    late, first_token, latency, wait = [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    pending = deque(enumerate(requests))
    before = engine.stats()
    with ResourceUsage() as usage:
        began = perf_counter()
        while pending or engine.has_work:
            while pending and pending[0][1].at <= (now := perf_counter() - began):
                i, request = pending.popleft()
                late[i] = now - request.at
                params = SamplingParams(temperature=0, max_tokens=request.n_new, ignore_eos=True)
                engine.add_request(request.prompt, params, request_id=str(i))
            events = engine.step() if engine.has_work and not engine.core.collecting_s() else []
            for event in events:
                i = int(event.request_id)
                tokens[i] += event.tokens
                if event.usage:
                    if len(tokens[i]) != requests[i].n_new:
                        raise GenerationFailed(f"request {i} ended after {len(tokens[i])} tokens: {event.error}")
                    wait[i] = late[i] + event.usage.queue_seconds
                    first_token[i] = late[i] + event.usage.first_token_seconds
                    latency[i] = late[i] + event.usage.total_seconds
            if not events and not engine.core.scheduler.running:
                sleep(_POLL_S)
        seconds = perf_counter() - began
    after = engine.stats()
    rows, steps = after.decode_rows - before.decode_rows, after.decode_steps - before.decode_steps
    computed = rows + after.prompt_tokens - before.prompt_tokens
    needed = sum(len(request.prompt) + request.n_new - 1 for request in requests)  # the last token is not computed
    return WorkloadRun(
        seconds=seconds,
        tokens=tokens,
        first_token=first_token,
        latency=latency,
        wait=wait,
        padding_percent=max(0.0, 100 * (1 - needed / computed)),
        mean_rows=rows / steps if steps else 0.0,
        cpu_percent=usage.cpu_percent,
        gpu_percent=usage.gpu_percent,
    )
