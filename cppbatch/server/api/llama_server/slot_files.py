"""`POST /slots/{id}?action=save|restore|erase`."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter

import msgspec
from aiohttp import web

from cppbatch.engine.disk.slots import SlotActionName
from cppbatch.errors import InvalidRequest
from cppbatch.server.fields.parse import parse
from cppbatch.server.http.api_errors import SwitchedOff, json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import MODELS, lease_model
from cppbatch.server.models.serving import Serving
from cppbatch.typed_json import convert

routes = Routes()


_FILE_NAME = re.compile(r"(?!\.)[^/\\:\x00-\x1f\x7f]{1,64}")
"""A file name that stays within the folder on any system, and is not that of a temporary file."""


class SlotQuery(msgspec.Struct, kw_only=True):
    """The query string."""

    action: SlotActionName
    model: str | None = None
    """Selects one of several models."""


class SlotFileRequest(msgspec.Struct, kw_only=True):
    """The body for save and restore."""

    filename: str
    """A name without a folder: 1 to 64 characters, no / \\ or :, not starting with a dot."""


class SaveTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of saving."""

    save_ms: float


class RestoreTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of restoring."""

    restore_ms: float


class SlotSaved(msgspec.Struct, frozen=True, kw_only=True):
    """The response to save."""

    id_slot: int
    filename: str
    n_saved: int
    """Tokens."""
    n_written: int
    """Bytes."""
    timings: SaveTimings


class SlotRestored(msgspec.Struct, frozen=True, kw_only=True):
    """The response to restore."""

    id_slot: int
    filename: str
    n_restored: int
    """Tokens."""
    n_read: int
    """Bytes."""
    timings: RestoreTimings


class SlotErased(msgspec.Struct, frozen=True, kw_only=True):
    """The response to erase."""

    id_slot: int
    n_erased: int
    """Tokens."""


@routes.post(
    "/slots/{id}",
    (SlotSaved, SlotRestored, SlotErased),
    SlotFileRequest,
    (400, 401, 413, 429, 500, 501, 503),
    query=SlotQuery,
)
async def slot_action(request: web.Request) -> web.Response:
    """Save the cached prefix of a slot to a file, restore it, or erase it; 501 without --slot-save-path.

    Raises `SwitchedOff` and `InvalidRequest`.
    """
    folder = request.app[MODELS].settings.slot_save_path
    if folder is None:
        raise SwitchedOff("saving, restoring and erasing slots is disabled: start the server with --slot-save-path DIR")
    action = convert(dict(request.query), SlotQuery, from_text=True).action
    with await lease_model(request) as lease:
        return await _act(request, lease.serving, folder, action)


async def _act(request: web.Request, serving: Serving, folder: Path, action: SlotActionName) -> web.Response:
    slot = await _slot(request, serving)
    if action == "erase":
        report = await serving.client.slot_action(action, slot)
        return json_response(SlotErased(id_slot=slot, n_erased=report.n_tokens))
    name = parse(await request.read(), SlotFileRequest).filename
    if not _FILE_NAME.fullmatch(name):
        message = (
            f"is {name!r:.80}; it must be 1 to 64 characters, must not contain / \\ : and must not start with a dot"
        )
        raise InvalidRequest("filename", message)
    began = perf_counter()
    report = await serving.client.slot_action(action, slot, str(folder / name))
    ms, n, n_bytes = (perf_counter() - began) * 1000, report.n_tokens, report.n_bytes
    if action == "save":
        timings = SaveTimings(save_ms=ms)
        return json_response(SlotSaved(id_slot=slot, filename=name, n_saved=n, n_written=n_bytes, timings=timings))
    restored = RestoreTimings(restore_ms=ms)
    return json_response(SlotRestored(id_slot=slot, filename=name, n_restored=n, n_read=n_bytes, timings=restored))


async def _slot(request: web.Request, serving: Serving) -> int:
    given, client = request.match_info["id"], serving.client
    n_slots = client.config.n_parallel * len(await client.workers())
    if not re.fullmatch("[0-9]{1,9}", given) or int(given) >= n_slots:
        raise InvalidRequest("id_slot", f"is {given!r:.40}; it must be from 0 to {n_slots - 1}")
    return int(given)
