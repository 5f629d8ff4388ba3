"""Decides which of several models are loaded: each on first use, as many as fit.

The rules are independent of what a model is: a loader checks whether one fits alongside others, and starts its engine.

- A request holds a lease of its model. While there are leases, the model stays.
- Requested models that are not loaded wait in a queue, in the order of their first requests. One is loaded at a time.
- A load stops when nothing needs it any more: its last waiting request is cancelled, the model is unloaded by hand,
  or has changed. A request whose time is up is probably repeated, so its load continues while no other model waits.
- If the first in the queue does not fit, the least recently used model without leases is unloaded. If all have leases,
  the least recently used one is drained: it gets no new leases, and is unloaded when its last one ends. Requests for it
  wait in the queue. If the other model is no longer needed, or an idle one is unloaded instead, it gets leases again.
- Pinned models are never evicted. The others are also unloaded after `ttl` seconds without a lease.
- A model that fails to load fails its waiting requests, and is retried by the next request after a pause, which doubles
  with each consecutive failure. A load that was killed from outside is retried immediately, a few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NoReturn, Protocol, TypeVar

from cppbatch.errors import (
    CppBatchError,
    DoesNotFit,
    EngineClosed,
    LoadInterrupted,
    ModelLoadFailed,
    ModelNotLoaded,
    QueueFull,
)
from cppbatch.retries import Pauses

log = logging.getLogger("cppbatch.models")

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
"""`loading`: from its plan on. `unloading`: it gets no new leases, and waits for the last one to end, or its engine is
closing, perhaps before it was loaded."""
UnloadReason = Literal["evicted", "idle", "asked", "changed"]
"""`evicted`: for another model. `idle`: `ttl`. `asked`: by `unload`. `changed`: its file or settings have changed."""

_MAX_ATTEMPTS = 3  # to load a model, if earlier ones were killed from outside
_PAUSES = Pauses(1.0, 60.0)  # after a failure, before a request retries


class LoadableEngine(Protocol):
    """The interface of engines in the pool."""

    async def loaded(self) -> None:
        """Waits until it accepts requests. Raises the errors of loading."""

    async def close(self) -> None:
        """Closes it, and frees its memory."""


Plan = TypeVar("Plan")
Engine = TypeVar("Engine", bound=LoadableEngine)
Engine_co = TypeVar("Engine_co", bound=LoadableEngine, covariant=True)


class ModelLoader(Protocol[Plan, Engine_co]):
    """Decides what fits, and starts engines."""

    async def plan(self, name: str, others: Sequence[Plan], pinned: Sequence[Plan]) -> Plan:
        """How to load the model alongside the currently loaded `others`, of which `pinned` cannot be unloaded.

        Raises `DoesNotFit`, or the model's error.
        """

    def start(self, name: str, plan: Plan) -> Engine_co:
        """Starts the engine, which loads the model."""


class PooledModel(Generic[Plan, Engine]):
    """The state of a model. Only the pool changes it."""

    def __init__(self, name: str, *, pinned: bool, ttl: float, max_waiting: int, now: float) -> None:
        self.name = name
        self.pinned = pinned
        """Loaded at startup, and never evicted."""
        self.ttl = ttl
        """Seconds without a lease after which it is unloaded; -1: never. `ModelPool.keep` changes it."""
        self.usual_ttl = ttl
        self.max_waiting = max_waiting
        self.engine: Engine | None = None
        """Set while it is loading, loaded or unloading."""
        self.plan: Plan | None = None
        """The plan of its last load."""
        self.error: str | None = None
        """Why its last load failed; None: it succeeded, or was never tried."""
        self.leases = 0
        self.loads = 0
        self.load_failures = 0
        self.load_seconds = 0.0
        """Duration of the last load."""
        self.unloads: Counter[UnloadReason] = Counter()
        self._is_starting = False
        """Whether the pool plans or starts its engine."""
        self._is_loaded = False
        self._is_closing = False
        self._leaves: UnloadReason | None = None
        """Why it is being drained; None: it is not."""
        self._last_used = now
        self._waiters: list[asyncio.Future[Lease[Plan, Engine]]] = []
        self._load_asked = False
        self._is_awaited_again = False
        """Whether its last waiting request has only run out of time."""
        self._failures_in_a_row = 0
        self._retry_at = now

    @property
    def state(self) -> ModelState:
        """The current state."""
        if self._is_closing or (self._is_loaded and self._leaves):
            return "unloading"
        if self._is_loaded:
            return "loaded"
        return "loading" if self._is_starting else "unloaded"

    @property
    def is_up(self) -> bool:
        """Whether its engine has loaded it, and is not closed yet."""
        return self._is_loaded

    def seconds_left(self, now: float) -> float | None:
        """Until it is unloaded if its requests end now and no other comes; None: never. `now`: by the pool's clock."""
        idle_since = now if self.leases else self._last_used
        return None if self.pinned or self.ttl < 0 else idle_since + self.ttl - now

    @property
    def waiting(self) -> int:
        """Requests waiting for it to load."""
        return len(self._waiters)

    @property
    def is_wanted(self) -> bool:
        """Whether it should be loaded."""
        return bool(self._waiters) or self._load_asked


