"""`/props`, `/slots` and `/lora-adapters`."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from cppbatch import __version__
from cppbatch.chat.capabilities import TemplateCaps
from cppbatch.chat.chat_format import ChatForms
from cppbatch.chat.template import CHATML
from cppbatch.engine.lora_sets import adapter_set
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.server.answer.llama_result import GenerationSettings, generation_settings
from cppbatch.server.answer.mixed_prompts import MEDIA_MARKER
from cppbatch.server.auth.keys import KEY
from cppbatch.server.fields.parse import parse, read_json
from cppbatch.server.fields.sampling import LoraScale, scales_by_number
from cppbatch.server.http.api_errors import SwitchedOff, json_response
from cppbatch.server.http.endpoint import QUERY_ERRORS, Routes
from cppbatch.server.models.served import MODELS, lease_model
from cppbatch.server.models.serving import Serving

routes = Routes()


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The default settings of requests."""

    params: GenerationSettings
    n_ctx: int
    """Maximum tokens of prompt and completion together."""


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """Supported inputs besides text."""

    vision: bool = False
    video: bool = False
    audio: bool = False


def _modalities(serving: Serving) -> Modalities:
    known = serving.info.modalities
    has_video = "image" in known and serving.settings.video.ffmpeg is not None
    return Modalities(vision="image" in known, video=has_video, audio="audio" in known)


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /props`."""

    default_generation_settings: DefaultSettings
    total_slots: int
    """Maximum concurrent sequences, over all workers."""
    model_alias: str
    model_path: str
    modalities: Modalities
    n_keep: int | None
    """With --context-shift: how many tokens at the start of a full context are kept (--keep), -1: the prompt. Null: a
    text ends where its context is full."""
    media_marker: str
    """The placeholder for an image or audio in the `prompt_string` of `/completion`; differs after each start."""
    chat_template: str
    has_chat_template: bool
    """Whether there is a chat template, from the model or --chat-template. Otherwise `chat_template` is ChatML."""
    chat_forms: ChatForms | None
    """How the model writes tool calls and reasoning, learned from the template; null if the template is broken."""
    chat_template_caps: TemplateCaps | None
    """What the template supports; null if it is broken. Tools work with every template (`chat_forms`)."""
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
    """Whether all workers have stopped because they were idle (--sleep-idle-seconds)."""


class RouterProps(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /props` on a server with several models, without `?model=`, as in llama-server's router."""

    role: Literal["router"] = "router"
    max_instances: int
    """--models-max; 0: limited by memory."""
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
    """The scale in requests without `lora`."""


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """The change was made."""

    success: bool = True


class PropsChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /props`. As in llama-server, properties cannot be changed."""


@routes.get("/props", (Props, RouterProps))
async def props(request: web.Request) -> web.Response:
    """Get the properties and default settings of the model; with several models, select one with ?model=.

    The selected model is loaded.
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
                modalities=_modalities(serving),
                n_keep=serving.client.config.n_keep if serving.client.config.context_shift else None,
                media_marker=MEDIA_MARKER,
                chat_template=serving.template or CHATML,
                has_chat_template=serving.template is not None,
                chat_forms=await serving.learn_chat_forms(),
                chat_template_caps=await serving.learn_template_caps(),
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

    With `fail_on_no_slot`, 503 if all are busy. Requests are not assigned to slots: the first slots of each worker are
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

    Applies to later requests. Adapters that are not listed are off. Raises `InvalidRequest`, and `Forbidden` for a key
    that may not use all adapters.
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
