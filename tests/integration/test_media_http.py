"""Images and audio over HTTP, with a tiny model and tiny random projectors: every API, and every refusal."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import struct
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cppbatch import BatchInferenceEngine, LocalEngine, SamplingParams
from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support import tiny_projectors
from tests.support.app_thread import AppThread
from tests.support.http_client import Http, answered, http_of, http_to, post
from tests.support.media_samples import BLUE, RED, TONE, as_base64, as_url, png, wav
from tests.support.tiny_projectors import IMAGE_TOKENS, SOUND_TOKENS

Json = dict[str, Any]
ENGINE: Json = {"n_ctx": 2048, "n_parallel": 8, "n_threads": 1, "spec": "off"}
GREEDY: Json = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
SAID: Json = {"type": "text", "text": "What is this?"}


def picture(data: bytes = RED) -> Json:
    return {"type": "image_url", "image_url": {"url": as_url(data)}}


def sound(data: bytes = TONE) -> Json:
    return {"type": "input_audio", "input_audio": {"data": as_base64(data), "format": "wav"}}


def asks(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [*parts, SAID]}]


@pytest.fixture(scope="session")
def eyes(tiny_folder: Path) -> Path:
    return tiny_projectors.vision(tiny_folder / "mmproj-vision.gguf")


@pytest.fixture(scope="session")
def ears(tiny_folder: Path) -> Path:
    return tiny_projectors.audio(tiny_folder / "mmproj-audio.gguf")


@pytest.fixture
async def seeing(tiny_llama: Path, eyes: Path) -> AsyncIterator[Http]:
    async with http_of(tiny_llama, mmproj=str(eyes), **ENGINE) as client:
        yield client


@pytest.fixture
async def hearing(tiny_llama: Path, ears: Path) -> AsyncIterator[Http]:
    async with http_of(tiny_llama, mmproj=str(ears), **ENGINE) as client:
        yield client


async def test_without_its_decoder_an_image_is_refused_and_text_is_answered(
    seeing: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    status, answer = await post(seeing, "/v1/chat/completions", {"messages": asks(picture()), **GREEDY})
    assert status == 400
    assert 'image input requires pillow: pip install "cppbatch[media]"' in answer["error"]["message"]
    await answered(seeing, "/v1/chat/completions", {"messages": asks(), **GREEDY})


# --- every API --------------------------------------------------------------------------------------------------------


async def test_every_api_gives_the_same_text_for_the_same_image(seeing: Http) -> None:
    chat = await answered(seeing, "/v1/chat/completions", {"messages": asks(picture()), **GREEDY})
    text = chat["choices"][0]["message"]["content"]
    assert chat["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS
    assert "audio_tokens" not in chat["usage"]["prompt_tokens_details"]

    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_base64(RED)}}
    message = await answered(seeing, "/v1/messages", {"messages": asks(block), **GREEDY})
    assert [part["text"] for part in message["content"]] == [text]

    image = {"type": "input_image", "image_url": as_url(RED)}
    said = {"type": "input_text", "text": SAID["text"]}
    response = await answered(
        seeing,
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [image, said]}],
            "max_output_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens_details"]["image_tokens"] == IMAGE_TOKENS

    generated = await answered(seeing, "/generate", {"messages": asks(picture()), **GREEDY})
    assert generated["text"] == text

    marker = (await (await seeing.get("/props")).json())["media_marker"]
    applied = await answered(seeing, "/apply-template", {"messages": asks(picture())})
    assert applied["prompt"].count(marker) == 1
    completed = await answered(
        seeing,
        "/completion",
        {
            "prompt": {"prompt_string": applied["prompt"], "multimodal_data": [as_base64(RED)]},
            "n_predict": 8, "temperature": 0, "ignore_eos": True,
        },
    )  # fmt: skip
    assert completed["content"] == text
    assert completed["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    assert "What is this?" in completed["prompt"]

    verbose = await answered(seeing, "/v1/chat/completions", {"messages": asks(picture()), "verbose": True, **GREEDY})
    assert verbose["__verbose"]["content"] == text


RESULTS: dict[str, Json] = {  # of a call, as each API has them: an image
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": "c", "content": [picture()]},
        ]
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_base64(RED)}}
            ]}]},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_image", "image_url": as_url(RED)}
            ]},
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS)
async def test_an_agent_whose_tool_returned_an_image_continues_with_a_model_without_a_projector(
    http: Http, path: str
) -> None:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
    await answered(http, path, {**RESULTS[path], **limit})


async def test_the_tokens_of_an_image_are_counted_before_they_are_computed(seeing: Http) -> None:
    block = {"type": "image", "source": {"type": "url", "url": as_url(BLUE)}}
    counts = [
        (await answered(seeing, "/v1/messages/count_tokens", {"messages": asks(block)}))["input_tokens"],
        (await answered(seeing, "/v1/chat/completions/input_tokens", {"messages": asks(picture(BLUE))}))[
            "input_tokens"
        ],
        (
            await answered(
                seeing,
                "/v1/responses/input_tokens",
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": as_url(BLUE)}, SAID]}]},
            )
        )["input_tokens"],
        (await answered(seeing, "/tokenize", {"messages": asks(picture(BLUE))}))["count"],
    ]
    chat = await answered(seeing, "/v1/chat/completions", {"messages": asks(picture(BLUE)), **GREEDY})
    assert counts == [chat["usage"]["prompt_tokens"]] * 4


async def test_an_image_that_was_sent_before_is_cached_and_another_one_is_not(seeing: Http) -> None:
    async def cached(data: bytes) -> int:
        answer = await answered(seeing, "/v1/chat/completions", {"messages": asks(picture(data)), **GREEDY})
        n: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    assert await cached(RED) < IMAGE_TOKENS
    assert await cached(RED) > IMAGE_TOKENS
    assert await cached(BLUE) < IMAGE_TOKENS


async def test_the_content_of_an_image_changes_the_answer(seeing: Http) -> None:
    async def first(data: bytes) -> float:
        body = {"messages": asks(picture(data)), "logprobs": True, **GREEDY}
        answer = await answered(seeing, "/v1/chat/completions", body)
        logprob: float = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        return logprob

    assert await first(RED) != await first(BLUE)


async def test_several_images_choices_and_a_stream(seeing: Http) -> None:
    body = {"messages": asks(picture(), SAID, picture(BLUE)), "n": 2, **GREEDY}
    whole = await answered(seeing, "/v1/chat/completions", body)
    assert whole["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * IMAGE_TOKENS
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with seeing.post("/v1/chat/completions", json=stream) as answer:
        events = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
    assert events[-1]["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * IMAGE_TOKENS
    texts = ["", ""]
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


async def test_tool_results_may_be_images(seeing: Http) -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    block = {"type": "image", "source": {"type": "base64", "data": as_base64(RED)}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    tool = {"name": "look", "input_schema": {"type": "object"}}
    messages = [*asks(), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, SAID]}]
    answer = await answered(seeing, "/v1/messages", {"messages": messages, "tools": [tool], **GREEDY})
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > IMAGE_TOKENS


async def test_the_items_of_a_batch_share_an_image_and_fail_alone(seeing: Http) -> None:
    several = await answered(
        seeing, "/generate/batch", {"messages": asks(picture()), "params": [{"seed": 1}, {"seed": 2}], **GREEDY}
    )
    assert [result["prompt_tokens"] for result in several["results"]] == [several["results"][0]["prompt_tokens"]] * 2
    wrong = {"messages": asks({"type": "image_url", "image_url": as_url(b"no picture")})}
    damaged = {"messages": asks(picture(RED[:30]))}
    mixed = await answered(
        seeing, "/generate/batch", {"prompts": [{"messages": asks(picture())}, wrong, "Hello", damaged], **GREEDY}
    )
    errors = [result.get("error", {}).get("param") for result in mixed["results"]]
    assert errors == [None, "prompts[1].messages[0].content[0].image_url", None, "prompts[3].messages"]


async def test_16_concurrent_chats_with_images_answer_as_alone(seeing: Http) -> None:
    pictures = [png(color=(i * 16, 255 - i * 16, 0)) for i in range(16)]
    bodies = [{"messages": asks(picture(data)), **GREEDY} for data in pictures]
    together = await asyncio.gather(*(answered(seeing, "/v1/chat/completions", body) for body in bodies))
    alone = [await answered(seeing, "/v1/chat/completions", body) for body in bodies]
    texts = [[answer["choices"][0]["message"]["content"] for answer in answers] for answers in (together, alone)]
    assert texts[0] == texts[1]


async def test_audio_is_heard(hearing: Http) -> None:
    chat = await answered(hearing, "/v1/chat/completions", {"messages": asks(sound()), **GREEDY})
    assert chat["usage"]["prompt_tokens_details"]["audio_tokens"] == SOUND_TOKENS
    assert "image_tokens" not in chat["usage"]["prompt_tokens_details"]
    marker = (await (await hearing.get("/props")).json())["media_marker"]
    prompt = {"prompt_string": f"{marker} was what?", "multimodal_data": [as_base64(wav(0.5))]}
    assert (await answered(hearing, "/completion", {"prompt": prompt, "n_predict": 2}))[
        "tokens_evaluated"
    ] > SOUND_TOKENS
    status, answer = await post(hearing, "/v1/chat/completions", {"messages": asks(picture())})
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert "accepts only audio and text input" in answer["error"]["message"]


async def test_a_server_reports_the_modalities_of_its_model(seeing: Http, hearing: Http) -> None:
    for http, vision, audio in ((seeing, True, False), (hearing, False, True)):
        props = await (await http.get("/props")).json()
        has_video = vision and shutil.which("ffmpeg") is not None
        assert props["modalities"] == {"vision": vision, "audio": audio, "video": has_video}
        (model,) = (await (await http.get("/v1/models")).json())["data"]
        kinds = ["text", "image" if vision else "audio"]
        assert model["architecture"] == {"input_modalities": kinds, "output_modalities": ["text"]}
        assert model["capabilities"] == ["completion", "multimodal"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """An image of a few hundred bytes with a header that declares 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return RED[:8] + struct.pack(">I", len(header)) + chunk + struct.pack(">I", zlib.crc32(chunk)) + RED[33:]


