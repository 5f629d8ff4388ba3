"""Rules, without I/O, for routing requests to workers or replicas, for the number of workers, and for their times."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from cppbatch.engine.request import GenerationRequest, Media, MediaPrompt, Pair, text_of_part
from cppbatch.errors import ConfigError

# --- prefix router ---------------------------------------------------------------------------------------------------
# Chooses the member of a fleet for a request: the one with its prefix, unless the queues are unbalanced.
#
# A member is a worker process or a replica: it has a queue and a prefix cache. Members are not queried for their cache:
# the router remembers which prompts were sent to which member.


_MIN_LENGTH = 64  # characters
_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_REQUEST = 64  # a known prefix of this length outweighs one more request in the queue
_MAX_PREFIXES = 8192  # remembered per member

Member = TypeVar("Member", bound=Hashable)


class Prefix(NamedTuple):
    """The start of a prompt."""

    n_tokens: int
    """The length of the prefix; 4 characters of a text count as a token."""
    hash: int
    """Hash of its text or token ids, with the cache salt and the LoRA adapters. Only valid in this process."""


class PrefixRouter(Generic[Member]):
    """The routing rule. Has no list of members: each choice gets the members and their numbers of requests.

    Chooses the member with the fewest requests. A member that was sent a prefix of the prompt may have one more request
    per 64 tokens of the prefix, up to n_parallel / 4 more.
    """

    def __init__(self, n_parallel: int) -> None:
        self._max_extra_requests = max(1, n_parallel // 4)
        self._prefixes: dict[Member, OrderedDict[Prefix, None]] = {}  # by member, least recently used first
        self._holders: dict[Prefix, dict[Member, None]] = {}

    def choose(self, prefixes: Sequence[Prefix], loads: Mapping[Member, int]) -> Member:
        """The member for a request with these prefixes (`prompt_prefixes`).

        `loads`: the number of unfinished requests of each available member, at least one; ties go to the first. The
        choice is not recorded: call `note` when the request is sent.
        """
        chosen = min(loads, key=loads.__getitem__)
        least = loads[chosen]
        best = (least, 0)
        for prefix in reversed(prefixes):
            n_extra = min(self._max_extra_requests, prefix.n_tokens // _TOKENS_PER_REQUEST)
            if best < (least - n_extra, -prefix.n_tokens):
                break  # no member with a shorter prefix can be better
            for member in self._holders.get(prefix, ()):
                if (load := loads.get(member)) is not None and (load - n_extra, -prefix.n_tokens) < best:
                    chosen, best = member, (load - n_extra, -prefix.n_tokens)
        return chosen

    def note(self, prefixes: Sequence[Prefix], member: Member) -> None:
        """Records that a request with these prefixes was sent to the member."""
        known = self._prefixes.setdefault(member, OrderedDict())
        for prefix in prefixes:
            known[prefix] = None
            known.move_to_end(prefix)
            self._holders.setdefault(prefix, {})[member] = None
        while len(known) > _MAX_PREFIXES:
            self._remove_holder(known.popitem(last=False)[0], member)

    def forget(self, member: Member) -> None:
        """Called when the member is gone, or its cache is empty."""
        for prefix in self._prefixes.pop(member, ()):
            self._remove_holder(prefix, member)

    def _remove_holder(self, prefix: Prefix, member: Member) -> None:
        holders = self._holders[prefix]
        del holders[member]
        if not holders:
            del self._holders[prefix]


def prompt_prefixes(request: GenerationRequest) -> list[Prefix]:
    """The prefixes of 64, 128, 256 ... characters of a prompt, shortest first; empty if it must not be shared.

    A token id counts as 4 characters.
    """
    prompt = request.prompt
    if not request.cache_prompt or request.task == "embed" or isinstance(prompt, Pair):
        return []
    adapters = (each and frozenset(each.items()) for each in (request.lora, request.control_vectors))
    scope = (request.cache_salt, *adapters)
    return [
        Prefix(length // _CHARACTERS_PER_TOKEN, hash((scope, part if isinstance(part, str) else tuple(part))))
        for length, part in _parts(_text_with_digests(prompt) if isinstance(prompt, MediaPrompt) else prompt)
    ]


def _text_with_digests(prompt: MediaPrompt) -> str:
    """The text of a prompt, with digests in place of images and audio."""
    return "".join(
        f"\0{part.kind} {part.digest}\0" if isinstance(part, Media) else text_of_part(part) for part in prompt.parts
    )


def _parts(prompt: str | list[int]) -> Iterator[tuple[int, str | list[int]]]:
    characters = 1 if isinstance(prompt, str) else _CHARACTERS_PER_TOKEN
    length = _MIN_LENGTH
    while length <= len(prompt) * characters:
        yield length, prompt[: length // characters]
        length *= 2


# --- number of workers -----------------------------------------------------------------------------------------------
# Decides when to add or remove a worker of a group. No processes, no clock: the caller passes the time.


_MAX_WAIT_S = 5.0  # start a worker if a request waits longer for its first token, while requests are queued
_QUEUE_DELAY_S = 2.0  # or if the queue is long for this time
_FIRST_PAUSE_S, _MAX_PAUSE_S = 30.0, 600.0  # after a start that fails or is prevented by memory

Decision = Literal["start", "drain"]


class Load(NamedTuple):
    """The current load of the workers."""

    in_flight: int
    """Unfinished requests."""
    waiting: int
    """Unfinished requests that no worker is computing yet."""
    longest_wait: float
    """Seconds since the arrival of the oldest request without output; 0.0 if there is none."""


class ScalingRule:
    """Starts a worker while requests wait, and drains one while fewer workers would suffice.

    A worker is started when a request has waited for 5 s, or when the queue has been longer than half of `n_parallel`
    for 2 s. One is drained when half of the others' sequences have sufficed for `downscale_delay` seconds. Each change
    resets both times, so that the effect of a new worker is visible before the next one is started.
    """

    def __init__(self, *, min_workers: int, max_workers: int, n_parallel: int, downscale_delay: float) -> None:
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.downscale_delay = downscale_delay
        self._n_parallel = n_parallel
        self._max_queue = n_parallel // 2
        self._capacity = n_parallel  # concurrent sequences per worker: fewer than n_parallel if they are long
        self._waiting_since: float | None = None
        self._long_queue_since: float | None = None
        self._quiet_since: float | None = None
        self._not_before = 0.0
        self._n_failures = 0  # consecutive

    def decide(self, now: float, load: Load, running: int) -> Decision | None:
        """The action for this load on this number of running workers. Call it at least every second."""
        self._waiting_since = _since(self._waiting_since, now, load.waiting > 0)
        self._long_queue_since = _since(self._long_queue_since, now, load.waiting > self._max_queue)
        is_quiet = load.waiting == 0 and 2 * load.in_flight <= (running - 1) * self._capacity
        self._quiet_since = _since(self._quiet_since, now, is_quiet)
        if running < self.max_workers and now >= self._not_before and self._is_overloaded(now, load):
            self._capacity = max(1, min(self._n_parallel, (load.in_flight - load.waiting) // running))
            return "start"
        if running > self.min_workers and _lasts(self._quiet_since, now, self.downscale_delay):
            self._begin_again()
            return "drain"
        return None

    def _is_overloaded(self, now: float, load: Load) -> bool:
        has_waited = load.longest_wait >= _MAX_WAIT_S and _lasts(self._waiting_since, now, _MAX_WAIT_S)
        return has_waited or _lasts(self._long_queue_since, now, _QUEUE_DELAY_S)

    def started(self) -> None:
        """Called when the worker requested by `decide` is running."""
        self._begin_again()
        self._n_failures = 0

    def not_started(self, now: float) -> float:
        """Called when it does not fit into memory or could not be loaded. Returns the seconds until the next
        attempt."""
        pause: float = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._n_failures)
        self._n_failures += 1
        self._not_before = now + pause
        return pause

    def _begin_again(self) -> None:
        self._waiting_since = self._long_queue_since = self._quiet_since = None


def _since(since: float | None, now: float, is_so: bool) -> float | None:
    """Since when it has held without interruption; None: it does not hold."""
    if not is_so:
        return None
    return now if since is None else since


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds


# --- times of a worker -----------------------------------------------------------------------------------------------


_MIN_STEP_TIMEOUT_S = 2.0  # an idle worker has one heartbeat per second


def check_times(step_timeout: float, sleep_idle_seconds: float, *, prefix: str = "", separator: str = "_") -> None:
    """Checks the arguments of `EngineProcess`, or with `prefix` and `separator` the flags of the same names.

    Raises `ConfigError`.
    """
    if not step_timeout >= _MIN_STEP_TIMEOUT_S:  # also false for NaN
        name = f"{prefix}step{separator}timeout"
        raise ConfigError(f"{name} is {step_timeout:g} s; it must be at least {_MIN_STEP_TIMEOUT_S:g}")
    if sleep_idle_seconds != -1 and not 0 < sleep_idle_seconds < math.inf:
        name = f"{prefix}sleep{separator}idle{separator}seconds"
        raise ConfigError(f"{name} is {sleep_idle_seconds:g}; it must be more than 0, or -1 for never")
