"""Pictures and sounds in messages: as clients name them, and as parts of a prompt.

A medium is rendered as llama-server does it: a marker takes its place in the message's text, and the prompt is split at
the markers. What stands between the parts of a picture's tokens is the model's own, so templates need not know it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from cppbatch.errors import InvalidRequest

Json = dict[str, Any]
MediaKind = Literal["image", "audio"]

READABLE = "text, image_url, input_image, input_audio and audio_url"
"""The types of parts that can be read, for errors."""


class MediaUrl(msgspec.Struct):
    """The location of an image or audio clip."""

    url: str
    """A data URL with base64, or, if the server allows it, an http, https or file URL."""
    detail: str | None = None
    """Ignored: the model determines the image size."""


class InputAudio(msgspec.Struct):
    """A sound."""

    data: str | None = None
    """Base64."""
    format: str | None = None
    """Ignored: the format (WAV, MP3 or FLAC) is detected from the data."""
    url: str | None = None
    """Instead of `data`: a URL, as in `MediaUrl`."""


class MediaSource(msgspec.Struct, frozen=True):
    """An image or audio clip as specified by the client: not decoded, not loaded, not checked."""

    kind: MediaKind
    field: str
    """Its name in errors."""
    url: str
    """A data URL, an address with http, https or file, or base64 alone."""

    def part(self) -> Json:
        """It as a part of a message."""
        return {"type": _MEDIA, "media": self}


_MEDIA = "media"  # the type of a part whose "media" is a MediaSource, or what was loaded from it


class MediaFields(msgspec.Struct, kw_only=True):
    """The fields of an image or audio part."""

    image_url: str | MediaUrl | None = None
    """Of image_url and input_image."""
    audio_url: str | MediaUrl | None = None
    """Of audio_url."""
    input_audio: InputAudio | None = None
    """Of input_audio."""

    def source(self, kind: str, field: str) -> MediaSource | None:
        """The picture or the sound of a part of this type; None: the type is neither. `field`: its name in errors.

        Raises `InvalidRequest` if it has none.
        """
        if kind in ("image_url", "input_image"):
            return _source("image", f"{field}.image_url", self.image_url)
        if kind == "audio_url":
            return _source("audio", f"{field}.audio_url", self.audio_url)
        if kind != "input_audio":
            return None
        given = self.input_audio or InputAudio()
        name, url = ("url", given.url) if given.data is None else ("data", given.data)
        return _source("audio", f"{field}.input_audio.{name}", url)


def _source(kind: MediaKind, field: str, given: str | MediaUrl | None) -> MediaSource:
    if isinstance(given, MediaUrl):
        field, given = f"{field}.url", given.url
    if not given:
        raise InvalidRequest(field, "is required: a data URL such as data:image/png;base64,...")
    return MediaSource(kind, field, given)


def media_of(messages: list[Json]) -> Iterator[Any]:
    """The pictures and sounds of a conversation, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["media"] for part in content if part["type"] == _MEDIA)


def with_media(messages: list[Json], loaded: list[Any]) -> list[Json]:
    """The conversation with these in place of its pictures and sounds. Returns new messages."""
    each = iter(loaded)

    def replaced(content: list[Json]) -> list[Json]:
        return [{**part, "media": next(each)} if part["type"] == _MEDIA else part for part in content]

    return [
        {**message, "content": replaced(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


class MarkedMedia:
    """A conversation whose pictures and sounds are markers in its text.

    The markers are random, and new for each conversation, so no text of a client can contain one.
    """

    def __init__(self, messages: list[Json]) -> None:
        self._media = list(media_of(messages))
        self._name = f"<__media_{secrets.token_hex(16)}_" if self._media else ""
        self.messages = [self._marked(message, first) for message, first in _with_numbers(messages)]
        """The messages. A content that had media is a text."""

    def parts(self, prompt: str) -> list[Any] | None:
        """The texts and the media of a rendered prompt, in its order; None: there are no media.

        Raises `InvalidRequest` if the template has left one out.
        """
        if not self._media:
            return None
        pieces = re.split(re.escape(self._name) + r"(\d+)__>", prompt)  # text, number, text, number, ... text
        numbers = [int(number) for number in pieces[1::2]]
        if missing := set(range(len(self._media))).difference(numbers):
            raise InvalidRequest(
                "messages",
                f"contain {len(self._media)} images or audio clips, but this model's chat template omits number "
                f"{min(missing) + 1}: send it in a user message",
            )
        parts: list[Any] = [*pieces]
        parts[1::2] = [self._media[number] for number in numbers]
        return [part for part in parts if part != ""]

    def _marked(self, message: Json, first: int) -> Json:
        """The message with markers; its first medium has the number `first`."""
        content = message.get("content")
        if not isinstance(content, list) or not any(part["type"] == _MEDIA for part in content):
            return message
        text, after_marker = "", False
        for part in content:  # a line for each text, and no line break around a medium, as in llama-server
            if part["type"] == _MEDIA:
                text += f"{self._name}{first}__>"
                first += 1
            else:
                text += ("\n" if text and not after_marker else "") + (part.get("text") or "")
            after_marker = part["type"] == _MEDIA
        return {**message, "content": text}


def _with_numbers(messages: list[Json]) -> Iterator[tuple[Json, int]]:
    """Each message, with the number of media before it."""
    n = 0
    for message in messages:
        yield message, n
        n += sum(1 for _ in media_of([message]))
