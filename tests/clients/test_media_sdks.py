"""Images and audio with the packages of OpenAI and Anthropic, on a tiny model with random weights."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.serving import KEY, Serving, at_once
from tests.support.media_samples import RED, TONE, as_base64, as_url, png

SAID: Any = {"type": "text", "text": "What is this?"}
GREEDY: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
PICTURES = [png(color=(16 * i, 255 - 16 * i, 0)) for i in range(16)]


def asks(*parts: Any) -> Any:
    return [{"role": "user", "content": [*parts, SAID]}]


def picture(data: bytes = RED) -> Any:
    return {"type": "image_url", "image_url": {"url": as_url(data), "detail": "low"}}


def block(data: bytes = RED) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_base64(data)}}


@pytest.fixture(scope="module")
def client(seeing_server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=seeing_server.v1, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(seeing_server: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing_server.url, api_key=KEY, max_retries=0, timeout=60)


def test_16_concurrent_images_answer_as_alone_and_as_streams(client: openai.OpenAI) -> None:
    def whole(data: bytes) -> tuple[str, int]:
        answer = client.chat.completions.create(messages=asks(picture(data)), **GREEDY)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        counted: Any = answer.usage.prompt_tokens_details
        return answer.choices[0].message.content or "", counted.image_tokens

    def streamed(data: bytes) -> str:
        chunks = client.chat.completions.create(messages=asks(picture(data)), stream=True, **GREEDY)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    together = at_once(whole, PICTURES)
    assert {n for _, n in together} == {16}
    assert [text for text, _ in together] == [whole(data)[0] for data in PICTURES] == at_once(streamed, PICTURES)


def test_responses_and_anthropics_messages_see_the_same(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = client.chat.completions.create(messages=asks(picture()), **GREEDY).choices[0].message.content
    image = {"type": "input_image", "image_url": as_url(RED), "detail": "auto"}
    items: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": SAID["text"]}]}]
    response = client.responses.create(
        model="tiny", input=items, max_output_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    extra: Any = {"temperature": 0, "ignore_eos": True}
    message = claude.messages.create(model="tiny", max_tokens=8, messages=asks(block()), extra_body=extra)
    counted = claude.messages.count_tokens(model="tiny", messages=asks(block()))
    (said,) = message.content
    assert said.type == "text"
    assert response.output_text == said.text == chat
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    with claude.messages.stream(model="tiny", max_tokens=8, messages=asks(block()), extra_body=extra) as stream:
        assert "".join(stream.text_stream) == chat


def test_anthropics_tools_return_images(claude: anthropic.Anthropic) -> None:
    use: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block()]}]}
    tools: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    message = claude.messages.create(model="tiny", max_tokens=4, messages=[*asks(), use, result], tools=tools)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 16


def test_refused_media_raise_the_clients_own_exception(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    remote: Any = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    with pytest.raises(openai.BadRequestError, match="--allowed-media-domains"):
        client.chat.completions.create(messages=asks(remote), **GREEDY)
    with pytest.raises(openai.BadRequestError, match="messages: contains an image"):
        client.chat.completions.create(messages=asks(picture(RED[:40])), **GREEDY)
    by_url: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    with pytest.raises(anthropic.BadRequestError, match="--allowed-media-domains"):
        claude.messages.create(model="tiny", max_tokens=4, messages=asks(by_url))


def test_a_batch_of_16_images(client: openai.OpenAI) -> None:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": asks(picture(data)), "max_tokens": 4},
        }
        for i, data in enumerate(PICTURES)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    uploaded = client.files.create(file=("pictures.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    end = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < end, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (16, 0)
    assert batch.output_file_id
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    counts = [each["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] for each in results]
    assert counts == [16] * 16


def test_a_conversation_about_images_with_rows_and_columns(qwen_server: Serving) -> None:
    """Each turn resends all earlier ones, with images that are computed once: alone, streamed and with others."""
    completions: Any = openai.OpenAI(base_url=qwen_server.v1, api_key=KEY, max_retries=0, timeout=60).chat.completions
    wide, tall = png(96, 64, (255, 0, 0)), png(32, 144, (0, 0, 255))  # 4 rows of 6 tokens, 9 rows of 2

    def converse(number: int) -> list[tuple[str, int, int, int]]:
        """(answer, tokens of the prompt, of its images, and from the cache) of each turn."""
        messages: Any = [
            {"role": "user", "content": [picture(wide), {"type": "text", "text": f"What is it? {number}"}]}
        ]
        turns = []
        for follow_up in ([picture(tall), {"type": "text", "text": "And this?"}], "Which is larger?", ""):
            answer = completions.create(messages=messages, **GREEDY)
            usage, text = answer.usage, answer.choices[0].message.content
            details = usage.prompt_tokens_details
            turns.append((text, usage.prompt_tokens, details.image_tokens, details.cached_tokens))
            chunks = completions.create(messages=messages, stream=True, **GREEDY)
            assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
        return turns

    first = converse(0)
    assert [n for _, _, n, _ in first] == [24, 42, 42]
    assert all(n_cached >= n_before for (_, n_before, _, _), (_, _, _, n_cached) in itertools.pairwise(first))
    together = at_once(converse, list(range(8)))
    assert [turn[:3] for turn in together[0]] == [turn[:3] for turn in first]
    assert len({turns[-1][0] for turns in together}) > 4


def test_audio_is_heard(hearing_server: Serving) -> None:
    client = openai.OpenAI(base_url=hearing_server.v1, api_key=KEY, max_retries=0, timeout=60)
    sound: Any = {"type": "input_audio", "input_audio": {"data": as_base64(TONE), "format": "wav"}}
    answer = client.chat.completions.create(messages=asks(sound), **GREEDY)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.audio_tokens == 6
    with pytest.raises(openai.BadRequestError, match="accepts only audio and text input"):
        client.chat.completions.create(messages=asks(picture()), **GREEDY)
