"""The types of `GET /live`: what the server does now."""

from __future__ import annotations

from typing import Literal

import msgspec

from cppbatch.cluster.engine_client import Health, ScalingState, WorkerLive
from cppbatch.jobs.batch_records import BatchStatus


class RecentTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Recent times in seconds, seen where text is sent to clients."""

    n: int
    """How many. 0: the others are None."""
    p50: float | None
    p95: float | None


class LiveInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a worker between its last two states."""

    seconds: float
    steps: int
    tokens_per_second: float
    """Generated tokens."""
    prompt_tokens_per_second: float
    """Computed prompt tokens."""
    batch_size: float
    """Decode rows of a step, the mean of the steps that had any."""
    drafted_tokens: int
    accepted_tokens: int
    phases: dict[str, float]
    """Seconds of each phase of the steps: schedule, fill, decode, sample, advance, text, emit. The last two may overlap
    with the next step."""


class LiveWorker(WorkerLive, frozen=True, kw_only=True):
    """A worker, or a replica, with what it did last."""

    interval: LiveInterval | None
    """None until there are two states of the same process, and while it has nothing to do."""


class LiveBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An open batch job."""

    id: str
    status: BatchStatus
    total: int
    """Lines; 0 until the whole input was read."""
    completed: int
    failed: int
    created_at: int
    """Unix time."""


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One event of `GET /live`."""

    object: Literal["live"] = "live"
    time: float
    """Unix time."""
    model: str
    health: Health
    draining: bool
    """The server is shutting down."""
    scaling: ScalingState | None
    """How many workers run, start and drain; None where their number is fixed."""
    batches: list[LiveBatch]
    """The open batch jobs that this key may see."""
    tokens_per_second: float
    """Generated, the sum over the workers."""
    prompt_tokens_per_second: float
    first_token_seconds: RecentTimes
    """TTFT: of the last 10 seconds."""
    inter_token_seconds: RecentTimes
    """From one token of a text to the next: of the last second."""
    workers: list[LiveWorker]
