"""The models of a server, and the lookup from a request's `model` to its `Serving`."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web
from prometheus_client.core import Metric

from cppbatch.cluster.engines.client import EngineClient, Health, ScalingState, WorkerLive, WorkerState
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import Conflict, InvalidRequest
from cppbatch.models.inspect import ModelFacts
from cppbatch.server.auth.keys import KEY, client_of
from cppbatch.server.auth.rules import KeyRules
from cppbatch.server.http.api_errors import ModelNotFound
from cppbatch.server.http.event_stream import ping_while_waiting
from cppbatch.server.models.created import CreatedModel
from cppbatch.server.models.serving import Serving
from cppbatch.server.process import first_lines
from cppbatch.server.run_requests import target_concurrency
from cppbatch.server.settings import ServerSettings
from cppbatch.sizing.sizes import models_fit

ModelStatusName = Literal["unloaded", "downloading", "loading", "loaded", "unloading", "sleeping", "failed"]
"""`downloading`: its file, before its first load. `unloading`: it gets no new requests, and ends after its last one.
`sleeping`: its workers have stopped because they were idle. `failed`: its workers crash repeatedly, or the last attempt
to load it failed."""


Deletable = Literal["file", "name"]
"""`file`: it was pulled into the folder. `name`: it was created, and its file stays."""


class ModelLease(msgspec.Struct, frozen=True, kw_only=True):
    """A request's permission to use a model, which stays loaded until the `with` block ends."""

    serving: Serving
    release: Callable[[], None]
    rules: KeyRules | None = None
    """The rules of the request's key."""
    waited: float = 0.0
    """Seconds that the request has waited for the model to load."""
    client: str = ""
    """Whose requests these are (`GenerationRequest.client`)."""

    def apply_key_rules(self, requests: list[GenerationRequest]) -> list[GenerationRequest]:
        """Applies the key's rules to the requests, and names their client. Raises `InvalidRequest`, as
        `KeyRules.engine_requests` does."""
        if self.rules:
            info = self.serving.info
            requests = self.rules.engine_requests(requests, info.adapters, info.control_vectors)
        for request in requests:
            msgspec.structs.force_setattr(request, "client", self.client)
        return requests

    def __enter__(self) -> ModelLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model, loaded or not."""

    name: str
    """The name in responses."""
    names: tuple[str, ...]
    """All names that requests may use."""
    settings: ServerSettings
    status: ModelStatusName
    error: str | None = None
    """Why it failed."""
    progress: float | None = None
    """0.0 to 1.0, while loading."""
    path: Path
    projector: Path | None = None
    info: ModelInfo | None = None
    """Set while it is loaded."""
    facts: ModelFacts | None = None
    """The metadata of its file, while it is not loaded."""
    workers: tuple[WorkerState, ...] = ()
    needs: int | None = None
    """Estimated memory in bytes, for a loaded model of a multi-model server."""
    n_parallel: int = 0
    """For a loaded model: maximum concurrent sequences, over all workers."""
    pinned: bool = False
    default: bool = False
    """Whether requests without a model use it."""
    seconds_left: float | None = None
    """Until it is unloaded, if no request comes; None: never, or it is not loaded."""

    @property
    def is_failed(self) -> bool:
        """Whether it could not be loaded, or its workers crash repeatedly."""
        return self.status == "failed" or (self.status == "unloaded" and self.error is not None)

    @property
    def max_sequence(self) -> int:
        """Maximum tokens of prompt and completion together; for an unloaded model, its context length."""
        if self.info:
            return self.info.max_sequence
        return (self.facts.n_ctx_train if self.facts else 0) or 0


class ModelCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The models of a server by state."""

    loaded: int
    """Includes those being drained."""
    loading: int
    unloaded: int
    failed: int
    """Unloaded models whose last attempt to load failed."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a multi-model server loads its models."""

    max_loaded: int
    """Maximum loaded models; 0: limited by memory."""
    autoload: bool
    """Whether a request loads its model."""
    default: str | None
    """The model for requests without a model name."""


_NO_FOLDER = (
    "this server has no folder of models; start it with --models-dir DIR to pull, copy, create and delete models"
)


