"""Loads the models of a multi-model server, with sizes that fit into the free memory at that time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cppbatch import child_processes
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.config import EngineConfig
from cppbatch.errors import EstimateFailed
from cppbatch.models.check import check_model
from cppbatch.server.settings import ServerSettings
from cppbatch.sizing.attention import plan_attention
from cppbatch.sizing.fit_again import refit
from cppbatch.sizing.memory_check import memory_shortage
from cppbatch.sizing.profile import use_profile
from cppbatch.sizing.sizes import LoadedSizes, candidates_for, first_beside

log = logging.getLogger("cppbatch.models")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the server can load, with its settings."""

    name: str
    """The name in responses."""
    config: EngineConfig
    given: frozenset[str] = frozenset()
    """The settings of `config` that were set explicitly. Other sizes depend on the free memory."""
    deployment: Deployment = Deployment()
    settings: ServerSettings = ServerSettings()
    """The server's settings, with the names, chat template and sampling defaults of this model."""
    pinned: bool = False
    """Loaded at startup, and never evicted."""
    preload: bool = False
    """Loaded at startup, but may be evicted."""
    ttl: float = -1
    """Seconds without a request after which it is unloaded; -1: never."""
    file_version: tuple[int, int] | None = None
    """Modification time of its file (nanoseconds), and its size in bytes. None: the file does not exist."""
    is_elsewhere: bool = False
    """Whether a file must be downloaded first: `config` does not have its path yet."""


class LoadPlan(NamedTuple):
    """How a model is loaded."""

    spec: ModelSpec
    sizes: LoadedSizes


class MemoryPlanLoader:
    """A `cppbatch.cluster.model_pool.ModelLoader`. `specs`: the models by name; the owner may change them."""

    def __init__(self, *, use_profiles: bool = True, memory_check: bool = True, budget: int | None = None) -> None:
        """`memory_check`: if False, every model is assumed to fit. `budget`: bytes for all models together; None: the
        free memory."""
        self.specs: dict[str, ModelSpec] = {}
        self._use_profiles, self._memory_check, self._budget = use_profiles, memory_check, budget

    async def plan(self, name: str, others: Sequence[LoadPlan], pinned: Sequence[LoadPlan]) -> LoadPlan:
        """Chooses sizes that fit. Raises `DoesNotFit`, and `ModelError` for a file that is not a model."""
        return await child_processes.to_thread(self._plan, self.specs[name], others, pinned)

    def _plan(self, spec: ModelSpec, others: Sequence[LoadPlan], pinned: Sequence[LoadPlan]) -> LoadPlan:
        check_model(Path(spec.config.model_path))
        config, decided = spec.config, set(spec.given)
        if self._use_profiles:
            used = use_profile(config, spec.given)
            config, decided = used.config, decided | used.decided
        config = plan_attention(config, decided).config
        if not self._memory_check:
            return LoadPlan(spec, LoadedSizes(config, None))
        candidates = candidates_for(config, decided)
        try:
            sizes = first_beside(
                candidates,
                [other.sizes for other in others],
                [other.sizes for other in pinned],
                engines=spec.deployment.configs,
                budget=self._budget,
                decided=decided,
            )
        except EstimateFailed as error:
            log.warning("could not check whether %s fits into memory: %s", spec.name, error)
            sizes = LoadedSizes(candidates[0], None)
        return LoadPlan(spec, sizes)

    def start(self, name: str, plan: LoadPlan) -> EngineClient:
        config, deployment = plan.sizes.config, plan.spec.deployment
        log.info("loading %s with -np %d -c %d", name, config.n_parallel, config.n_ctx)
        shortage = memory_shortage if self._memory_check else None
        deployment = msgspec.structs.replace(deployment, refit=refit(plan.spec.config), memory_shortage=shortage)
        return deployment.start(config)
