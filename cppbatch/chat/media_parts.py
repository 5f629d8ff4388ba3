"""Images and audio in messages: as references from clients, and as parts of a prompt.

Media are rendered as in llama-server: a marker takes the place of each in the message's text, and the prompt is split
at the markers. The tokens around parts of an image are specific to the model, so templates need not know them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec

from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

MediaKind = Literal["image", "audio"]
SourceKind = Literal["image", "audio", "video"]
"""A video becomes images and texts."""

READABLE = "text, image_url, input_image, input_audio, audio_url, input_video and video_url"
"""The types of parts that can be read, for errors."""


class MediaUrl(msgspec.Struct):
    """The location of an image or audio clip."""

    url: str
    """A data URL with base64, or, if the server allows it, an http, https or file URL."""
    detail: str | None = None
    """Ignored: the model determines the image size."""


class InputAudio(msgspec.Struct):
    """An audio clip."""

    data: str | None = None
    """Base64."""
    format: str | None = None
    """Ignored: the format (WAV, MP3 or FLAC) is detected from the data."""
    url: str | None = None
    """Instead of `data`: a URL, as in `MediaUrl`."""


class InputVideo(msgspec.Struct):
    """A video, as `InputAudio`."""

    data: str | None = None
    url: str | None = None


class MediaSource(msgspec.Struct, frozen=True):
    """An image or audio clip as specified by the client: not decoded, not loaded, not checked."""

    kind: SourceKind
    field: str
    """The field that errors name."""
    url: str
    """A data URL, an http, https or file URL, or plain base64."""

    @property
    def read_as(self) -> MediaKind:
        """What the model must be able to read."""
        return "image" if self.kind == "video" else self.kind

    def part(self) -> Json:
        """The source as a message part."""
        return {"type": _MEDIA, "media": self}


_MEDIA = "media"  # the type of a part whose "media" is a MediaSource, or what was loaded from it


class MediaFields(msgspec.Struct, kw_only=True):
    """The fields of an image, audio or video part."""

    image_url: str | MediaUrl | None = None
    """For `image_url` and `input_image`."""
    audio_url: str | MediaUrl | None = None
    """For `audio_url`."""
    input_audio: InputAudio | None = None
    """For `input_audio`."""
    input_video: InputVideo | None = None
    """For `input_video`."""
    video_url: str | MediaUrl | None = None
    """For `video_url`."""

    def source(self, kind: str, field: str) -> MediaSource | None:
        """The image or audio of a part of this type; None: another type. `field`: its name in errors.

        Raises `InvalidRequest` if it is missing.
        """
        if kind in ("image_url", "input_image"):
            return _source("image", f"{field}.image_url", self.image_url)
        if kind == "audio_url":
            return _source("audio", f"{field}.audio_url", self.audio_url)
        if kind == "video_url":
            return _source("video", f"{field}.video_url", self.video_url)
        if kind not in ("input_audio", "input_video"):
            return None
        is_audio = kind == "input_audio"
        given = (self.input_audio or InputAudio()) if is_audio else (self.input_video or InputVideo())
        name, url = ("url", given.url) if given.data is None else ("data", given.data)
        return _source("audio" if is_audio else "video", f"{field}.{kind}.{name}", url)


def _source(kind: SourceKind, field: str, given: str | MediaUrl | None) -> MediaSource:
    if isinstance(given, MediaUrl):
        field, given = f"{field}.url", given.url
    if not given:
        raise InvalidRequest(field, "is required: a data URL such as data:image/png;base64,...")
    return MediaSource(kind, field, given)


def media_of(messages: list[Json]) -> Iterator[Any]:
    """The images and audio of a conversation, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["media"] for part in content if part["type"] == _MEDIA)