class ServedModels(ABC):
    """The models of a server. `close` stops their engines."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        """The server's settings. A model may override names, template and sampling."""
        self.started = int(time.time())

    @abstractmethod
    async def lease(
        self,
        name: str | None,
        rules: KeyRules | None = None,
        *,
        timeout: float | None = None,
        load: bool | None = None,
    ) -> ModelLease:
        """Waits up to `timeout` seconds until the model is loaded. None: the default model.

        `rules`: those of the request's key. `load`: whether to load the model if necessary; None: as configured. Raises
        `ModelNotFound`, `Forbidden`, `ModelNotLoaded`, `ModelLoadFailed`, `LoadTimeout` and `QueueFull`.
        """

    @abstractmethod
    def check_key(self, rules: KeyRules) -> None:
        """Raises `Forbidden` for a key that does not allow any model of this server."""

    @abstractmethod
    def health(self) -> Health:
        """Whether the server accepts requests."""

    @abstractmethod
    async def ready(self) -> None:
        """Waits until requests are accepted. Raises the errors of loading."""

    @abstractmethod
    async def entries(self, rules: KeyRules | None) -> list[ModelEntry]:
        """All models that the key allows."""

    async def fits(self, entries: Sequence[ModelEntry]) -> list[str | None]:
        """Whether the unloaded models fit into the currently free memory (`models_fit`)."""
        waiting = [entry.path for entry in entries if entry.info is None]
        answers = iter(await asyncio.to_thread(models_fit, waiting)) if waiting else iter(())
        return [next(answers) if entry.info is None else None for entry in entries]

    @abstractmethod
    async def entry(self, name: str, rules: KeyRules | None) -> ModelEntry:
        """A model by one of its names. Raises `ModelNotFound`."""

    @abstractmethod
    def knows(self, name: str) -> bool:
        """Whether this is one of the names of a model."""

    @abstractmethod
    def keep(self, name: str, seconds: float | None) -> bool:
        """Sets how long a model stays loaded without requests, once; 0: until its last request ends; -1: always; None:
        as configured. Returns whether it can be unloaded."""

    @abstractmethod
    async def workers(self) -> list[WorkerState]:
        """The workers of all loaded models."""

    @abstractmethod
    async def live(self) -> list[WorkerLive]:
        """The live state of each worker of each loaded model."""

    @property
    @abstractmethod
    def shown_name(self) -> str:
        """The name of the model, or of the loaded models."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Counters and state, summed over the workers of all loaded models. Raises `EngineClosed` if none responds."""

    @abstractmethod
    async def target_concurrency(self) -> int:
        """Maximum concurrent batch lines."""

    @property
    @abstractmethod
    def batch_model(self) -> str:
        """The model shown for a new batch."""

    @abstractmethod
    def serves_batch(self, model: str) -> bool:
        """Whether a batch with this model can run here."""

    def default_in_batch(self, _model: str) -> str | None:
        """The model for lines that name none, of a batch with this model; None: the default model."""
        return None

    @abstractmethod
    async def load(self, name: str, rules: KeyRules | None) -> None:
        """Starts loading the model, without waiting. Raises `ModelNotFound` and `Forbidden`."""

    @abstractmethod
    async def unload(self, name: str, rules: KeyRules | None) -> None:
        """Unloads the model after its last request, without waiting. Raises `ModelNotFound` and `Forbidden`, and
        `Conflict` on a server with one model."""

    def folder_of_models(self) -> Path:
        """The folder to which clients may add models. Raises `Conflict` if there is none."""
        raise Conflict("model", f"cannot be changed: {_NO_FOLDER}")

    def deletable(self, _entry: ModelEntry) -> Deletable | None:
        """What clients may delete of a model."""
        return None

    def find_created(self, name: str) -> CreatedModel | None:
        """What was created under this name; None: nothing, or a file."""
        return None

    async def create(self, name: str, model: CreatedModel) -> None:
        """Adds a model that runs in the engine of another one. Raises `Conflict`, `ConfigError` and `StorageError`."""
        self.folder_of_models()

    async def delete_created(self, name: str) -> None:
        """Removes such a model; its running requests end normally. Raises as `create`."""
        self.folder_of_models()

    @abstractmethod
    def first_lines(self, urls: list[str]) -> list[str]:
        """The lines that `serve` prints when the server is ready."""

    @abstractmethod
    async def close(self) -> None:
        """Stops all engines."""

    @abstractmethod
    async def reload(self) -> None:
        """Rescans the available models. Raises `ConfigError` for an invalid settings file."""

    def scaling(self) -> ScalingState | None:
        """The scaling state of a single model's workers, if their number follows the load."""
        return None

    @property
    def router(self) -> RouterSettings | None:
        """How several models are loaded; None for a server with one model."""
        return None

    def metrics(self) -> Iterable[Metric]:
        """Metrics of the models, in addition to those of their requests and workers."""
        return ()

    def counts(self) -> ModelCounts | None:
        """The models by state; None for a server with one model."""
        return None


