"""What happened to the requests of a fleet, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import msgspec
import numpy as np
from measuring import markdown_table

from fleet.conversations import Load, SimulatedRequest
from fleet.replica import SimulatedReplica


@dataclass
class FleetRun:
    """What happened in a simulation."""

    finished: list[SimulatedRequest] = field(default_factory=list)
    replicas: list[SimulatedReplica] = field(default_factory=list)
    """All that ever were."""
    sizes: list[tuple[float, int, int, int]] = field(default_factory=list)
    """With autoscaling, each second: time, target, replicas that take requests, ongoing requests."""
    replica_s: float = 0.0
    """Seconds of all replicas together, from their start to their end."""
    busy_s: float = 0.0
    """The part of it in which a step was computed."""
    end_s: float = 0.0
    began: float = field(default_factory=perf_counter)

    def clock(self) -> float:
        """Returns the seconds since the run was created, for a run in real time."""
        return perf_counter() - self.began


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


def results_table(results: Sequence[FleetResult]) -> str:
    """Returns the figures as Markdown."""
    titles = [
        "routing", "requests", "output tokens/s", "hit rate (possible)", "prompt tokens computed", "TTFT p50, s",
        "TTFT p95, s", "ms a token p50 / p95", "busy", "load p95", "wall, s",
    ]  # fmt: skip
    rows = [
        [
            r.routing, f"{r.requests:,}", f"{r.output_tokens_s:,.0f}", f"{r.hit_rate:.0%} ({r.possible_hit_rate:.0%})",
            f"{r.computed_prompt_tokens:,}", f"{r.ttft_p50:.2f}", f"{r.ttft_p95:.2f}",
            f"{1e3 * r.token_p50:.0f} / {1e3 * r.token_p95:.0f}", f"{r.busy:.0%}", f"{r.load_p95:.2f}",
            f"{r.wall_s:.0f}",
        ]
        for r in results
    ]  # fmt: skip
    return markdown_table(titles, rows)