class Lease(Generic[Plan, Engine]):
    """Keeps a model loaded until `release`."""

    def __init__(self, pool: ModelPool[Plan, Engine], model: PooledModel[Plan, Engine], engine: Engine) -> None:
        self.model, self.engine = model, engine
        self._release: Callable[[PooledModel[Plan, Engine]], None] | None = pool.release

    def release(self) -> None:
        """Releases it. Repeated calls do nothing."""
        if self._release:
            self._release(self.model)
            self._release = None


class ModelPool(Generic[Plan, Engine]):
    """The models of a server. Must be created in a running event loop; `close` closes all engines."""

    def __init__(
        self,
        loader: ModelLoader[Plan, Engine],
        *,
        max_loaded: int = 0,
    ) -> None:
        """`max_loaded`: maximum loaded models; 0: limited by memory."""
        self.models: dict[str, PooledModel[Plan, Engine]] = {}
        self.max_loaded = max_loaded
        self._loader = loader
        self._clock = asyncio.get_running_loop().time
        self._in_memory: set[PooledModel[Plan, Engine]] = set()  # models with an engine, including removed ones
        self._queue: dict[PooledModel[Plan, Engine], None] = {}  # requested models, in order of request
        self._changed = asyncio.Event()
        self._n_left = 0  # number of unloads, so that a failed plan is only recomputed after another one
        self._loading: tuple[PooledModel[Plan, Engine], asyncio.Task[None]] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._task = asyncio.ensure_future(self._run())

    # --- called by the server -----------------------------------------------------------------------------------

    def add(self, name: str, *, pinned: bool = False, ttl: float = -1, max_waiting: int = 4096) -> None:
        """Adds a model. A pinned one is loaded immediately.

        An earlier model of this name is removed, and the requests that wait for it wait for the new one.
        """
        earlier = self.models.pop(name, None)
        model: PooledModel[Plan, Engine] = PooledModel(
            name, pinned=pinned, ttl=ttl, max_waiting=max_waiting, now=self._clock()
        )
        self.models[name] = model
        if earlier:
            model._waiters, earlier._waiters = earlier._waiters, []
            model._load_asked = earlier._load_asked
            if model.is_wanted:
                self._want(model)
            self._remove(earlier)
        if pinned:
            self.load(name)

    def remove(self, name: str) -> None:
        """Removes a model, draining it first if it is loaded. Requests waiting for it fail."""
        self._remove(self.models.pop(name))

    def _remove(self, model: PooledModel[Plan, Engine]) -> None:
        self._fail_waiters(model, ModelNotLoaded(f"model {model.name!r} was removed"))
        self._unwant(model)
        if model.is_up:
            self._leave(model, "changed")

    async def lease(self, name: str, *, load: bool = True, timeout: float | None = None) -> Lease[Plan, Engine]:
        """Waits until the model is loaded, and keeps it loaded until the lease is released.

        `load`: whether to load it if necessary. `timeout`: seconds to wait for it; None: no limit. Raises
        `ModelNotLoaded` without `load`, `ModelLoadFailed`, `QueueFull`, `asyncio.TimeoutError`, and `EngineClosed` once
        the pool is closing.
        """
        model = self.models[name]
        if model.state == "loaded":
            assert model.engine
            return self._grant(model, model.engine)
        if not load and not model.is_wanted and model.state != "loading":
            raise ModelNotLoaded(f"model {name!r} is not loaded: load it with POST /models/load first")
        if model.engine is None and self._clock() < model._retry_at:
            raise self._load_failure(model)
        if model.waiting >= model.max_waiting:
            raise QueueFull(model.max_waiting, max(1.0, model.load_seconds))
        waiter: asyncio.Future[Lease[Plan, Engine]] = asyncio.get_running_loop().create_future()
        model._waiters.append(waiter)
        self._want(model)
        is_late = False
        try:
            await asyncio.wait([waiter], timeout=timeout)
            if is_late := not waiter.done():
                raise asyncio.TimeoutError
            return waiter.result()
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it was granted at the same time
            raise
        finally:
            newest = self.models.get(name)  # the model may have been replaced
            if newest and waiter in newest._waiters:
                newest._waiters.remove(waiter)
                newest._is_awaited_again = is_late
                self._unwant(newest)

    def release(self, model: PooledModel[Plan, Engine]) -> None:
        """Ends a lease."""
        model.leases -= 1
        model._last_used = self._clock()
        self._close_drained(model)
        self._changed.set()

    def load(self, name: str) -> None:
        """Starts loading the model, without waiting. An earlier failure does not delay it."""
        model = self.models[name]
        model._retry_at = self._clock()
        if model._leaves == "asked" and not model._is_closing:
            self._stay(model)
        if model.state != "loaded":
            model._load_asked = True
            self._want(model)

    def unload(self, name: str, reason: UnloadReason = "asked") -> None:
        """Drains the model, without waiting for its last request, or stops loading it: requests that wait for that load
        fail. Later requests load it again. No effect if it is not loaded."""
        model = self.models[name]
        model._load_asked = model._is_awaited_again = False
        if model.state == "loading":
            stopped = ModelLoadFailed(f"model {name!r} was unloaded while it was loading", retry_after=_PAUSES.first_s)
            self._fail_waiters(model, stopped)
        self._unwant(model)
        if model.is_up:
            self._leave(model, reason)

    def keep(self, name: str, seconds: float | None) -> None:
        """Sets the time without a lease after which the model is unloaded; 0: it is drained now, unless requests wait
        for it to load; -1: never; None: as it was added. Only 0 affects a pinned one."""
        model = self.models[name]
        if seconds == 0 and not model.waiting:
            self.unload(name)
        model.ttl = model.usual_ttl if seconds is None or seconds == 0 else seconds
        self._changed.set()

    async def close(self) -> None:
        """Closes all engines, including those with leases. Waiting requests get `EngineClosed`."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for model in self.models.values():
            self._fail_waiters(model, EngineClosed("the server is shutting down"))
        engines = [model.engine for model in self._in_memory if model.engine and not model._is_closing]
        await asyncio.gather(*(engine.close() for engine in engines), *self._closing)

    # --- leases -------------------------------------------------------------------------------------------------

    def _grant(self, model: PooledModel[Plan, Engine], engine: Engine) -> Lease[Plan, Engine]:
        model.leases += 1
        model._last_used = self._clock()
        return Lease(self, model, engine)

    def _grant_waiters(self, model: PooledModel[Plan, Engine]) -> None:
        """Called when the model is loaded and accepts requests."""
        assert model.engine
        self._queue.pop(model, None)
        model._load_asked = False
        waiters, model._waiters = model._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(self._grant(model, model.engine))
        model._last_used = self._clock()

    def _fail_waiters(self, model: PooledModel[Plan, Engine], error: CppBatchError) -> None:
        waiters, model._waiters = model._waiters, []
        model._load_asked = model._is_awaited_again = False
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _want(self, model: PooledModel[Plan, Engine]) -> None:
        self._queue.setdefault(model)
        if self._loading:
            self._unwant(self._loading[0])  # which may only be awaited again
        self._changed.set()

    def _unwant(self, model: PooledModel[Plan, Engine]) -> None:
        """Called when the model may not be needed any more. Stops its load then."""
        if model.is_wanted:
            return
        is_loading = self._loading is not None and self._loading[0] is model
        if is_loading and model.engine and model._is_awaited_again and len(self._queue) == 1:
            return
        self._queue.pop(model, None)
        if is_loading:
            assert self._loading
            self._loading[1].cancel()
        self._changed.set()

    def _load_failure(self, model: PooledModel[Plan, Engine]) -> ModelLoadFailed:
        left = max(0.0, model._retry_at - self._clock())
        return ModelLoadFailed(f"model {model.name!r} could not be loaded: {model.error}", retry_after=left)

    # --- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, model: PooledModel[Plan, Engine], reason: UnloadReason) -> None:
        """Stops granting leases; the model is closed when the last one ends."""
        model._leaves = reason
        self._close_drained(model)
        self._changed.set()

    def _stay(self, model: PooledModel[Plan, Engine]) -> None:
        """Cancels draining, because the model can stay."""
        model._leaves = None
        if model._is_loaded:
            self._grant_waiters(model)

    def _close_drained(self, model: PooledModel[Plan, Engine]) -> None:
        if model._leaves and not model.leases and not model._is_closing:
            self._start_closing(model, model._leaves)

    def _start_closing(self, model: PooledModel[Plan, Engine], reason: UnloadReason | None) -> asyncio.Task[None]:
        model._is_closing = True
        task = asyncio.ensure_future(self._close(model, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close(self, model: PooledModel[Plan, Engine], reason: UnloadReason | None) -> None:
        """`reason`: None if it was not loaded yet."""
        assert model.engine
        try:
            await model.engine.close()
        except Exception:  # a bug: its memory may not be free, which the next plan measures
            log.exception("failed to close the engine of %s", model.name)
        self._forget_engine(model)
        self._n_left += 1
        if reason:
            model.unloads[reason] += 1
            log.info("unloaded %s (%s)", model.name, reason)
        self._changed.set()

    def _forget_engine(self, model: PooledModel[Plan, Engine]) -> None:
        model.engine = model._leaves = None
        model._is_loaded = model._is_closing = False
        self._in_memory.discard(model)

    # --- loading ------------------------------------------------------------------------------------------------

    async def _run(self) -> NoReturn:
        while True:
            model = next((each for each in self._queue if each.engine is None), None)
            if model is None:
                self._unload_expired()
                await self._change(self._next_expiry())
                continue
            loading = asyncio.ensure_future(self._load(model))
            self._loading = (model, loading)
            [error] = await asyncio.gather(loading, return_exceptions=True)
            self._loading = None
            if isinstance(error, (CppBatchError, OSError)):
                self._failed(model, str(error))
            elif isinstance(error, Exception):  # a bug: fails these requests, and the pool continues
                log.error("failed to load %s", model.name, exc_info=error)
                self._failed(model, f"{type(error).__name__}: {error}")

    async def _change(self, seconds: float | None = None) -> None:
        """Waits up to `seconds` until a lease, the queue or a model changes."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    async def _load(self, model: PooledModel[Plan, Engine]) -> None:
        """Loads a requested model. The caller cancels this once no request waits for it."""
        model._is_starting = True
        try:
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                plan = await self._make_room(model)
                try:
                    await self._start(model, plan)
                    return
                except LoadInterrupted as error:
                    if attempt == _MAX_ATTEMPTS:
                        raise
                    log.warning("%s: %s; reloading it", model.name, error)
        finally:
            model._is_starting = False
            self._spare_others()

    async def _make_room(self, model: PooledModel[Plan, Engine]) -> Plan:
        """The plan with which the model fits, after unloading enough others.

        Raises `DoesNotFit` if it does not fit after unloading all others that can be.
        """
        shortage: DoesNotFit | None = None
        planned_at = -1
        while True:
            others = [each.plan for each in self._in_memory if each.plan is not None]
            if self.max_loaded and len(self._in_memory) >= self.max_loaded:
                self._choose_victim(DoesNotFit(f"{len(others)} models are loaded, which is the limit (--models-max)"))
            elif planned_at != self._n_left:
                planned_at = self._n_left
                pinned = [each.plan for each in self._in_memory if each.plan is not None and self._stays(each)]
                try:
                    plan = await self._loader.plan(model.name, others, pinned)
                except DoesNotFit as error:
                    if error.never:
                        raise
                    shortage = error
                else:
                    self._spare_others()
                    return plan
                continue
            else:
                assert shortage
                self._choose_victim(shortage)
            await self._change()
            self._unload_expired()

    @staticmethod
    def _stays(model: PooledModel[Plan, Engine]) -> bool:
        """Whether it cannot be unloaded: it is pinned, and was not unloaded by hand or replaced."""
        return model.pinned and not model._leaves

    def _choose_victim(self, shortage: DoesNotFit) -> None:
        """Unloads a model, unless one is already being unloaded. Raises `shortage` if none can be."""
        if any(each._is_closing or (each._leaves and each._leaves != "evicted") for each in self._in_memory):
            return
        able = [each for each in self._in_memory if not each.pinned]
        if not able:
            raise shortage
        if idle := [each for each in able if not each.leases]:
            victim = min(idle, key=lambda each: each._last_used)
            self._leave(victim, "evicted")
            self._spare_others()
        elif not any(each._leaves for each in able):
            self._leave(min(able, key=lambda each: each._last_used), "evicted")

    def _spare_others(self) -> None:
        """Keeps models that are being drained for another one, but are not closing yet."""
        for each in list(self._in_memory):
            if each._leaves == "evicted" and not each._is_closing:
                self._stay(each)

    async def _start(self, model: PooledModel[Plan, Engine], plan: Plan) -> None:
        began = self._clock()
        engine = self._loader.start(model.name, plan)
        model.engine, model.plan = engine, plan
        self._in_memory.add(model)
        try:
            await engine.loaded()
        except asyncio.CancelledError:
            log.info("stopping the load of %s: no request waits for it, or it was unloaded", model.name)
            self._start_closing(model, None)  # without waiting: the next model may fit beside it
            raise
        except BaseException:
            await asyncio.shield(self._start_closing(model, None))
            raise
        model._is_loaded = True
        model.loads += 1
        model.load_seconds = self._clock() - began
        model.error, model._failures_in_a_row = None, 0
        log.info("loaded %s in %.1f s", model.name, model.load_seconds)
        self._grant_waiters(model)

    def _failed(self, model: PooledModel[Plan, Engine], reason: str) -> None:
        model.error = reason
        model.load_failures += 1
        model._failures_in_a_row += 1
        pause = _PAUSES.after(model._failures_in_a_row)
        model._retry_at = self._clock() + pause
        log.error("%s could not be loaded: %s. The next request after %g s retries", model.name, reason, pause)
        self._queue.pop(model, None)
        self._fail_waiters(model, self._load_failure(model))

    # --- idle models --------------------------------------------------------------------------------------------

    def _expiring(self) -> list[tuple[PooledModel[Plan, Engine], float]]:
        """The idle models that will be unloaded, with the seconds until then."""
        now = self._clock()
        idle = [each for each in self.models.values() if each.state == "loaded" and not each.leases]
        return [(each, seconds) for each in idle if (seconds := each.seconds_left(now)) is not None]

    def _unload_expired(self) -> None:
        for model, seconds in self._expiring():
            if seconds < 1e-6:  # a timer may end too early by a rounding error
                self._leave(model, "idle")

    def _next_expiry(self) -> float | None:
        """Seconds until the next idle model is unloaded; None: never."""
        return min((max(0.0, seconds) for _, seconds in self._expiring()), default=None)
