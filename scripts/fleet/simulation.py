"""The event loop of a simulated fleet: requests arrive, are routed, and computed step by step in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from fleet.conversations import Conversation, Load, SimulatedRequest, conversations
from fleet.replica import SimulatedReplica
from fleet.result import FleetRun
from fleet.routing import ROUTINGS
from fleet.serve_autoscaling import Autoscaling, ServeAutoscaler
from fleet.step_times import StepTimes

_TICK_S = 1.0  # between two looks of the autoscaler

Event = Callable[[float], None]


class FleetSimulation:
    """Replicas behind a router. Virtual time goes from event to event: an arrival, or the end of a step."""

    def __init__(
        self,
        times: StepTimes,
        load: Load,
        *,
        routing: str,
        n_replicas: int = 1,
        autoscaling: Autoscaling | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        """`routing`: a name of `ROUTINGS`. `autoscaling`: in place of `n_replicas`, as many as Serve would have.
        `cache_bytes`: host memory of a replica for cached prefixes."""
        self._times, self._load, self._cache_bytes = times, load, cache_bytes
        self._routing = ROUTINGS[routing](times.n_parallel, load.seed)
        self._autoscaler = ServeAutoscaler(autoscaling) if autoscaling else None
        self._events: list[tuple[float, int, Event]] = []
        self._n_events = 0
        self._loads: dict[int, int] = {}  # of the replicas that take requests, by their number
        self._n_starting = 0
        self._started_at: dict[int, float] = {}
        self._n_ongoing = 0
        self._conversations: dict[int, Conversation] = {}
        self._run = FleetRun()
        for _ in range(autoscaling.min_replicas if autoscaling else n_replicas):
            self._start_replica(0.0, 0.0)

    def run(self) -> FleetRun:
        """Simulates the load, until its last request has ended."""
        run, beginnings = self._run, conversations(self._load)
        self._begin_next(beginnings)
        if self._autoscaler:
            self._at(0.0, self._look)
        while self._events:
            run.end_s, _, event = heappop(self._events)
            event(run.end_s)
        for number, started in self._started_at.items():
            run.replica_s += run.end_s - started
            assert not run.replicas[number].n_requests
        run.busy_s = sum(replica.busy_s for replica in run.replicas)
        return run

    def _at(self, time: float, event: Event) -> None:
        self._n_events += 1  # of events at the same time, the first that was planned comes first
        heappush(self._events, (time, self._n_events, event))

    # --- requests -------------------------------------------------------------------------------------------------

    def _begin_next(self, beginnings: Iterator[tuple[float, Conversation]]) -> None:
        if (beginning := next(beginnings, None)) is None:
            return
        time, conversation = beginning

        def begin(now: float) -> None:
            self._say(conversation, now)
            self._begin_next(beginnings)

        self._at(time, begin)

    def _say(self, conversation: Conversation, now: float) -> None:
        """The next request of a conversation arrives now, or the conversation is over."""
        request = conversation.next_request()
        if request is None:
            return
        self._conversations[request.conversation] = conversation
        request.arrived_at = now
        number = request.replica = self._routing.choose(request.request, self._loads)
        self._loads[number] += 1
        self._n_ongoing += 1
        replica = self._run.replicas[number]
        replica.add(request, now)
        if not replica.is_computing:
            self._step(number, replica, now)

    def _step(self, number: int, replica: SimulatedReplica, now: float) -> None:
        seconds = replica.begin(now)
        if seconds is None:
            return

        def end(now: float) -> None:
            for request in replica.end(now):
                self._ended(number, request, now)
            self._step(number, replica, now)

        self._at(now + seconds, end)

    def _ended(self, number: int, request: SimulatedRequest, now: float) -> None:
        request.forget_tokens()
        self._run.finished.append(request)
        self._n_ongoing -= 1
        if number in self._loads:
            self._loads[number] -= 1
        elif not self._run.replicas[number].n_requests:
            self._stop_replica(number, now)
        conversation = self._conversations.pop(request.conversation)
        time = now + conversation.think_s()
        if time < self._load.seconds:
            self._at(time, lambda now: self._say(conversation, now))

    # --- replicas -------------------------------------------------------------------------------------------------

    def _start_replica(self, now: float, ready_at: float) -> None:
        number = len(self._run.replicas)
        self._run.replicas.append(SimulatedReplica(self._times, cache_bytes=self._cache_bytes))
        self._started_at[number] = now
        if ready_at <= now:
            self._loads[number] = 0
            return
        self._n_starting += 1

        def ready(now: float) -> None:
            self._n_starting -= 1
            self._loads[number] = 0

        self._at(ready_at, ready)

    def _look(self, now: float) -> None:
        """The autoscaler looks, and replicas start or drain."""
        assert self._autoscaler
        target = self._autoscaler.observe(now, self._n_ongoing)
        for _ in range(target - len(self._loads) - self._n_starting):
            self._start_replica(now, now + self._times.start_s)
        while len(self._loads) > max(1, target - self._n_starting):  # those with the fewest requests drain first
            number = min(self._loads, key=self._loads.__getitem__)
            del self._loads[number]
            self._routing.forget(number)
            if not self._run.replicas[number].n_requests:
                self._stop_replica(number, now)
        self._run.sizes.append((now, target, len(self._loads), self._n_ongoing))
        if now < self._load.seconds or self._n_ongoing:
            self._at(now + _TICK_S, self._look)

    def _stop_replica(self, number: int, now: float) -> None:
        self._run.replica_s += now - self._started_at.pop(number)
