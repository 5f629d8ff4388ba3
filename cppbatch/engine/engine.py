"""The public engine, for Python programs: whole lists of prompts, or requests one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cppbatch.config import EngineConfig
from cppbatch.engine import offline, offline_chat
from cppbatch.engine.params import Params, SamplingParams
from cppbatch.engine.request import Completion, Prompt
from cppbatch.engine.request_engine import RequestEngine
from cppbatch.engine_settings import EngineSettings
from cppbatch.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BatchInferenceEngine(RequestEngine):
    """Runs many requests in one llama.cpp context, as one batch that sequences join and leave at any step.

    Offline: `chat`, `generate`, `stream`, `map`, `embed`. Individual requests: `add_request`, then `step` until
    `has_work` is False. For asyncio use `cppbatch.LocalEngine`, for many clients `cppbatch serve`.

    A context manager. Thread-safe: requests of several threads share batches, and each call waits for at most a few
    steps of the others. Not for forked processes, where every call raises `EngineClosed`. An engine that is dropped
    without `close` is freed when the last reference to it goes, with a `ResourceWarning`.
    """

    generate = offline.generate
    generate_grid = offline.generate_grid
    stream = offline.stream
    map = offline.map_prompts
    embed = offline.embed
    forward_batch = offline.forward_batch
    chat = offline_chat.chat
    chat_stream = offline_chat.chat_stream


def generate_batch(  # noqa: PLR0917  # the positional form of the usual scripts
    model: str | Path | EngineConfig | BatchInferenceEngine,
    prompts: Sequence[Prompt],
    params: Params | Sequence[SamplingParams] = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    *,
    max_tokens: int | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    progress: bool | None = None,
    **settings: Unpack[EngineSettings],
) -> list[Completion]:
    """`BatchInferenceEngine.generate` as a single call, for a loaded engine, or for a model that is loaded and freed
    here.

    `temperature` to `stop`: fields of `SamplingParams` for all prompts, instead of `params`, or together with a number
    of tokens (`generate_batch(model, prompts, 50, 0.7, 0.9, 42)`). `settings`: fields of `EngineConfig` (n_ctx,
    n_parallel ...), for a model that is not loaded yet. Raises `ConfigError` if they are given with an engine,
    `InvalidRequest` if fields are combined with `params`, and the errors of loading and `generate`.
    """
    fields = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in {**fields, "seed": seed, "stop": stop}.items() if value is not None}
    if isinstance(params, int) and max_tokens is None:
        given, params = {**given, "max_tokens": params}, None
    if given and params is not None:
        raise InvalidRequest("params", f"cannot be combined with {', '.join(given)}; set them in `params`")
    params = SamplingParams(**given) if given else params  # type: ignore[arg-type]  # checked by SamplingParams
    if isinstance(model, BatchInferenceEngine):
        if settings:
            raise ConfigError(
                f"{', '.join(settings)}: the engine is already loaded; pass these settings when creating it"
            )
        return model.generate(prompts, params, progress=progress)
    with BatchInferenceEngine(model, **settings) as engine:
        return engine.generate(prompts, params, progress=progress)
