"""Resolves references to images and audio in requests to file contents."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.media_parts import MediaKind, MediaSource, SourceKind, media_of, with_media
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import Media, MediaPrompt
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_NAMES: dict[SourceKind, str] = {"image": "an image", "audio": "audio", "video": "a video"}
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_WHITESPACE = b" \t\r\n"
_DECODED_CHARACTERS = 1 << 20
"""Characters decoded at once: other threads run between pieces, so none waits longer than a millisecond or two."""
_REMOTE = ("http://", "https://", "file:")


class _Format(NamedTuple):
    """A file format."""

    name: str
    kind: MediaKind
    mime: str


_FORMATS = (
    (b"\x89PNG\r\n\x1a\n", _Format("PNG", "image", "image/png")),
    (b"\xff\xd8\xff", _Format("JPEG", "image", "image/jpeg")),
    (b"GIF8", _Format("GIF", "image", "image/gif")),
    (b"BM", _Format("BMP", "image", "image/bmp")),
    (b"fLaC", _Format("FLAC", "audio", "audio/flac")),
    (b"ID3", _Format("MP3", "audio", "audio/mpeg")),
)
_RIFF = {b"WEBP": _Format("WebP", "image", "image/webp"), b"WAVE": _Format("WAV", "audio", "audio/wav")}


def prompt_of_chat(chat: PreparedChat) -> str | MediaPrompt:
    """The prompt in the form that the engine takes."""
    return chat.prompt if chat.parts is None else MediaPrompt(chat.parts)


def is_remote(source: MediaSource) -> bool:
    """Whether the bytes are outside the request itself."""
    return source.url[:8].lower().startswith(_REMOTE)


def refuse_unreadable(source: MediaSource, info: ModelInfo) -> None:
    """Raises `InvalidRequest` for images or audio that the model does not support, before anything is decoded."""
    if source.read_as in info.modalities:
        return
    if info.modalities:
        takes = " and ".join([*info.modalities, "text"])
        raise InvalidRequest(source.field, f"is {_NAMES[source.kind]}, but {info.name} accepts only {takes} input")
    message = f"is {_NAMES[source.kind]}, but {info.name} is loaded without a projector: start it with --mmproj FILE"
    raise InvalidRequest(source.field, message)


def decode_media(source: MediaSource) -> Media:
    """The image or audio of a data URL or of plain base64. Raises `InvalidRequest`."""
    return check_media(source, decode_data(source))


def decode_data(source: MediaSource) -> bytes:
    """The bytes of a data URL or of plain base64. Raises `InvalidRequest`."""
    if is_remote(source):
        message = f"is {source.url!r:.80}; it must be a data URL such as data:image/png;base64,..., or a file path"
        raise InvalidRequest(source.field, message)
    text = source.url
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            message = f"is {head!r:.60}; a data URL must have the form data:image/png;base64,..."
            raise InvalidRequest(source.field, message)
    return from_base64(source.field, text)


def source_of_data(field: str, text: str) -> MediaSource:
    """A source for base64 that may be an image or audio, determined from the first bytes. Unknown formats count as
    images, which `decode_media` refuses."""
    head = text[: 1 << 16]
    if head[:5].lower() == "data:":
        head = head.partition(",")[2]
    with contextlib.suppress(InvalidRequest):
        # 64 characters of base64 determine the file format
        if found := _format_of(from_base64(field, head[: len(head) // 4 * 4][:64])):
            return MediaSource(found.kind, field, text)
    return MediaSource("image", field, text)


def check_media(source: MediaSource, data: bytes) -> Media:
    """The bytes as an image or audio. Raises `InvalidRequest` if they are not in a supported format, regardless of
    headers and file names."""
    if source.kind == "video":
        raise InvalidRequest(source.field, "is a video, which only a server reads; send its frames as images")
    found = _format_of(data)
    if found is None:
        wanted = ", ".join(form.name for form in _all_formats() if form.kind == source.kind)
        raise InvalidRequest(
            source.field, f"is not a valid {source.kind} file: its {len(data):,} bytes are not {wanted}"
        )
    if found.kind != source.kind:
        message = f"is {_NAMES[found.kind]} ({found.name}); it must be {_NAMES[source.kind]}"
        raise InvalidRequest(source.field, message)
    return Media(source.kind, data)


def file_part(kind: MediaKind, data: bytes) -> Json:
    """A file as OpenAI's message part. The type is determined from its bytes; empty for unknown formats."""
    found, encoded = _format_of(data), base64.b64encode(data).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": found.name.lower() if found else ""}}
    return {"type": "image_url", "image_url": {"url": f"data:{found.mime if found else ''};base64,{encoded}"}}


def local_media(messages: list[Json]) -> list[Json]:
    """A conversation with its data decoded. Raises `InvalidRequest`, also for remote URLs."""
    return with_media(messages, [decode_media(source) for source in media_of(messages)])


def with_files(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Messages whose parts of type image and audio, which only exist in the Python API, are replaced by data URLs.

    Such a part has a `path`, or the bytes of a file as `data`. Raises `InvalidRequest` for a file that cannot be read.
    """
    return [_with_files(f"messages[{i}].content", message) for i, message in enumerate(messages)]


def _with_files(field: str, message: Mapping[str, object]) -> Mapping[str, object]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": [_file_part(f"{field}[{i}]", part) for i, part in enumerate(content)]}


def _file_part(field: str, part: object) -> object:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "audio"):
        return part
    path, data = part.get("path"), part.get("data")
    if isinstance(path, (str, Path)):
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{field}.path", f"is {str(path)!r:.200}: {error.strerror}") from error
    if not isinstance(data, bytes):
        raise InvalidRequest(field, "requires a path, or the bytes of a file as data")
    return file_part(part["type"], data)


def from_base64(field: str, text: str) -> bytes:
    """Decodes in pieces, so that other threads are not blocked. Accepts whitespace and missing padding."""
    decoded = bytearray()
    rest = b""  # up to three characters, which are incomplete
    body = text.rstrip("=\r\n\t ")
    for start in range(0, len(body), _DECODED_CHARACTERS):
        piece = rest + body[start : start + _DECODED_CHARACTERS].encode("ascii", "replace").translate(None, _WHITESPACE)
        if wrong := piece.translate(None, _ALPHABET):
            example = "data:image/png;base64,..."
            message = f"is not valid base64: it contains {wrong[:1].decode()!r}; give a data URL such as {example}"
            raise InvalidRequest(field, message)
        whole = len(piece) // 4 * 4
        decoded += binascii.a2b_base64(piece[:whole])
        rest = piece[whole:]
    if len(rest) == 1:
        raise InvalidRequest(field, "is not valid base64: the data is truncated")
    decoded += binascii.a2b_base64(rest + b"=" * (-len(rest) % 4))
    return bytes(decoded)


def _format_of(data: bytes) -> _Format | None:
    for start, form in _FORMATS:
        if data.startswith(start):
            return form
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:  # MP3 without a tag: its sync word
        return _FORMATS[-1][1]
    return None


def _all_formats() -> list[_Format]:
    return [*(form for _, form in _FORMATS), *_RIFF.values()]