REFUSED = {
    "a truncated image": (picture(RED[:40]), "messages"),
    "an image that is too large": (picture(bomb()), "messages"),
    "noise after the first bytes": (picture(RED[:8] + os.urandom(300)), "messages"),
    "audio": (sound(), "messages[0].content[0].input_audio.data"),
    "a remote image": (
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        "messages[0].content[0].image_url.url",
    ),
    "a file": ({"type": "image_url", "image_url": "file:///etc/passwd"}, "messages[0].content[0].image_url"),
}


@pytest.mark.parametrize(("part", "field"), REFUSED.values(), ids=REFUSED.keys())
async def test_an_invalid_media_part_is_refused_with_a_short_message(seeing: Http, part: Json, field: str) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
        status, answer = await post(seeing, path, {"messages": asks(part), "max_tokens": 1})
        assert (status, answer["error"]["param"]) == (400, field)
        assert len(answer["error"]["message"]) < 400
        assert " object at 0x" not in answer["error"]["message"]


@pytest.mark.parametrize("data", [TONE[:20], TONE[:12] + os.urandom(300), b"fLaC" + bytes(300), b"ID3" + bytes(300)])
async def test_undecodable_audio_is_refused_without_a_memory_address(hearing: Http, data: bytes) -> None:
    body = {"messages": asks(sound(data)), "max_tokens": 1}
    status, answer = await post(hearing, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"].startswith("messages: contains audio that cannot be decoded: ")
    assert " object at 0x" not in answer["error"]["message"]


async def test_a_model_without_a_projector_is_an_error_with_the_remedy(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, **ENGINE) as engine, http_to(engine) as http:
        status, answer = await post(http, "/v1/chat/completions", {"messages": asks(picture())})
        assert status == 400
        assert "start it with --mmproj FILE" in answer["error"]["message"]
        assert (await engine.stats()).prompt_tokens == 0


async def test_remote_images_come_from_listed_hosts(tiny_llama: Path, eyes: Path) -> None:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=RED)

    other = web.Application()
    other.router.add_get("/red.png", serve)
    async with TestServer(other) as remote, LocalEngine(tiny_llama, mmproj=str(eyes), **ENGINE) as engine:
        url = str(remote.make_url("/red.png"))
        settings = ServerSettings(allowed_media_domains=(remote.host,))
        by_url = {"messages": asks({"type": "image_url", "image_url": {"url": url}}), **GREEDY}
        async with http_to(engine, settings) as http:
            given = await answered(http, "/v1/chat/completions", {"messages": asks(picture()), **GREEDY})
            fetched = await answered(http, "/v1/chat/completions", by_url)
            assert fetched["choices"][0]["message"] == given["choices"][0]["message"]
            batch = await answered(http, "/generate/batch", {**by_url, "params": [{}, {}]})
            assert batch["failed"] == 0
        async with http_to(engine) as http:
            status, answer = await post(http, "/v1/chat/completions", by_url)
            assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url.url")


