"""Images and audio in messages: the kinds of parts, their rendering, and what they are decoded to."""

from __future__ import annotations

import contextlib
import re
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.media_parts import MediaSource, Placeholders, media_of, with_media
from cppbatch.chat.messages import ChatMessage, conversation_of
from cppbatch.chat.template import CHATML
from cppbatch.engine.chats import ChatRequests
from cppbatch.engine.media.sources import decode_media, file_part, local_media, source_of_data
from cppbatch.engine.request import Media, MediaPrompt
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.anthropic import conversion as message_conversion
from cppbatch.server.api.anthropic.types import CountTokensRequest
from cppbatch.server.api.responses import conversion as input_conversion
from cppbatch.server.api.responses.types import ResponsesRequest
from tests.support.chat_families import TEMPLATES
from tests.support.conversations import TOOLS, template_of
from tests.support.media_samples import BLUE, RED, TONE, as_base64, as_url

Json = dict[str, Any]
IMAGE: Json = {"type": "image_url", "image_url": {"url": as_url(RED)}}
BLUE_IMAGE: Json = {"type": "image_url", "image_url": as_url(BLUE)}
SOUND: Json = {"type": "input_audio", "input_audio": {"data": as_base64(TONE), "format": "wav"}}
RED_PICTURE, BLUE_PICTURE, SOUND_OF_IT = Media("image", RED), Media("image", BLUE), Media("audio", TONE)


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def read(messages: list[Json]) -> list[Json]:
    return conversation_of(msgspec.convert(messages, list[ChatMessage]))


def prepare(messages: list[Json], source: str | None = None, **options: Any) -> PreparedChat:
    chat = ChatFormat(template_of(source))
    return chat.render(ChatTurn(local_media(read(messages)), **options))


# --- parts ------------------------------------------------------------------------------------------------------------

PARTS = {
    "image_url": (IMAGE, RED_PICTURE),
    "image_url as text": (BLUE_IMAGE, BLUE_PICTURE),
    "with a detail": ({"type": "image_url", "image_url": {"url": as_url(RED), "detail": "low"}}, RED_PICTURE),
    "of another media type": ({"type": "image_url", "image_url": as_url(RED, "image/jpeg")}, RED_PICTURE),
    "base64 alone": ({"type": "image_url", "image_url": {"url": as_base64(RED)}}, RED_PICTURE),
    "input_image": ({"type": "input_image", "image_url": as_url(RED)}, RED_PICTURE),
    "input_audio": (SOUND, SOUND_OF_IT),
    "input_audio by a data URL": ({"type": "input_audio", "input_audio": {"url": as_url(TONE, "")}}, SOUND_OF_IT),
    "audio_url": ({"type": "audio_url", "audio_url": {"url": as_url(TONE, "audio/wav")}}, SOUND_OF_IT),
}


@pytest.mark.parametrize(("part", "expected"), PARTS.values(), ids=PARTS.keys())
def test_a_part_is_the_file_that_it_has(part: Json, expected: Media) -> None:
    assert list(media_of(local_media(read([user(part)])))) == [expected]


AT = "messages[0].content[0].image_url"

