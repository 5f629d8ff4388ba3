"""`/props`, `/slots` and `/lora-adapters`."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch import __version__
from cppbatch.chat.chat_format import ChatForms
from cppbatch.chat.template import CHATML
from cppbatch.engine.lora_sets import adapter_set
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.server.api_errors import SwitchedOff, json_response
from cppbatch.server.endpoint import QUERY_ERRORS, Routes
from cppbatch.server.keys import KEY
from cppbatch.server.llama_settings import GenerationSettings, generation_settings
from cppbatch.server.mixed_prompts import MEDIA_MARKER
from cppbatch.server.model_choice import lease_model
from cppbatch.server.parse import parse, read_json
from cppbatch.server.sampling_fields import LoraScale, scales_by_number
from cppbatch.server.served_models import MODELS
from cppbatch.server.serving import Serving

routes = Routes()


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a request that does not set them."""

    params: GenerationSettings
    n_ctx: int
    """The maximum number of tokens of prompt and completion together."""


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """Supported inputs besides text."""

    vision: bool = False
    video: bool = False
    audio: bool = False


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /props`."""

    default_generation_settings: DefaultSettings
    total_slots: int
    """Sequences that can run at once, of all workers."""
    model_alias: str
    model_path: str
    modalities: Modalities
    media_marker: str
    """What stands for a picture or a sound in the `prompt_string` of `/completion`; another one after each start."""
    chat_template: str
    has_chat_template: bool
    """Whether the model, or --chat-template, has one. `chat_template` is ChatML without it."""
    chat_forms: ChatForms | None
    """How the model writes tool calls and thoughts, learned from the template; null if that is broken."""
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool
    """--slots."""
    endpoint_props: bool
    """--props."""
    endpoint_metrics: bool
    """--metrics."""
    is_sleeping: bool
    """Every worker has ended because it was idle (--sleep-idle-seconds)."""


class RouterProps(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /props` of a server with several models, without `?model=`; as llama-server's router answers."""

    role: Literal["router"] = "router"
    max_instances: int
    """--models-max; 0: as many as fit."""
    models_autoload: bool
    """--models-autoload."""
    model_alias: str | None
    """The default model."""
    build_info: str
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /slots`."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False


class LoraAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /lora-adapters`."""

    id: int
    name: str
    path: str
    scale: float
    """The scale for requests without `lora`."""


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """A change was made."""

    success: bool = True


class PropsChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /props`. As in llama-server, no property can be changed."""


@routes.get("/props", (Props, RouterProps))
async def props(request: web.Request) -> web.Response:
    """Get the properties and default settings of the model; with several models, select one with ?model=.

    That one is loaded for it.
    """
    models = request.app[MODELS]
    if models.router and "model" not in request.query:
        return json_response(
            RouterProps(
                max_instances=models.router.max_loaded,
                models_autoload=models.router.autoload,
                model_alias=models.router.default,
                build_info=f"b{__version__}-cppbatch",
                endpoint_slots=models.settings.slots,
                endpoint_props=models.settings.props,
                endpoint_metrics=models.settings.metrics,
            )
        )
    with await lease_model(request) as lease:
        serving = lease.serving
        info = serving.info
        return json_response(
            Props(
                default_generation_settings=DefaultSettings(params=_default_settings(serving), n_ctx=info.max_sequence),
                total_slots=serving.client.config.n_parallel * len(await serving.client.workers()),
                model_alias=serving.name,
                model_path=info.path,
                modalities=Modalities(vision="image" in info.modalities, audio="audio" in info.modalities),
                media_marker=MEDIA_MARKER,
                chat_template=serving.template or CHATML,
                has_chat_template=serving.template is not None,
                chat_forms=serving.chat_forms,
                bos_token=info.bos,
                eos_token=info.eos,
                build_info=f"cppbatch {__version__}",
                endpoint_slots=serving.settings.slots,
                endpoint_props=serving.settings.props,
                endpoint_metrics=serving.settings.metrics,
                is_sleeping=serving.client.health().status == "sleeping",
            )
        )


@routes.post("/props", Success, PropsChange, (400, 401, 403, 413, 429, 501, 503))
async def change_props(request: web.Request) -> web.Response:
    """Has no effect, as in llama-server; 501 without --props.

    Raises `InvalidRequest` for a property.
    """
    if not request.app[MODELS].settings.props:
        raise SwitchedOff("POST /props is disabled: start the server with --props")
    await read_json(request, PropsChange)
    return json_response(Success())


def _default_settings(serving: Serving) -> GenerationSettings:
    params = SamplingParams(**serving.default_params())
    end_tokens = serving.info.end_tokens
    return generation_settings(params, n_keep=serving.client.config.n_keep, seed=params.seed, end_tokens=end_tokens)


@routes.get("/slots", list[Slot], (*QUERY_ERRORS, 501))
async def slots(request: web.Request) -> web.Response:
    """Get one slot for each sequence that can run at the same time.

    With `fail_on_no_slot` 503 if all are busy. Requests have no slots of their own: the first slots of each worker are
    reported as busy. Raises `SwitchedOff`.
    """
    if not request.app[MODELS].settings.slots:
        raise SwitchedOff("/slots is disabled: start the server without --no-slots")
    with await lease_model(request) as lease:
        serving = lease.serving
        n, n_ctx = serving.client.config.n_parallel, serving.info.max_sequence
        found: list[Slot] = []
        for worker in await serving.client.workers():
            running = worker.stats.running if worker.stats else worker.in_flight
            found += [Slot(id=len(found) + i, n_ctx=n_ctx, is_processing=i < running) for i in range(n)]
        if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in found):
            raise web.HTTPServiceUnavailable(text="no slot available")
        return json_response(found)


@routes.get("/lora-adapters", list[LoraAdapter])
async def lora_adapters(request: web.Request) -> web.Response:
    """List the adapters that `lora` in a request can reference."""
    with await lease_model(request) as lease:
        serving = lease.serving
        adapters = serving.info.adapters
        scales = dict(adapter_set(serving.lora, adapters))
        found = [
            LoraAdapter(id=i, name=adapter.name, path=adapter.path, scale=scales.get(i, 0.0))
            for i, adapter in enumerate(adapters)
        ]
        return json_response(found)


@routes.post("/lora-adapters", Success, LoraScale, (400, 401, 403, 413, 429, 503), takes_list=True)
async def set_lora_adapters(request: web.Request) -> web.Response:
    """Set the adapter scales for requests without `lora`.

    Those that come later. Adapters that are not named are off. Raises `InvalidRequest`, and `Forbidden` for a key that
    may not use all adapters.
    """
    with await lease_model(request) as lease:
        serving = lease.serving
        if rules := request.get(KEY):
            rules.check_sets_adapters()
        entries = parse(await request.read(), list[LoraScale])
        lora: dict[str | int, float] = dict(scales_by_number(entries).items())
        GenerationRequest(id="", prompt="", lora=lora)  # checks the scales
        adapter_set(lora, serving.info.adapters)  # checks that the adapters exist
        serving.lora = lora
        return json_response(Success())