async def test_images_of_all_completions_are_bounded(tiny_llama: Path, eyes: Path) -> None:
    limits = Limits(max_media=2, max_media_mb=1)
    noise = png() + os.urandom(1 << 18)
    async with http_of(tiny_llama, ServerSettings(limits=limits), mmproj=str(eyes), **ENGINE) as http:
        for parts, n, field in (
            ([picture()] * 3, 1, "messages[0].content[2].image_url.url"),
            ([picture(noise)], 4, "n"),
            ([picture(noise)], 3, None),
        ):
            status, answer = await post(http, "/v1/chat/completions", {"messages": asks(*parts), "n": n, **GREEDY})
            assert (status, answer.get("error", {}).get("param")) == ((200, None) if field is None else (400, field))


# --- nothing leaks, nothing breaks ------------------------------------------------------------------------------------


async def test_no_log_has_an_image_and_live_shows_the_request(
    seeing: Http, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    needle = as_base64(RED)[40:80]
    for body in (
        {"messages": asks(picture()), **GREEDY},
        {"messages": asks(picture(RED[:50]))},
        {"messages": picture()},
    ):
        await post(seeing, "/v1/chat/completions", body)
    async with seeing.get("/live") as live:
        first = await live.content.readuntil(b"\n\n")
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err, first.decode()):
        assert needle not in text


