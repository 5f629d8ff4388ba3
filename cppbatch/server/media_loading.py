"""Validates and loads the images and audio of a request before its prompt is rendered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cppbatch.chat.media_parts import MediaSource, media_of, with_media, without_unreadable_results
from cppbatch.engine.media.sources import check_media, decode_data, is_remote, refuse_unreadable
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import Media, MediaPrompt, Prompt
from cppbatch.errors import InvalidRequest
from cppbatch.server.http.limits import Limits
from cppbatch.server.remote_media import ByteBudget, fetch
from cppbatch.server.settings import ServerSettings
from cppbatch.server.video import read_video

Json = dict[str, Any]


class MediaLoader:
    """Loads the images and audio of one HTTP request, which its conversations may share."""

    def __init__(self, settings: ServerSettings, info: ModelInfo) -> None:
        self._limits, self._settings, self._info = settings.limits, settings, info
        self._budget = ByteBudget(settings.limits.max_media_bytes)
        self._fetched: dict[str, bytes | InvalidRequest] = {}
        self._loaded: dict[tuple[str, str], list[str | Media]] = {}  # by kind and URL

    async def fetch(self, conversations: Iterable[list[Json]]) -> None:
        """Fetches media from other hosts, unless they are refused unread. Raises the same errors as `load`."""
        remote: dict[str, MediaSource] = {}
        for given in conversations:
            messages = without_unreadable_results(given, self._info.modalities)
            with contextlib.suppress(InvalidRequest):
                remote |= {each.url: each for each in self._sources(messages) if is_remote(each) and not _is_file(each)}
        at_once = asyncio.Semaphore(8)
        await asyncio.gather(*(self._fetch(source, at_once) for source in remote.values()))

    def load(self, messages: list[Json]) -> list[Json]:
        """The conversation with its media loaded, which takes time. Media on other hosts must be fetched first. Results
        of tools that the model cannot read are replaced by a note.

        Raises `InvalidRequest`.
        """
        messages = without_unreadable_results(messages, self._info.modalities)
        sources = self._sources(messages)
        if not sources:
            return messages
        left = self._limits.max_media_bytes
        for source in sources:
            left -= sum(len(each.data) for each in self._media(source) if isinstance(each, Media))
            if left < 0:
                limit = f"{self._limits.max_media_mb} MiB (--max-media-mb)"
                raise InvalidRequest(source.field, f"makes the request's images and audio larger than {limit}")
        found = [self._media(source) for source in sources]
        return with_media(messages, [each if len(each) > 1 else each[0] for each in found])

    def _sources(self, messages: list[Json]) -> list[MediaSource]:
        """The media, not loaded yet. Raises `InvalidRequest` if the model does not support them, and for too many."""
        sources: list[MediaSource] = list(media_of(messages))
        for source in sources:
            refuse_unreadable(source, self._info)
        if len(sources) > (most := self._limits.max_media):
            message = f"is one of {len(sources)} images and audio files; the limit per request is {most} (--max-media)"
            raise InvalidRequest(sources[most].field, message)
        return sources

    def _media(self, source: MediaSource) -> list[str | Media]:
        """An image or audio clip, or the texts and images of a video."""
        key = source.kind, source.url
        if key not in self._loaded:
            data = self._bytes(source) if is_remote(source) else decode_data(source)
            is_video, limit = source.kind == "video", self._limits.max_media_bytes
            self._loaded[key] = (
                read_video(source.field, data, self._settings.video, limit) if is_video else [check_media(source, data)]
            )
        return self._loaded[key]

    def _bytes(self, source: MediaSource) -> bytes:
        if _is_file(source):
            return read_local(source, self._settings.media_path, self._budget)
        fetched = self._fetched[source.url]
        if isinstance(fetched, InvalidRequest):
            raise fetched.with_field(source.field)
        return fetched

    async def _fetch(self, source: MediaSource, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            try:
                domains = self._settings.media_domains
                self._fetched[source.url] = await fetch(source.field, source.url, domains, self._budget)
            except InvalidRequest as error:
                self._fetched[source.url] = error


def _is_file(source: MediaSource) -> bool:
    return source.url[:5].lower() == "file:"


def read_local(source: MediaSource, folder: Path | None, budget: ByteBudget) -> bytes:
    """The bytes of a file:// URL in the folder of --media-path. Raises `InvalidRequest`."""
    if folder is None:
        message = (
            "is a file on the server, which is not allowed: start the server with --media-path DIR, or send the "
            "file as a data URL"
        )
        raise InvalidRequest(source.field, message)
    none = InvalidRequest(source.field, f"is {source.url!r:.200}: file not found in the --media-path folder")
    try:
        path = (folder / unquote(source.url[5:].removeprefix("//"))).resolve()  # an absolute path replaces the folder
        if not path.is_relative_to(folder) or not path.is_file():
            raise none
        budget.take(source.field, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise none from error
    except ValueError as error:  # a null byte
        raise error if isinstance(error, InvalidRequest) else none from error


def refuse_large(prompts: Sequence[Prompt], n: int, limits: Limits) -> None:
    """Raises `InvalidRequest` if the media of `n` completions of each of these prompts exceed the limit per request:
    each completion is sent to the engine with its own copy."""
    if n * sum(map(media_bytes, prompts)) > limits.max_media_bytes:
        message = f"makes {n * len(prompts)} completions, whose images and audio together exceed"
        raise InvalidRequest("n" if n > 1 else "prompts", f"{message} {limits.max_media_mb} MiB (--max-media-mb)")


def media_bytes(prompt: Prompt) -> int:
    """Bytes of a prompt's images and audio."""
    return sum(len(each.data) for each in prompt.media) if isinstance(prompt, MediaPrompt) else 0