def with_media(messages: list[Json], loaded: list[Any]) -> list[Json]:
    """The conversation with its images and audio replaced by these; a list of texts and images replaces a video.
    Returns new messages."""
    each = iter(loaded)

    def replace(content: list[Json]) -> list[Json]:
        return [{**part, "media": next(each)} if part["type"] == _MEDIA else part for part in content]

    return [
        {**message, "content": replace(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


def without_unreadable_results(messages: list[Json], readable: Collection[str]) -> list[Json]:
    """The conversation with a note in place of media that tools returned, except of these kinds. The model called the
    tool, so it gets to know; a refusal would end an agent's session, whose later requests all contain the result."""
    takes = " and ".join([*readable, "text"])

    def note(part: Json) -> Json:
        if part["type"] != _MEDIA or part["media"].read_as in readable:
            return part
        return {"type": "text", "text": f"[{part['media'].kind} omitted: this model accepts only {takes} input]"}

    return [
        {**message, "content": [note(part) for part in message["content"]]}
        if message["role"] == "tool" and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


class PlainText(msgspec.Struct, frozen=True, tag=True):
    """A part of a prompt in which the texts of control tokens, such as `<|im_end|>`, are plain text."""

    text: str


class Placeholders:
    """Texts that take the place of images, audio and control tokens in a conversation while a template renders it.

    They are random and new for each conversation, so that clients' texts cannot contain one.
    """

    def __init__(self, control_tokens: re.Pattern[str] | None = None) -> None:
        """`control_tokens`: finds the texts of the model's control tokens; None: they are not replaced."""
        self._control_tokens = control_tokens
        self._name = f"<__{secrets.token_hex(8)}_"
        self._parts: list[Any] = []  # a medium or `PlainText` for each placeholder
        self._numbers: dict[str, int] = {}  # the placeholders of plain texts

    def hide_media(self, messages: list[Json]) -> list[Json]:
        """The messages with placeholders for media. Contents with media become texts."""
        return [self._hide_media(message) for message in messages]

    def hide_control_tokens(self, value: Any, kept: Collection[str] = ()) -> Any:
        """A JSON value with placeholders for the control tokens in its texts, except `kept` ones."""
        if isinstance(value, str) and self._control_tokens:
            return self._control_tokens.sub(
                lambda found: found[0] if found[0] in kept else self._plain(found[0]), value
            )
        if isinstance(value, dict):
            hide = self.hide_control_tokens
            return {hide(name, kept): hide(each, kept) for name, each in value.items()}
        return [self.hide_control_tokens(each, kept) for each in value] if isinstance(value, list) else value

    def parts(self, prompt: str) -> list[Any] | None:
        """The texts, `PlainText` and media of a rendered prompt, in order; None: it has no placeholders.

        Raises `InvalidRequest` if the template has omitted a medium.
        """
        if not self._parts:
            return None
        pieces = re.split(re.escape(self._name) + r"(\d+)__>", prompt)  # text, number, text, number, ... text
        numbers = [int(number) for number in pieces[1::2]]
        media = [number for number, part in enumerate(self._parts) if not isinstance(part, PlainText)]
        if missing := set(media).difference(numbers):
            raise InvalidRequest(
                "messages",
                f"contain {len(media)} images or audio clips, but this model's chat template omits number "
                f"{media.index(min(missing)) + 1}: send it in a user message",
            )
        parts: list[Any] = [*pieces]
        parts[1::2] = [self._parts[number] for number in numbers]
        return [part for part in parts if part != ""]

    def _hide_media(self, message: Json) -> Json:
        content = message.get("content")
        if not isinstance(content, list) or not any(part["type"] == _MEDIA for part in content):
            return message
        text, after_medium = "", False
        for part in content:  # a line for each text, and no line break around a medium, as in llama-server
            if part["type"] == _MEDIA:
                of_part = part["media"] if isinstance(part["media"], list) else [part["media"]]
                text += "".join(each if isinstance(each, str) else self._placeholder(each) for each in of_part)
            else:
                text += ("\n" if text and not after_medium else "") + (part.get("text") or "")
            after_medium = part["type"] == _MEDIA
        return {**message, "content": text}

    def _plain(self, text: str) -> str:
        if text not in self._numbers:
            self._numbers[text] = len(self._parts)
            self._parts.append(PlainText(text))
        return self._text(self._numbers[text])

    def _placeholder(self, medium: Any) -> str:
        self._parts.append(medium)
        return self._text(len(self._parts) - 1)

    def _text(self, number: int) -> str:
        return f"{self._name}{number}__>"