async def test_a_marker_in_a_users_text_is_text(seeing: Http) -> None:
    said = {"type": "text", "text": "<__media__> <__media_0__> [img-1] <image>"}
    with_picture = await answered(seeing, "/v1/chat/completions", {"messages": asks(said, picture()), **GREEDY})
    assert with_picture["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS
    without = await answered(seeing, "/v1/chat/completions", {"messages": asks(said), **GREEDY})
    assert "image_tokens" not in without["usage"]["prompt_tokens_details"]


URLS = st.one_of(
    st.just(as_url(RED)),
    st.binary(max_size=60).map(lambda data: as_url(RED[:8] + data)),
    st.binary(max_size=60).map(lambda data: as_url(b"RIFF0000WAVE" + data)),
    st.sampled_from(["GIF89a", "BM", "\x89PNG\r\n\x1a\n", "fLaC", "ID3"]).map(
        lambda head: as_url(head.encode("latin-1") * 9)
    ),
    st.text(max_size=40),
    st.sampled_from(["http://127.0.0.1:1/", "file://x", "data:,", "data:;base64,", "https://", "data:" * 9]),
)
VALUES = st.one_of(URLS, st.none(), st.integers(), st.lists(URLS, max_size=2), st.fixed_dictionaries({"url": URLS}))
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "image_url", "input_image", "input_audio", "audio_url", "video_url", "image", ""]
        )
    },
    optional={
        "text": st.text(max_size=20),
        "image_url": VALUES,
        "audio_url": VALUES,
        "input_audio": st.one_of(VALUES, st.fixed_dictionaries({"data": URLS, "format": st.text(max_size=5)})),
        "source": st.fixed_dictionaries(
            {"type": st.sampled_from(["base64", "url", "file"]), "data": URLS, "url": URLS}
        ),
        "path": st.just("/etc/passwd"),
    },
)
BODIES = st.one_of(
    st.lists(PARTS, max_size=4).map(lambda parts: ("/v1/chat/completions", {"messages": asks(*parts)})),
    st.lists(PARTS, max_size=4).map(lambda parts: ("/v1/messages", {"messages": asks(*parts), "max_tokens": 1})),
    st.lists(PARTS, max_size=4).map(lambda parts: ("/v1/responses", {"input": asks(*parts)})),
    st.lists(PARTS, max_size=2).map(lambda parts: ("/generate/batch", {"prompts": [{"messages": asks(*parts)}]})),
    st.lists(URLS, max_size=3).map(
        lambda data: ("/completion", {"prompt": {"prompt_string": "MARK" * len(data), "multimodal_data": data}})
    ),
)


