"""A server with several models: a request's `model` selects one, which is loaded on first use."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import msgspec
from prometheus_client.core import Metric

from cppbatch.cluster.engines.client import EngineClient, Health, WorkerLive, WorkerState
from cppbatch.cluster.model_pool import ModelPool, ModelState, PooledModel, UnloadReason
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.errors import ConfigError, Conflict, EngineClosed, Forbidden, InvalidRequest, ModelError
from cppbatch.models.find import shorter_names
from cppbatch.models.inspect import ModelFacts, inspect_model
from cppbatch.server.auth.rules import KeyRules
from cppbatch.server.http.api_errors import LoadTimeout, ModelNotFound
from cppbatch.server.models.created import CreatedModel, CreatedModels
from cppbatch.server.models.downloads import Downloads
from cppbatch.server.models.loader import LoadPlan, MemoryPlanLoader, ModelSpec
from cppbatch.server.models.served import (
    Deletable,
    ModelCounts,
    ModelEntry,
    ModelLease,
    RouterSettings,
    ServedModels,
    status_of,
)
from cppbatch.server.models.serving import Serving
from cppbatch.server.observe.metrics import family
from cppbatch.server.process import ready_line
from cppbatch.server.settings import ServerSettings
from cppbatch.statistic import StatisticKind

log = logging.getLogger("cppbatch.models")

BATCH_LINES = 64
"""Maximum concurrent batch lines, which may be for any of the models."""
_LOOK_AGAIN_S = 1.0  # minimum time between two scans of the folder for an unknown name
_ANY_OF_THEM = "several"  # the model of a batch if there is no default model: its lines name their models


class CatalogContent(NamedTuple):
    """The current models."""

    specs: list[ModelSpec]
    default: str | None
    """The model for requests without a model name. None: they are refused."""


class ModelCatalog(Protocol):
    """The sources of a server's models: a folder, files, and a settings file."""

    def read(self) -> CatalogContent:
        """The current models. Raises `ConfigError` and `ModelError` for an invalid settings file."""

    def fetch(self, name: str) -> None:
        """Downloads the files of a model that is elsewhere. Raises as `read`."""