REFUSED = {
    "a video": ({"type": "video_url", "video_url": "eA=="}, "messages[0].content[0].video_url", "only a server reads"),
    "a file": ({"type": "file", "file": {}}, "messages[0].content[0]", "'file'"),
    "no image": ({"type": "image_url"}, AT, "required"),
    "no audio": ({"type": "input_audio"}, "messages[0].content[0].input_audio.url", "required"),
    "another host": (
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
        "messages[0].content[0].image_url.url",
        "must be a data URL",
    ),
    "a file of the machine": (
        {"type": "image_url", "image_url": "FILE:///etc/passwd"},
        AT,
        "must be a data URL",
    ),
    "a data URL without base64": (
        {"type": "image_url", "image_url": "data:image/svg+xml,<svg/>"},
        AT,
        "must have the form data:image/png;base64",
    ),
    "no base64": ({"type": "image_url", "image_url": as_url(RED)[:-9] + "*" + "A" * 8}, AT, "'*'"),
    "base64 without its end": ({"type": "image_url", "image_url": "data:;base64,AAAAA"}, AT, "truncated"),
    "a text as an image": (
        {"type": "image_url", "image_url": as_url(b"<svg></svg>", "image/png")},
        AT,
        "are not PNG, JPEG, GIF, BMP, WebP",
    ),
    "audio as an image": ({"type": "image_url", "image_url": as_url(TONE)}, AT, "WAV"),
    "an image as audio": (
        {"type": "input_audio", "input_audio": {"data": as_base64(RED), "format": "mp3"}},
        "messages[0].content[0].input_audio.data",
        "is an image (PNG)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("part", "field", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_part_that_cannot_be_read_is_refused_by_its_name(part: Json, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        local_media(read([user(part)]))
    assert refused.value.field == field
    assert words in refused.value.message
    assert len(str(refused.value)) < 400


@given(st.binary(max_size=300), st.sampled_from(["", "\n", "\r\n", " "]), st.integers(1, 90), st.booleans())
def test_base64_is_decoded_in_lines_and_without_padding_too(data: bytes, end: str, width: int, padded: bool) -> None:
    content = RED + data
    encoded = as_base64(content) if padded else as_base64(content).rstrip("=")
    lines = end.join(encoded[i : i + width] for i in range(0, len(encoded), width))
    assert decode_media(MediaSource("image", "x", lines)).data == content


def test_base64_of_more_than_a_piece_is_decoded_whole() -> None:
    content = RED + bytes(range(256)) * 9000
    assert decode_media(MediaSource("image", "x", as_url(content))).data == content


@given(st.text(string.printable, max_size=200))
def test_any_text_as_data_is_decoded_or_refused(given_text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert decode_media(MediaSource("image", "field", given_text)).kind == "image"


def test_untyped_data_is_identified_by_its_first_bytes() -> None:
    kinds = [
        source_of_data("x", as_base64(each)).kind for each in (RED, TONE, b"ID3 a sound with a tag", b"\xff\xfb\x90")
    ]
    assert kinds == ["image", "audio", "audio", "audio"]
    assert source_of_data("x", "*").kind == "image"


# --- rendering --------------------------------------------------------------------------------------------------------


def test_media_keep_their_places_among_the_texts() -> None:
    chat = prepare([user(text("What is"), IMAGE, text("and"), SOUND, BLUE_IMAGE, text("?"))])
    assert chat.parts is not None
    assert chat.parts == [
        "<|im_start|>user\nWhat is", RED_PICTURE, "and", SOUND_OF_IT, BLUE_PICTURE,
        "?<|im_end|>\n<|im_start|>assistant\n",
    ]  # fmt: skip
    assert chat.prompt == "".join(part for part in chat.parts if isinstance(part, str))


def test_texts_are_lines_and_media_are_not() -> None:
    chat = prepare([user(text("a"), text("b"), IMAGE, text("c"), text("d"))])
    assert chat.parts == ["<|im_start|>user\na\nb", RED_PICTURE, "c\nd<|im_end|>\n<|im_start|>assistant\n"]


def test_a_conversation_without_media_is_rendered_as_usual() -> None:
    chat = prepare([user(text("a"), text("b"))])
    assert (chat.prompt, chat.parts) == ("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n", None)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_every_role_may_have_an_image(role: str) -> None:
    said: Json = {"role": role, "content": [text("here: "), IMAGE]}
    messages = [said, user(text("x"))]
    if role == "tool":
        called = [{"id": "call12345", "function": {"name": "weather", "arguments": "{}"}}]
        call = {"role": "assistant", "tool_calls": called}
        messages = [user(text("x")), call, said | {"tool_call_id": "call12345"}]
    for family, source in TEMPLATES.items():
        chat = prepare(messages, source, tools=TOOLS if role == "tool" else [])
        assert chat.parts is not None, family
        assert [part for part in chat.parts if isinstance(part, Media)] == [RED_PICTURE], family


TYPED = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
VISION = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [TYPED, VISION, CHATML])
def test_templates_of_every_kind_keep_the_place_of_an_image(source: str) -> None:
    chat = prepare([user(text("before"), IMAGE, text("after"))], source)
    assert chat.parts is not None
    before, picture, after = chat.parts
    assert before.endswith("before")
    assert picture == RED_PICTURE
    assert after.startswith("after")
    assert "image_pad" not in chat.prompt


def test_a_template_that_leaves_out_an_image_is_an_error_with_the_count() -> None:
    last_only = "{{ messages[-1].content }}"
    with pytest.raises(InvalidRequest, match="omits number 1") as refused:
        prepare([user(IMAGE), {"role": "assistant", "content": "Red."}, user(BLUE_IMAGE)], last_only)
    assert refused.value.field == "messages"


def test_a_template_that_repeats_a_message_repeats_its_image() -> None:
    chat = prepare([user(text("a"), IMAGE)], "{{ messages[0].content }}{{ messages[0].content }}.")
    assert chat.parts == ["a", RED_PICTURE, "a", RED_PICTURE, "."]


def test_the_last_message_may_be_continued_after_an_image() -> None:
    messages = [user(text("x")), {"role": "assistant", "content": [text("It is "), IMAGE, text("a c")]}]
    chat = prepare(messages)
    assert chat.parts is not None
    assert chat.parts[-1] == "a c"


@given(
    st.lists(
        st.text(max_size=30) | st.sampled_from([RED_PICTURE, SOUND_OF_IT, "<__media__>", "<__media_", "__>"]),
        max_size=8,
    )
)
def test_any_mixture_comes_back_in_its_order(parts: list[str | Media]) -> None:
    content = [text(part) if isinstance(part, str) else {"type": "media", "media": part} for part in parts]
    placeholders = Placeholders()
    messages = placeholders.hide_media([{"role": "user", "content": content}])
    prompt = "".join(
        message["content"] if isinstance(message["content"], str) else "".join(p["text"] for p in message["content"])
        for message in messages
    )
    found = placeholders.parts(prompt)
    media = [part for part in parts if isinstance(part, Media)]
    if not media:
        assert found is None
        return
    assert found is not None
    assert [part for part in found if isinstance(part, Media)] == media
    joined = "".join(part for part in found if isinstance(part, str)).replace("\n", "")
    assert joined == "".join(part for part in parts if isinstance(part, str)).replace("\n", "")


def test_no_text_of_a_client_can_be_a_marker() -> None:
    messages = with_media(read([user(IMAGE)]), [RED_PICTURE])
    first, second = (Placeholders().hide_media(messages)[0]["content"] for _ in range(2))
    assert first != second
    assert re.fullmatch(r"<__[0-9a-f]{16}_0__>", first)
    chat = prepare([user(text(first), IMAGE, text(second))])
    assert chat.parts is not None
    assert chat.parts[0].endswith(first)
    assert chat.parts[2].startswith(second)


# --- the other APIs ---------------------------------------------------------------------------------------------------


def anthropic(messages: list[Json], **fields: Any) -> list[Json]:
    return local_media(
        message_conversion.message_turn(msgspec.convert({"messages": messages, **fields}, CountTokensRequest)).messages
    )


BLOCK: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_base64(RED)}}
URL_BLOCK: Json = {"type": "image", "source": {"type": "url", "url": as_url(BLUE)}}