@pytest.fixture(scope="module")
def any_body(tiny_folder: Path, tiny_llama: Path, eyes: Path) -> Any:
    limits = Limits(max_tokens=2, max_n=2)
    engine = {"model": tiny_llama, "mmproj": str(eyes), **ENGINE}
    app = AppThread(engine, lambda client: create_app(client, ServerSettings(limits=limits)))
    yield app
    app.stop()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=BODIES)
def test_no_body_with_media_brings_the_server_down(any_body: AppThread, sent: tuple[str, Json]) -> None:
    import urllib.error
    import urllib.request

    def exchange(path: str, data: bytes | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(any_body.url + path, data), timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    path, body = sent
    if path == "/completion":
        marker = json.loads(exchange("/props")[1])["media_marker"]
        body["prompt"]["prompt_string"] = body["prompt"]["prompt_string"].replace("MARK", marker)
    status, answer = exchange(path, json.dumps(body | {"max_tokens": 1}).encode())
    assert status in (200, 400), (status, answer)
    if path == "/generate/batch" and status == 200:
        (result,) = json.loads(answer)["results"]
        assert result.get("error", {}).get("type") in (None, "invalid_request_error"), result
    assert json.loads(exchange("/health")[1])["status"] == "ok"


# --- Python and commands ----------------------------------------------------------------------------------------------


def test_python_answers_about_files(tiny_llama: Path, eyes: Path, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    with BatchInferenceEngine(tiny_llama, mmproj=str(eyes), **ENGINE) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        several = engine.chat(
            [asks(picture()), asks({"type": "image", "path": file}), asks({"type": "image", "data": RED})], params
        )
        assert len({answer.text for answer in several}) == 1
        assert {answer.usage.n_media_tokens for answer in several} == {IMAGE_TOKENS}
        with engine.chat_stream(asks({"type": "image", "path": file}), params) as stream:
            assert "".join(event.text for event in stream) == several[0].text


def test_generate_takes_files(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path, eyes: Path, ears: Path, tmp_path: Path
) -> None:
    red, tone = tmp_path / "red.png", tmp_path / "tone.wav"
    red.write_bytes(RED)
    tone.write_bytes(TONE)
    common = [*"generate --no-memory-check --chat --json -n 4 -p What? -p Why? -m".split(), tiny_llama]
    for mmproj, flag, file, n in ((eyes, "--image", red, IMAGE_TOKENS), (ears, "--audio", tone, SOUND_TOKENS)):
        code, out, err = run(*common, "--mmproj", mmproj, flag, file)
        assert code == 0, err
        assert [json.loads(line)["usage"]["n_media_tokens"] for line in out.splitlines()] == [n, n]
    code, _, err = run(*common, "--image", red)
    assert code == 2
    assert "--mmproj" in err
    code, _, err = run("generate", "-m", tiny_llama, "-p", "x", "--image", red, "--raw")
    assert code == 2
    assert "leave out --raw" in err


def test_a_batch_file_with_16_images(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path, eyes: Path, tmp_path: Path
) -> None:
    lines = io.StringIO()
    for i in range(16):
        data = png(color=(i * 16, 0, 0))
        (tmp_path / f"{i}.png").write_bytes(data)
        part = picture(data) if i % 2 else {"type": "image_url", "image_url": f"file://{i}.png"}
        lines.write(json.dumps({"custom_id": str(i), "messages": asks(part), "max_tokens": 4}) + "\n")
    lines.write(
        json.dumps({"custom_id": "none", "messages": asks({"type": "image_url", "image_url": "file://no.png"})}) + "\n"
    )
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines.getvalue())
    code, _, err = run(
        "batch", source, "-o", out, "-m", tiny_llama, "--mmproj", eyes, "--media-path", tmp_path, "--no-memory-check",
        "-np", "8", "-c", "2048",
    )  # fmt: skip
    assert code == 1, err
    assert "16 done, 1 failed" in err
    assert {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} == {str(i) for i in range(16)}
    assert "file not found in the --media-path folder" in (tmp_path / "out.errors.jsonl").read_text()