class OneModel(ServedModels):
    """A server with a single model, which is always loaded and answers to any name, unless `strict_model` is set."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving.settings)
        self.serving = serving

    @classmethod
    def of(cls, client: EngineClient, settings: ServerSettings) -> OneModel:
        """The model of this engine."""
        return cls(Serving(client, settings))

    async def lease(
        self,
        name: str | None,
        rules: KeyRules | None = None,
        *,
        timeout: float | None = None,
        load: bool | None = None,
    ) -> ModelLease:
        """Leases the loaded model, and never waits."""
        if rules:
            self.serving.check_key(rules, name)
        return ModelLease(serving=self.serving, release=_keep, rules=rules)

    def check_key(self, rules: KeyRules) -> None:
        self.serving.check_key(rules)

    def health(self) -> Health:
        """The state of the engine."""
        return self.serving.client.health()

    async def ready(self) -> None:
        await self.serving.client.loaded()

    async def entries(self, rules: KeyRules | None) -> list[ModelEntry]:
        """The one model, if the key may see it."""
        return [await self._entry()] if self._is_visible(rules) else []

    async def entry(self, name: str, rules: KeyRules | None) -> ModelEntry:
        """The model by its own names. Other names are not found, although requests may use them."""
        self.serving.find_model(name)
        if not self._is_visible(rules):
            raise ModelNotFound(f"{name!r} is not available with this API key")
        return await self._entry()

    def _is_visible(self, rules: KeyRules | None) -> bool:
        return not rules or rules.may_use(self.serving.model_names)

    async def _entry(self) -> ModelEntry:
        serving, health = self.serving, self.serving.client.health()
        workers = tuple(await serving.client.workers())
        return ModelEntry(
            name=serving.name,
            names=serving.model_names,
            settings=serving.settings,
            status=status_of(health),
            error=health.error,
            path=Path(serving.info.path),
            info=serving.info,
            workers=workers,
            n_parallel=serving.client.config.n_parallel * len(workers),
            default=True,
            seconds_left=serving.client.seconds_left,
        )

    def knows(self, name: str) -> bool:
        """Whether it is one of the model's own names."""
        return name in self.serving.model_names

    def keep(self, name: str, seconds: float | None) -> bool:
        """Lets the workers sleep; the next request starts them."""
        return self.serving.client.sleep_after(seconds)

    async def workers(self) -> list[WorkerState]:
        return await self.serving.client.workers()

    async def live(self) -> list[WorkerLive]:
        return await self.serving.client.live()

    @property
    def shown_name(self) -> str:
        return self.serving.name

    async def stats(self) -> EngineStats:
        return await self.serving.client.stats()

    async def target_concurrency(self) -> int:
        """The lines that keep the engine busy."""
        return await target_concurrency(self.serving.client)

    @property
    def batch_model(self) -> str:
        """The name of the model's file."""
        return self.serving.info.name

    def serves_batch(self, model: str) -> bool:
        return model == self.serving.info.name

    async def load(self, name: str, rules: KeyRules | None) -> None:
        """No-op: the model is always loaded."""
        self.serving.find_model(name)
        self._check_name(name, rules)

    async def unload(self, name: str, rules: KeyRules | None) -> None:
        """Always refused: the server would have no model."""
        self.serving.find_model(name)
        self._check_name(name, rules)
        message = "is the only model of this server and cannot be unloaded; use --models-dir or several -m"
        raise Conflict("model", message)

    def _check_name(self, name: str, rules: KeyRules | None) -> None:
        """Raises `Forbidden` for a key that may not use the model under this name."""
        if rules:
            self.serving.check_key(rules, name)

    def first_lines(self, urls: list[str]) -> list[str]:
        """The model, the sizes of its engine and the URLs."""
        serving = self.serving
        return first_lines(
            serving.info,
            serving.client.config,
            urls,
            has_template=bool(serving.template),
            has_keys=bool(self.settings.keys),
            has_page=self.settings.webui,
        )

    async def close(self) -> None:
        await self.serving.client.close()

    async def reload(self) -> None:
        """No-op: the model never changes."""

    def scaling(self) -> ScalingState | None:
        return self.serving.client.scaling()


def status_of(health: Health) -> ModelStatusName:
    """The state of a model with an engine."""
    if health.status in ("loading", "sleeping", "failed"):
        return health.status
    return "loaded"


def _keep() -> None:
    """Does nothing: the model stays loaded."""


MODELS = web.AppKey("models", ServedModels)


_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _ping_seconds(settings: ServerSettings, body: object) -> int:
    """Seconds between the pings of a stream of events; 0: the response is none."""
    if not getattr(body, "stream", False):
        return 0
    own: int | None = getattr(body, "sse_ping_interval", 0)
    return settings.sse_ping_interval if own is None else own


async def lease_model(request: web.Request, body: object = None) -> ModelLease:
    """The lease of the request's model: `with await lease_model(request, body) as lease:`.

    Waits until it is loaded, as long as the timeouts of request and server allow; a stream sends pings while it waits.
    Raises the errors of `ServedModels.lease`.
    """
    models = request.app[MODELS]
    name = getattr(body, "model", None) or request.query.get("model") or None
    own = models.settings.limits.timeout(getattr(body, "timeout", None))
    timeouts = [seconds for seconds in (own, getattr(body, "queue_timeout", None)) if seconds is not None]
    async with ping_while_waiting(request, _ping_seconds(models.settings, body)):
        lease = await models.lease(name, request.get(KEY), timeout=min(timeouts, default=None), load=_load(request))
    return msgspec.structs.replace(lease, client=client_of(request))


def _load(request: web.Request) -> bool | None:
    """llama-server's `?autoload=`."""
    given: Any = request.query.get("autoload")
    if given is None:
        return None
    if given not in _WORDS:
        raise InvalidRequest("autoload", f"is {given!r:.40}; it must be true or false")
    return _WORDS[given]