class ManyModels(ServedModels):
    """The models of a catalog. Must be created in a running event loop."""

    def __init__(
        self,
        catalog: ModelCatalog,
        settings: ServerSettings,
        loader: MemoryPlanLoader,
        *,
        max_loaded: int = 0,
        autoload: bool = True,
        any_model: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`max_loaded`: maximum loaded models; 0: limited by memory. `autoload`: a request loads its model; otherwise
        only `POST /models/load` does. `any_model`: unknown names refer to the default model. `folder`: to which clients
        may add models (`CreatedModels`); None: they may not.

        Raises the errors of `catalog.read`.
        """
        super().__init__(settings)
        self._autoload = autoload
        self._any_model = any_model
        self._catalog = catalog
        self._loader = loader
        self._specs = loader.specs
        self._default: str | None = None
        self._created = CreatedModels(folder) if folder else None
        self._clock = asyncio.get_running_loop().time
        self._looked_at = self._clock()
        self._reloading = asyncio.Lock()
        self._downloads = Downloads(catalog.fetch, self.reload)
        self._servings: dict[str, Serving] = {}
        self._facts: dict[tuple[str, tuple[int, int] | None], ModelFacts | None] = {}
        self.pool: ModelPool[LoadPlan, EngineClient] = ModelPool(loader, max_loaded=max_loaded)
        self._use(catalog.read())
        for spec in self._specs.values():
            if spec.preload or (spec.pinned and spec.is_elsewhere):
                self._start_load(spec)

    # --- the catalog --------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        """Rereads the catalog. Loaded models that have changed or disappeared are drained. Raises as `catalog.read`."""
        async with self._reloading:  # what was read first must not be used last
            self._looked_at = self._clock()
            self._use(await asyncio.to_thread(self._catalog.read))

    def _use(self, content: CatalogContent) -> None:
        new = {spec.name: spec for spec in content.specs}
        for name in [name for name, spec in self._specs.items() if new.get(name) != spec]:
            del self._specs[name]
            self._servings.pop(name, None)
            if name not in new:
                self.pool.remove(name)
        for name, spec in new.items():
            if name not in self._specs:
                self._specs[name] = spec
                most = spec.config.n_parallel + spec.config.max_queue
                is_pinned = spec.pinned and not spec.is_elsewhere
                self.pool.add(name, pinned=is_pinned, ttl=spec.ttl, max_waiting=most)
        self._default = content.default

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a model: its name, aliases, and its name without the weight type, if that is unique; of a
        created model also those of the model it is made from, which a key may allow."""
        if created := self.find_created(name):
            base = self._find(created.base)
            return (name, *(self.names_of(base) if base else ()))
        shorter = [each for each in shorter_names(name) if self._find(each) == name]
        return (name, *self._specs[name].settings.aliases, *shorter)

    def _find(self, name: str) -> str | None:
        """The model with this name; None: no model, or several."""
        if name in self._specs:
            return name
        for spec in self._specs.values():
            if name in spec.settings.aliases:
                return spec.name
        found = [each for each in self._specs if name in shorter_names(each)]
        return found[0] if len(found) == 1 else None

    def find_created(self, name: str) -> CreatedModel | None:
        """The created model of this name; files and aliases come first."""
        return self._created.find(name) if self._created and self._find(name) is None else None

    def folder_of_models(self) -> Path:
        """The folder of --models-dir. Raises `Conflict` without it."""
        return self._created.folder if self._created else super().folder_of_models()

    def deletable(self, entry: ModelEntry) -> Deletable | None:
        """A created name, or a pulled file, which is in OWNER/REPO of the folder."""
        if self._created is None or self.find_created(entry.name):
            return "name" if self._created else None
        folder = self._created.folder
        is_pulled = entry.path.is_relative_to(folder) and len(entry.path.relative_to(folder).parts) >= 3
        return "file" if is_pulled else None

    async def create(self, name: str, model: CreatedModel) -> None:
        """Refuses the name of a file, checks the model and adds it."""
        if self._created is None or self._find(name) is not None:
            folder = self.folder_of_models()
            raise Conflict("model", f"{name!r} is a file in {folder.name}/; choose another name")
        model.settings(self.settings)  # checks it
        await asyncio.to_thread(self._created.add, name, model)
        self._servings.pop(name, None)

    async def delete_created(self, name: str) -> None:
        """Removes the created model."""
        await super().delete_created(name)
        assert self._created
        await asyncio.to_thread(self._created.remove, name)
        self._servings.pop(name, None)

    def _model_for(self, name: str) -> str | None:
        """The model for requests with this name."""
        return self._find(name) or (self._default if self._any_model else None)

    async def resolve(self, name: str | None, rules: KeyRules | None) -> str:
        """The model for a request with this name, or the one that it is made from. Rescans the folder for an unknown
        name.

        Raises `ModelNotFound`, `InvalidRequest` if a model name is required, and `Forbidden`.
        """
        created = None if name is None else self.find_created(name)
        found = self._default if name is None else self._find(created.base if created else name)
        if found is None and name is not None and self._clock() > self._looked_at + _LOOK_AGAIN_S:
            try:
                await self.reload()
            except (ConfigError, ModelError) as error:  # perhaps it is being edited
                log.warning("the models are unchanged: %s", error)
            found = self._find(created.base if created else name)
        if found is None and self._any_model:
            found = self._default
        if found is not None and rules:
            rules.check_model(self.names_of(name if created and name else found), name)
        if found is None:
            known = self._available(rules)
            if name is None:
                raise InvalidRequest("model", f"is required; available: {known}")
            raise ModelNotFound(f"{name!r} not found; available: {known}")
        return found

    def _visible(self, rules: KeyRules | None) -> Iterator[str]:
        for name in (*self._specs, *self._created_names()):
            if not rules or rules.may_use(self.names_of(name)):
                yield name

    def _created_names(self) -> list[str]:
        """The created models whose file exists."""
        names = self._created or ()
        return [name for name in names if (made := self.find_created(name)) and self._find(made.base) is not None]

    def _available(self, rules: KeyRules | None) -> str:
        """The models in a message."""
        return ", ".join(map(repr, self._visible(rules))) or "none"

    def check_key(self, rules: KeyRules) -> None:
        if not any(True for _ in self._visible(rules)):
            names = ", ".join(map(repr, rules.models or ()))
            raise Forbidden(
                "model", f"no model of this server is available with this API key; allowed: {names or 'none'}"
            )

    # --- requests -----------------------------------------------------------------------------------------------

    async def lease(
        self,
        name: str | None,
        rules: KeyRules | None = None,
        *,
        timeout: float | None = None,
        load: bool | None = None,
    ) -> ModelLease:
        began, limit, load = self._clock(), timeout, self._autoload if load is None else load
        model = await self.resolve(name, rules)
        was_loaded = self.pool.models[model].state == "loaded"
        try:
            if load and self._specs[model].is_elsewhere:
                await asyncio.wait_for(asyncio.shield(self._downloads.start(model)), timeout)
                model = await self.resolve(name, rules)
                timeout = None if timeout is None else max(0.0, timeout - (self._clock() - began))
            lease = await self.pool.lease(model, load=load, timeout=timeout)
        except asyncio.TimeoutError:
            raise LoadTimeout(
                f"model {model!r} was not loaded within the request's timeout of {limit:g} s; try again, or increase "
                "the timeout"
            ) from None
        if model not in self._specs:  # removed from the catalog meanwhile
            lease.release()
            raise ModelNotFound(f"{model!r} not found; available: {self._available(rules)}")
        waited = 0.0 if was_loaded else self._clock() - began
        serving = self._serving(model, lease.engine, name if name and self.find_created(name) else None)
        return ModelLease(serving=serving, release=lease.release, rules=rules, waited=waited)

    def _serving(self, name: str, engine: EngineClient, created: str | None = None) -> Serving:
        """`created`: the name of a model that is made from this one."""
        if created and (model := self.find_created(created)):
            return self._serving_of_created(created, model, self._serving(name, engine))
        serving = self._servings.get(name)
        if serving is None or serving.client is not engine:
            lora = serving.lora if serving else None
            serving = self._servings[name] = Serving(
                engine, self._specs[name].settings, self.names_of(name), lambda other: self._model_for(other) == name
            )
            serving.lora = lora
        return serving

    def _serving_of_created(self, name: str, model: CreatedModel, base: Serving) -> Serving:
        serving = self._servings.get(name)
        if serving is None or serving.client is not base.client:
            settings = model.settings(base.settings)
            serving = self._servings[name] = Serving(base.client, settings, (name,), lambda other: other == name)
        serving.lora = base.lora
        return serving

    async def load(self, name: str, rules: KeyRules | None) -> None:
        self._start_load(self._specs[await self.resolve(name, rules)])

    def _start_load(self, spec: ModelSpec) -> None:
        """Loads a model without waiting, after its download."""

        def load(done: asyncio.Task[None] | None = None) -> None:
            if spec.name in self._specs and (done is None or not (done.cancelled() or done.exception())):
                self.pool.load(spec.name)

        if spec.is_elsewhere:
            self._downloads.start(spec.name).add_done_callback(load)
        else:
            load()

    async def unload(self, name: str, rules: KeyRules | None) -> None:
        self.pool.unload(await self.resolve(name, rules))

    def knows(self, name: str) -> bool:
        """Whether it is a name of a file or a created model."""
        return self._find(name) is not None or self.find_created(name) is not None

    def keep(self, name: str, seconds: float | None) -> bool:
        created = self.find_created(name)
        if found := self._model_for(created.base if created else name):
            self.pool.keep(found, seconds)
        return True

    # --- state --------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Ready: the server accepts requests regardless of the loaded models."""
        return Health(status="ok", progress=1.0)

    async def ready(self) -> None:
        """Returns immediately: models are loaded on demand."""

    def counts(self) -> ModelCounts:
        """The models by state."""
        models = self.pool.models.values()
        failed = sum(model.state == "unloaded" and model.error is not None for model in models)
        return ModelCounts(
            loaded=sum(model.state in ("loaded", "unloading") for model in models),
            loading=sum(model.state == "loading" for model in models),
            unloaded=sum(model.state == "unloaded" for model in models) - failed,
            failed=failed,
        )

    async def entries(self, rules: KeyRules | None) -> list[ModelEntry]:
        return list(await asyncio.gather(*map(self._entry, self._visible(rules))))

    async def entry(self, name: str, rules: KeyRules | None) -> ModelEntry:
        found = name if self.find_created(name) else self._find(name)
        if found is None or found not in self._visible(rules):
            raise ModelNotFound(f"{name!r} not found; available: {self._available(rules)}")
        return await self._entry(found)

    def _entry(self, name: str) -> Awaitable[ModelEntry]:
        """Looks up the model now: it may be removed before the answer is complete."""
        if created := self.find_created(name):
            base = self._find(created.base)
            assert base
            return self._entry_of_created(name, created, self._entry(base))
        spec = self._specs[name]
        return self._read_entry(spec, self.pool.models[spec.name], self.names_of(spec.name))

    async def _entry_of_created(self, name: str, model: CreatedModel, base: Awaitable[ModelEntry]) -> ModelEntry:
        entry = await base
        settings = model.settings(entry.settings)
        return msgspec.structs.replace(entry, name=name, names=(name,), settings=settings, default=False, pinned=False)

    async def _read_entry(
        self, spec: ModelSpec, model: PooledModel[LoadPlan, EngineClient], names: tuple[str, ...]
    ) -> ModelEntry:
        name, engine = spec.name, model.engine
        health = engine.health() if engine else None
        state = status_of(health) if health and model.state == "loaded" else model.state
        is_up = model.is_up and health is not None and health.status != "loading"
        workers = await engine.workers() if engine and is_up else []
        return ModelEntry(
            name=name,
            names=names,
            settings=spec.settings,
            status="downloading" if name in self._downloads else state,
            error=(health.error if health else None) or model.error or self._downloads.errors.get(name),
            progress=health.progress if health and model.state == "loading" else None,
            path=Path(spec.config.model_path),
            projector=Path(spec.config.mmproj) if spec.config.mmproj else None,
            info=engine.info if engine and is_up else None,
            facts=None if is_up else await self._facts_of(spec),
            workers=tuple(workers),
            needs=model.plan.sizes.needs if is_up and model.plan else None,
            n_parallel=engine.config.n_parallel * len(workers) if engine else 0,
            pinned=spec.pinned,
            default=name == self._default,
            seconds_left=model.seconds_left(self._clock()) if is_up else None,
        )

    async def _facts_of(self, spec: ModelSpec) -> ModelFacts | None:
        key = (spec.config.model_path, spec.file_version)
        if key not in self._facts:
            try:
                self._facts[key] = await asyncio.to_thread(inspect_model, Path(spec.config.model_path))
            except ModelError:
                self._facts[key] = None  # loading reports what is wrong with the file
        return self._facts[key]

    def _running(self) -> list[tuple[str, EngineClient]]:
        return [(name, model.engine) for name, model in self.pool.models.items() if model.is_up and model.engine]

    @property
    def router(self) -> RouterSettings:
        return RouterSettings(max_loaded=self.pool.max_loaded, autoload=self._autoload, default=self._default)

    def metrics(self) -> Iterable[Metric]:
        return model_families(self.pool.models.values())

    async def workers(self) -> list[WorkerState]:
        """The workers of all loaded models, each with its model's name."""
        running = self._running()
        each = await asyncio.gather(*(engine.workers() for _, engine in running))
        return [
            msgspec.structs.replace(worker, model=name)
            for (name, _), workers in zip(running, each, strict=True)
            for worker in workers
        ]

    async def live(self) -> list[WorkerLive]:
        """The live state of all workers, whose names start with their model's."""
        running = self._running()
        each = await asyncio.gather(*(engine.live() for _, engine in running))
        return [
            msgspec.structs.replace(worker, name=f"{name}/{worker.name}")
            for (name, _), workers in zip(running, each, strict=True)
            for worker in workers
        ]

    @property
    def shown_name(self) -> str:
        return ", ".join(name for name, _ in self._running()) or "no model is loaded"

    async def stats(self) -> EngineStats:
        """The sum over the workers. Raises `EngineClosed` if no model is loaded."""
        answers = [worker.stats for worker in await self.workers() if worker.stats]
        if not answers:
            raise EngineClosed("no model is loaded")
        return add_up(answers)

    async def target_concurrency(self) -> int:
        """The same number of lines for all models."""
        return BATCH_LINES

    @property
    def batch_model(self) -> str:
        """The default model, or a word for any."""
        return self._default or _ANY_OF_THEM

    def serves_batch(self, model: str) -> bool:
        """Whether its model exists, or each line names its own; lines with an unknown model fail."""
        return model == _ANY_OF_THEM or self._find(model) is not None

    def default_in_batch(self, model: str) -> str | None:
        """The batch's model: the default model may have changed since the batch was created."""
        return None if model == _ANY_OF_THEM else model

    def first_lines(self, urls: list[str]) -> list[str]:
        """The number of models, the default one and the URLs."""
        at_once = [spec.name for spec in self._specs.values() if spec.pinned or spec.preload]
        names = ", ".join(self._specs) or "none yet: put GGUF files into the folder"
        default = f"; default: {self._default}" if self._default else ""
        key = ' -H "Authorization: Bearer $CPPBATCH_API_KEY"' if self.settings.keys else ""
        return [
            f"{len(self._specs)} models, loaded on demand{default}: {names}",
            *([f"loading at startup: {', '.join(at_once)}"] if at_once else []),
            ready_line(urls, has_page=self.settings.webui),
            f"try:  curl {urls[0]}/v1/models{key}",
        ]

    async def close(self) -> None:
        """Ends downloads and closes the pool."""
        self._downloads.close()
        await self.pool.close()


_STATES: tuple[ModelState, ...] = get_args(ModelState)
_REASONS: tuple[UnloadReason, ...] = get_args(UnloadReason)


def model_families(models: Collection[PooledModel[Any, Any]]) -> Iterator[Metric]:
    """The current state of a pool's models."""
    states = Counter(model.state for model in models)
    yield family("gauge", "models", "Models by state", ["state"], [((), {state: states[state] for state in _STATES})])
    for kind, name, text, read in _BY_MODEL:
        yield family(kind, name, text, ["model"], [([model.name], read(model)) for model in models])
    reasons = [([model.name], {reason: model.unloads[reason] for reason in _REASONS}) for model in models]
    text = (
        "Number of unloads. evicted: to load another model; idle: --ttl; asked: POST /models/unload; changed: its "
        "file or settings changed"
    )
    yield family("counter", "model_unloads", text, ["model", "reason"], reasons)


_BY_MODEL: tuple[tuple[StatisticKind, str, str, Callable[[PooledModel[Any, Any]], float]], ...] = (
    (
        "gauge",
        "model_loaded",
        "1 if the model is loaded; 0 if it is not loaded or is draining",
        lambda model: model.state == "loaded",
    ),
    ("gauge", "model_requests", "Requests that use the model and keep it loaded", lambda model: model.leases),
    ("gauge", "model_waiting", "Requests waiting for the model to load", lambda model: model.waiting),
    ("gauge", "model_load_seconds", "Duration of the last load", lambda model: model.load_seconds),
    ("counter", "model_loads", "Number of loads", lambda model: model.loads),
    ("counter", "model_load_failures", "Number of failed loads", lambda model: model.load_failures),
)
