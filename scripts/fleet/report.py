"""The figures of a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from fleet.conversations import Load
from fleet.simulated_request import SimulatedRequest
from fleet.simulation import FleetRun


class FleetResult(msgspec.Struct, kw_only=True):
    """For the requests that arrived after the warm-up, unless stated otherwise."""

    routing: str
    replicas: float
    """In the mean over the whole run."""
    requests: int
    """All that were sent and ended, those of the warm-up too."""
    requests_s: float
    output_tokens_s: float
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Prompt tokens taken from a prefix cache, by prompt tokens."""
    possible_hit_rate: float
    """The same if one cache held everything that was ever computed."""
    computed_prompt_tokens: int
    ttft_p50: float
    ttft_p95: float
    token_p50: float
    """Seconds between two tokens of a request, the mean of the request."""
    token_p95: float
    busy: float
    """Part of the replicas' time in which a step is computed, over the whole run."""
    load_p95: float
    """The 95th percentile over replicas of prompt and output tokens, by their mean."""
    wall_s: float = 0.0
    """Real seconds that the simulation took."""


def fleet_result(run: FleetRun, load: Load, *, routing: str, warm_up_s: float) -> FleetResult:
    """Sums a run up. Throughput is counted from the end of the warm-up to the end of the arrivals."""
    measured = [request for request in run.finished if request.arrived_at >= warm_up_s]
    prompt = sum(request.n_prompt for request in measured)
    cached = sum(request.n_cached for request in measured)
    ttft = [request.ttft for request in measured]
    token_s = [
        (request.finished_at - request.first_token_at) / (request.n_output - 1)
        for request in measured
        if request.n_output > 1
    ]
    in_time = [request for request in run.finished if warm_up_s <= request.finished_at < load.seconds]
    seconds = load.seconds - warm_up_s
    work = np.zeros(1 + max(request.replica for request in run.finished))
    for request in run.finished:
        work[request.replica] += request.n_prompt + request.n_output
    return FleetResult(
        routing=routing,
        replicas=run.replica_s / run.end_s,
        requests=len(run.finished),
        requests_s=len(in_time) / seconds,
        output_tokens_s=sum(request.n_output for request in in_time) / seconds,
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=cached / max(1, prompt),
        possible_hit_rate=possible_hits(run.finished, warm_up_s) / max(1, prompt),
        computed_prompt_tokens=prompt - cached,
        ttft_p50=_percentile(ttft, 50),
        ttft_p95=_percentile(ttft, 95),
        token_p50=_percentile(token_s, 50),
        token_p95=_percentile(token_s, 95),
        busy=run.busy_s / run.replica_s,
        load_p95=float(np.percentile(work, 95) / work.mean()),
    )


def possible_hits(requests: Sequence[SimulatedRequest], warm_up_s: float) -> int:
    """Prompt tokens after the warm-up that an earlier request had, as prompt or as output, with the same tokens before.

    Prompts share nothing but a system prompt and the turns before, so these are what an earlier request is asked for.
    """
    hits, systems, answered = 0, set[int](), dict[int, int]()
    for request in sorted(requests, key=lambda request: request.arrived_at):
        n = answered.get(request.conversation, request.n_system if request.system in systems else 0)
        if request.arrived_at >= warm_up_s:
            hits += n
        systems.add(request.system)
        answered[request.conversation] = request.n_prompt + request.n_output - 1
    return hits


def _percentile(values: Sequence[float], p: float) -> float:
    return float(np.percentile(values, p)) if values else 0.0
