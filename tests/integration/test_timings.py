"""llama-server's times in every API: `return_progress`, `timings_per_token`, `timings`, and `__verbose`."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from typing import Any

import pytest

from tests.support.fixtures import chat_server
from tests.support.scripted_chat import ChatServer

Json = dict[str, Any]

TIMINGS = set(
    "cache_n prompt_n prompt_ms prompt_per_token_ms prompt_per_second predicted_n predicted_ms predicted_per_token_ms "
    "predicted_per_second".split()
)
WORDS = "one two three four five six seven eight nine ten " * 4
LONG: list[Json] = [{"role": "user", "content": WORDS}]
BODIES: dict[str, Json] = {
    "/completion": {"prompt": WORDS, "n_predict": 6},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 6},
    "/v1/chat/completions": {"messages": LONG, "max_tokens": 6},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 6},
    "/v1/messages": {"messages": LONG, "max_tokens": 6, "model": "tiny-llama"},
}
COMMON: Json = {"temperature": 0, "ignore_eos": True}
paths = pytest.mark.parametrize("path", BODIES)

server = chat_server(n_batch=32, spec="off")
"""Its steps compute at most 32 tokens of a prompt."""


def post(server: ChatServer, path: str, **fields: Any) -> Json:
    return dict(server.post(path, {**BODIES[path], **COMMON, **fields}))


def stream(server: ChatServer, path: str, **fields: Any) -> list[Json]:
    """The data of all events but [DONE]."""
    with server.stream(path, {**BODIES[path], **COMMON, **fields, "stream": True}) as answer:
        lines = answer.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def fresh() -> Json:
    """No prefix of earlier requests is used."""
    return {"cache_salt": f"salt-{next(_SALTS)}"}


_SALTS = itertools.count()


@paths
def test_progress_grows_from_nothing_to_the_whole_prompt(server: ChatServer, path: str) -> None:
    events = stream(server, path, return_progress=True, **fresh())
    shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    total = shown[0]["total"]
    assert total > 64  # tokens: the prompt takes several steps
    assert (shown[0]["cache"], shown[0]["processed"], shown[0]["time_ms"]) == (0, 0, 0)
    processed = [each["processed"] for each in shown]
    assert processed == sorted(set(processed))
    assert len(processed) == 1 + -(-total // 32)
    assert processed[-1] == total
    assert {each["total"] for each in shown} == {total}
    assert [each["time_ms"] for each in shown] == sorted(each["time_ms"] for each in shown)


@paths
def test_progress_starts_after_a_cached_prefix(server: ChatServer, path: str) -> None:
    salt = fresh()
    post(server, path, **salt)
    events = stream(server, path, return_progress=True, **salt)
    first = next(event["prompt_progress"] for event in events if "prompt_progress" in event)
    assert first["cache"] == first["processed"] > 0


@paths
def test_progress_is_sent_only_on_request(server: ChatServer, path: str) -> None:
    assert not any("prompt_progress" in event for event in stream(server, path))


def test_events_of_progress_have_the_form_that_each_api_gives_them(server: ChatServer) -> None:
    first = {path: stream(server, path, return_progress=True)[0] for path in BODIES}
    assert (first["/completion"]["content"], first["/completion"]["stop"]) == ("", False)
    assert first["/v1/completions"]["choices"][0]["text"] == ""
    assert first["/v1/chat/completions"]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    responses = stream(server, "/v1/responses", return_progress=True)
    kinds = {event["type"] for event in responses if "prompt_progress" in event}
    assert (responses[0]["type"], kinds) == ("response.created", {"response.in_progress"})
    messages = stream(server, "/v1/messages", return_progress=True)
    kinds = {event["type"] for event in messages if "prompt_progress" in event}
    assert (messages[0]["type"], kinds) == ("message_start", {"ping"})


@paths
def test_timings_per_token_count_up(server: ChatServer, path: str) -> None:
    events = stream(server, path, timings_per_token=True, **fresh())
    shown = [event["timings"] for event in events if "timings" in event]
    assert all(set(each) == TIMINGS for each in shown)
    counts = [each["predicted_n"] for each in shown]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 1  # a slow reader gets several tokens in one event
    assert all(each["prompt_n"] > 64 and each["prompt_ms"] > 0 for each in shown)
    assert len({each["prompt_ms"] for each in shown}) == 1  # known with the first token


def test_timings_of_progress_start_at_zero(server: ChatServer) -> None:
    events = stream(server, "/completion", return_progress=True, timings_per_token=True, **fresh())
    shown = [event["timings"] for event in events if "prompt_progress" in event]
    first = {name: shown[0][name] for name in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")}
    assert set(first.values()) == {0}
    times = [each["prompt_ms"] for each in shown]
    assert times == sorted(times)
    assert times[-1] > 0


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_answer_has_its_timings(server: ChatServer, path: str) -> None:
    whole = post(server, path, **fresh())["timings"]
    assert set(whole) == TIMINGS
    assert (whole["cache_n"], whole["predicted_n"]) == (0, 6)
    last = stream(server, path, **fresh())[-1]["timings"]
    assert (last["prompt_n"], last["predicted_n"]) == (whole["prompt_n"], 6)


def test_anthropics_answers_have_timings_when_they_are_asked_for(server: ChatServer) -> None:
    assert "timings" not in post(server, "/v1/messages")
    assert not any("timings" in event for event in stream(server, "/v1/messages"))
    assert post(server, "/v1/messages", timings_per_token=True)["timings"]["predicted_n"] == 6
    delta = next(e for e in stream(server, "/v1/messages", timings_per_token=True) if e["type"] == "message_delta")
    assert delta["timings"]["predicted_n"] == 6


def test_the_chunk_with_the_usage_has_timings_too(server: ChatServer) -> None:
    events = stream(server, "/v1/chat/completions", stream_options={"include_usage": True}, timings_per_token=True)
    assert "timings" not in events[0]  # the role alone
    assert events[-1]["choices"] == []
    assert events[-1]["timings"]["predicted_n"] == events[-1]["usage"]["completion_tokens"] == 6


def test_a_message_starts_with_its_number_of_prompt_tokens(server: ChatServer) -> None:
    counting = {"model": "tiny-llama", "messages": LONG}
    n_tokens = server.post("/v1/messages/count_tokens", counting)["input_tokens"]
    salt = fresh()
    for _ in range(2):  # the second time from the prefix cache
        start, *_, end, _stop = stream(server, "/v1/messages", **salt)
        assert (start["type"], end["type"]) == ("message_start", "message_delta")
        at_start, at_end = start["message"]["usage"], end["usage"]
        assert at_start["input_tokens"] + at_start["cache_read_input_tokens"] == n_tokens
        for name in ("input_tokens", "cache_read_input_tokens"):
            assert at_start[name] == at_end[name]
    assert at_start["cache_read_input_tokens"] > 0


def test_a_message_starts_before_its_prompt_is_computed(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.engine._engine
    context, go_on = server.engine._engine.runtime.context, threading.Event()
    decode = context.decode

    def wait_and_decode(batch: Any) -> None:
        assert go_on.wait(30), "nothing came while the prompt was computed"
        decode(batch)

    monkeypatch.setattr(context, "decode", wait_and_decode)
    body = {**BODIES["/v1/messages"], **COMMON, **fresh(), "stream": True}
    with server.stream("/v1/messages", body) as answer:
        assert answer.readline() == b"event: message_start\n"
        usage = json.loads(answer.readline().removeprefix(b"data: "))["message"]["usage"]
        go_on.set()
        answer.read()
    assert usage["input_tokens"] > 64


def test_a_chat_stream_starts_with_the_role_and_null_content(server: ChatServer) -> None:
    events = stream(server, "/v1/chat/completions")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert not any("role" in event["choices"][0]["delta"] for event in events[1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_the_last_chunk_has_the_usage_if_it_is_included(server: ChatServer, path: str) -> None:
    *others, last = stream(server, path, stream_options={"include_usage": True})
    assert not any("usage" in event for event in others)
    assert last["usage"]["completion_tokens"] == 6
    assert not any("usage" in event for event in stream(server, path))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_verbose_shows_the_prompt_and_the_settings(server: ChatServer, path: str) -> None:
    answer = post(server, path, verbose=True)
    shown = answer["__verbose"]
    choice = answer["choices"][0]
    assert WORDS.strip() in shown["prompt"]
    assert shown["generation_settings"]["temperature"] == 0
    assert shown["content"] == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert shown["tokens_predicted"] == 6
    assert shown["stop_type"] == "limit"
    assert "__verbose" not in post(server, path, verbose=False)


def test_streams_show_verbose_where_llama_server_does(server: ChatServer) -> None:
    chat = [event for event in stream(server, "/v1/chat/completions", verbose=True) if "__verbose" in event]
    assert [event["choices"][0]["finish_reason"] for event in chat] == ["length"]
    completions = stream(server, "/v1/completions", verbose=True)
    assert all("__verbose" in event for event in completions)
    assert [event["__verbose"]["stop"] for event in completions] == [False] * (len(completions) - 1) + [True]


def test_an_empty_list_of_response_fields_means_all_of_them(server: ChatServer) -> None:
    assert set(post(server, "/completion", response_fields=[])) == set(post(server, "/completion"))
    assert set(post(server, "/completion", response_fields=["content"])) == {"content"}


def test_the_biases_of_a_token_add_up_as_on_llama_server(server: ChatServer) -> None:
    def used(bias: object) -> list[Json]:
        return list(post(server, "/completion", logit_bias=bias, ignore_eos=False)["generation_settings"]["logit_bias"])

    assert used([[28, 60], [28, -55]]) == [{"token": 28, "bias": 5}]
    assert used([[28, -100], [28, -100], [29, 1]]) == [{"token": 28, "bias": -100}, {"token": 29, "bias": 1}]


def test_of_two_equal_keys_of_logit_bias_the_last_counts(server: ChatServer) -> None:
    body = (
        json.dumps({**BODIES["/completion"], **COMMON, "ignore_eos": False})[:-1]
        + ', "logit_bias": {"28": -100, "28": 7}}'
    )
    with urllib.request.urlopen(f"{server.url}/completion", body.encode(), timeout=60) as answer:
        assert json.load(answer)["generation_settings"]["logit_bias"] == [{"token": 28, "bias": 7}]