def test_anthropics_images_are_parts_of_the_message() -> None:
    (message,) = anthropic([user(text("What is "), BLOCK, text("?")), user(URL_BLOCK)])
    assert message["role"] == "user"
    assert list(media_of([message])) == [RED_PICTURE, BLUE_PICTURE]
    assert [part.get("text") for part in message["content"]] == ["What is ", None, "?", None]


def test_anthropics_tool_results_may_be_images() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a screenshot"), BLOCK]}
    tool, said = anthropic([user(result, text("What is it?"))])
    assert (tool["role"], tool["tool_call_id"], said["content"]) == ("tool", "t", "What is it?")
    assert list(media_of([tool])) == [RED_PICTURE]
    failed, _ = anthropic([user({**result, "is_error": True}, text("x"))])
    assert failed["content"][0] == text("Error: ")


ANTHROPIC_REFUSED = {
    "a file id": ({"type": "file", "file_id": "f"}, "source.type"),
    "base64 without data": ({"type": "base64"}, "source.data"),
    "a URL without one": ({"type": "url"}, "source.url"),
    "wrong data": ({"type": "base64", "data": "AAAA"}, "source.data"),
    "another host": ({"type": "url", "url": "http://127.0.0.1/"}, "source.url"),
}


@pytest.mark.parametrize(("source", "field"), ANTHROPIC_REFUSED.values(), ids=ANTHROPIC_REFUSED.keys())
def test_anthropics_images_are_refused_by_their_name(source: Json, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        anthropic([user(text("x"), {"type": "image", "source": source})])
    assert refused.value.field == f"messages[0].content[1].{field}"


def responses(items: list[Json]) -> list[Json]:
    return local_media(input_conversion.response_turn(msgspec.convert({"input": items}, ResponsesRequest)).messages)


def test_responses_accept_images_and_audio() -> None:
    image = {"type": "input_image", "image_url": as_url(RED), "detail": "auto"}
    (message,) = responses([user({"type": "input_text", "text": "What?"}, image, SOUND)])
    assert message["content"][0] == text("What?")
    assert list(media_of([message])) == [RED_PICTURE, SOUND_OF_IT]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    *_, tool = responses([user(text("x")), call, output])
    assert (tool["role"], list(media_of([tool]))) == ("tool", [RED_PICTURE])


def test_unsupported_parts_of_responses_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"input\[0\].content\[1\]: is of type 'input_file'"):
        responses([user({"type": "input_image", "image_url": as_url(RED)}, {"type": "input_file"})])
    with pytest.raises(InvalidRequest, match=r"input\[0\].content\[0\].image_url: is required"):
        responses([user({"type": "input_image", "file_id": "f"})])


# --- Python -----------------------------------------------------------------------------------------------------------


def request_of(messages: list[Json]) -> Any:
    return ChatRequests(ChatFormat(template_of(None)), {}).request("x", messages, None)[0].prompt


def test_python_takes_files_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "tone.wav"
    file.write_bytes(TONE)
    by_url = request_of([user(text("Both: "), IMAGE, SOUND)])
    by_file = request_of([user(text("Both: "), {"type": "image", "data": RED}, {"type": "audio", "path": file})])
    assert isinstance(by_url, MediaPrompt)
    assert (
        by_url
        == by_file
        == request_of([user(text("Both: "), {"type": "image", "data": RED}, {"type": "audio", "path": str(file)})])
    )


def test_python_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].path: .*No such file"):
        request_of([user({"type": "image", "path": tmp_path / "none.png"})])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: requires a path, or the bytes"):
        request_of([user({"type": "image"})])


def test_files_are_sent_to_other_servers_with_their_type() -> None:
    assert file_part("image", RED)["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert file_part("audio", TONE)["input_audio"] == {"data": as_base64(TONE), "format": "wav"}
