"""Lets requests arrive at an engine, and notes what became of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter, sleep

from cppbatch.bench.strategies.offline_workload import TimedRequest
from cppbatch.bench.strategies.resource_usage import ResourceUsage
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import GenerationFailed

_PAUSE_S = 0.001  # while nobody runs: before it is seen whether anybody has come or a batch is due


@dataclass(frozen=True)
class WorkloadRun:
    """What one engine made of the jobs. Lists are in the jobs' order, times in seconds from a job's arrival."""

    seconds: float
    tokens: list[list[int]]
    first_token: list[float]
    latency: list[float]
    mean_rows: float
    """Sequences in a step that decodes."""
    cpu_percent: float
    gpu_percent: float | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time."""
        return sum(map(len, self.tokens)) / self.seconds


def run_workload(engine: BatchInferenceEngine, jobs: list[TimedRequest]) -> WorkloadRun:
    """Runs the jobs, greedily and to their full length, each from the moment when it is due.

    One that is due in the midst of a step is added behind it; that wait counts. Raises `GenerationFailed` for a job
    that ended early.
    """
    n = len(jobs)
    tokens: list[list[int]] = [[] for _ in jobs]
    late, first_token, latency = [0.0] * n, [0.0] * n, [0.0] * n
    coming = deque(enumerate(jobs))
    before = engine.stats()
    with ResourceUsage() as usage:
        began = perf_counter()
        while coming or engine.has_work:
            while coming and coming[0][1].at <= (now := perf_counter() - began):
                i, job = coming.popleft()
                late[i] = now - job.at
                params = SamplingParams(temperature=0, max_tokens=job.n_new, ignore_eos=True)
                engine.add_request(job.prompt, params, request_id=str(i))
            events = engine.step() if engine.has_work else []
            for event in events:
                i = int(event.request_id)
                tokens[i] += event.tokens
                if event.usage:
                    if len(tokens[i]) != jobs[i].n_new:
                        raise GenerationFailed(f"request {i} ended after {len(tokens[i])} tokens: {event.error}")
                    first_token[i] = late[i] + event.usage.first_token_seconds
                    latency[i] = late[i] + event.usage.total_seconds
            if not events and not engine.running:
                sleep(_PAUSE_S)
        seconds = perf_counter() - began
    after = engine.stats()
    rows, steps = after.decode_rows - before.decode_rows, after.decode_steps - before.decode_steps
    return WorkloadRun(
        seconds=seconds,
        tokens=tokens,
        first_token=first_token,
        latency=latency,
        mean_rows=rows / steps if steps else 0.0,
        cpu_percent=usage.cpu_percent,
        gpu_percent=usage.gpu_percent,
    )
