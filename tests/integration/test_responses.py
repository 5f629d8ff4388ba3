"""OpenAI's responses: how its own client parses the answers, and what the model gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import (
    FunctionTool,
    Response,
    ResponseFormatTextJSONSchemaConfig,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseStreamEvent,
)

from cppbatch.chat.output_parser import TextDelta
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.batch_files import client_of
from tests.support.fixtures import chat_server
from tests.support.narrow import expect, some
from tests.support.scripted_chat import ENDS, SCRIPT, ChatServer, ScriptedFormat, strictly

Json = dict[str, Any]

HELLO: Json = {"model": "tiny-llama", "input": "hello", "max_output_tokens": 8, "temperature": 0}

OURS = ("store", "timings")  # OpenAI's answers have the first, its client's type does not; llama-server has the other

WEATHER: Json = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}

TIME: Json = {"type": "function", "name": "time", "description": "What time it is.", "parameters": None, "strict": None}

server = chat_server(ServerSettings(aliases=("gpt-here",)))
pytestmark = pytest.mark.usefixtures("own_format")


def ask(client: openai.OpenAI, **fields: Any) -> Response:
    return expect(Response, client.responses.create(**{**HELLO, **fields}))


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """The response of a stream's last event."""
    last: ResponseStreamEvent
    *_, last = client.responses.create(**{**HELLO, **fields}, stream=True)
    assert last.type == "response.completed" or last.type == "response.incomplete"  # noqa: PLR1714 (narrows the type)
    return last.response


def reason(response: Response) -> str | None:
    """Why it is incomplete."""
    return some(response.incomplete_details).reason


def text_of(message: ResponseOutputMessage) -> ResponseOutputText:
    (text,) = message.content
    return expect(ResponseOutputText, text)


def like(response: Response) -> Json:
    """A response without what differs each time it is asked for."""
    shown: Json = response.model_dump(exclude={"id", "created_at", "completed_at", "usage", "timings"})
    for item in shown["output"]:
        del item["id"]
    return shown


# --- the client and its types -----------------------------------------------------------------------------------------


def test_an_answer_is_a_whole_response_of_the_clients_types(client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, user="me", store=False, truncation="auto")
    strictly(Response, response.to_dict(), *OURS)
    assert response.id.startswith("resp_")
    assert (response.status, reason(response)) == ("incomplete", "max_output_tokens")
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "me")
    assert (response.temperature, response.max_output_tokens, response.truncation) == (0, 8, "disabled")
    assert response.to_dict()["store"] is False
    (item,) = response.output
    message = expect(ResponseOutputMessage, item)
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.id.startswith("msg_")
    assert response.output_text
    usage = some(response.usage)
    assert usage.output_tokens == 8
    assert usage.total_tokens == usage.input_tokens + 8


def test_a_streamed_response_is_the_same_as_a_whole_one(client: openai.OpenAI) -> None:
    whole, again = ask(client), streamed(client)
    assert like(whole) == like(again)
    n_cached = some(again.usage).input_tokens_details.cached_tokens
    assert n_cached == some(whole.usage).input_tokens - 1  # asked a second time


def test_a_model_answers_to_any_name_and_without_one(client: openai.OpenAI) -> None:
    for name in ("gpt-here", "gpt-nine", openai.NOT_GIVEN):
        assert ask(client, model=name).model == "gpt-here"


def test_thoughts_text_and_calls_are_items_streamed_or_not(server: ChatServer, client: openai.OpenAI) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    fields: Json = {"max_output_tokens": 40, "tools": [WEATHER, TIME], "reasoning": {"effort": "low"}}
    for response in (ask(client, **fields), streamed(client, **fields)):
        first, second, third, fourth = response.output
        thoughts, message = expect(ResponseReasoningItem, first), expect(ResponseOutputMessage, second)
        weather, time = expect(ResponseFunctionToolCall, third), expect(ResponseFunctionToolCall, fourth)
        assert (thoughts.type, thoughts.summary) == ("reasoning", [])
        assert some(thoughts.content)[0].text == "Let me think."
        assert (message.type, text_of(message).text) == ("message", "I shall look.")
        assert (weather.type, weather.call_id, weather.name) == ("function_call", "call_a", "weather")
        assert (weather.arguments, time.arguments) == ('{"city": "Paris"}', "{}")
        items = (thoughts, message, weather, time)
        assert [some(item.id).split("_")[0] for item in items] == ["rs", "msg", "fc", "fc"]
        assert {item.status for item in items} == {response.status} == {"completed"}
        usage = some(response.usage)
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        assert [expect(FunctionTool, tool).name for tool in response.tools] == ["weather", "time"]
        assert some(response.reasoning).effort == "low"
        strictly(Response, response.to_dict(), *OURS)


def test_the_clients_own_stream_puts_the_events_together(server: ChatServer, client: openai.OpenAI) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    with client.responses.stream(**{**HELLO, "max_output_tokens": 40, "tools": [WEATHER]}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert text == response.output_text == "I shall look."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


EVENTS = """
created in_progress
output_item.added content_part.added reasoning_text.delta reasoning_text.delta
reasoning_text.done content_part.done output_item.done
output_item.added content_part.added output_text.delta output_text.delta
output_text.done content_part.done output_item.done
output_item.added function_call_arguments.delta function_call_arguments.delta
function_call_arguments.done output_item.done
output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
completed
"""


def test_every_event_of_a_stream_is_one_of_the_clients_types_in_order(server: ChatServer) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    events = server.events("/v1/responses", {**HELLO, "max_output_tokens": 40})
    for name, data in events:
        assert strictly(ResponseStreamEvent, data, *OURS).type == name
    assert [name.removeprefix("response.") for name, _ in events] == EVENTS.split()
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][1]["response"]["output"] == []
    ids = {data["item"]["id"]: data["output_index"] for name, data in events if name.endswith("item.added")}
    assert list(ids.values()) == [0, 1, 2, 3]
    assert all(ids[data["item_id"]] == data["output_index"] for _, data in events if "item_id" in data)
    ended = [data["item"] for name, data in events if name.endswith("item.done")]
    assert events[-1][1]["response"]["output"] == ended


def test_items_open_at_max_tokens_are_incomplete(server: ChatServer, client: openai.OpenAI) -> None:
    server.use(ScriptedFormat(SCRIPT[:6]))
    response = streamed(client)
    assert (response.status, reason(response)) == ("incomplete", "max_output_tokens")
    assert [item.to_dict()["status"] for item in response.output] == ["completed", "completed", "incomplete"]
    assert expect(ResponseFunctionToolCall, response.output[-1]).arguments == '{"city": '


def test_a_response_that_times_out_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=900, extra_body={"timeout": 0.05, "ignore_eos": True})
    assert (response.status, reason(response)) == ("incomplete", "timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_the_text(client: openai.OpenAI, *, stream: bool) -> None:
    fields: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = streamed(client, **fields) if stream else ask(client, **fields)
    strictly(Response, response.to_dict(), *OURS)
    text = text_of(expect(ResponseOutputMessage, response.output[0]))
    logprobs = some(text.logprobs)
    assert len(logprobs) == 8
    assert bytes(byte for entry in logprobs for byte in entry.bytes).decode("utf-8", "replace") == text.text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in logprobs)
    assert response.top_logprobs == 2


def test_log_probabilities_are_in_the_events_too(server: ChatServer) -> None:
    events = server.events("/v1/responses", {**HELLO, "top_logprobs": 1})
    for _, data in events:
        strictly(ResponseStreamEvent, data, *OURS)
    deltas = [entry for name, data in events if name.endswith("text.delta") for entry in data["logprobs"]]
    (done,) = (data for name, data in events if name == "response.output_text.done")
    assert deltas == done["logprobs"]
    assert len(deltas) == 8


# --- what the model gets ----------------------------------------------------------------------------------------------


def read(items: str | list[Json], **fields: Any) -> list[Json]:
    return response_turn(msgspec.convert({"input": items, **fields}, ResponsesRequest)).messages


def test_a_text_is_the_users_message() -> None:
    assert read("Hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_items_become_messages_and_items_of_one_turn_are_merged() -> None:
    items: list[Json] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Where?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "call_2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Noon."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Good."}]},
        {"type": "function_call", "call_id": "call_3", "name": "time", "arguments": "{}"},
    ]
    first, second, third = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for name, tool, arguments in [
            ("call_1", "weather", '{"city": "Paris"}'), ("call_2", "time", "{}"), ("call_3", "time", "{}")
        ]
    ]  # fmt: skip
    assert read(items) == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "How is\nit?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Where?", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "call_2", "content": "Noon."},
        {"role": "assistant", "content": None, "reasoning_content": "Good.", "tool_calls": [third]},
    ]


def test_the_output_of_a_response_can_be_sent_back_unchanged(server: ChatServer, client: openai.OpenAI) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    said = ask(client, max_output_tokens=40).output
    server.use(form := ScriptedFormat([TextDelta("Sunny.")], **ENDS))
    items = [
        {"role": "user", "content": "Weather?"},
        *said,
        *({"type": "function_call_output", "call_id": name, "output": "Sunny."} for name in ("call_a", "call_b")),
    ]
    assert ask(client, input=items, max_output_tokens=40).output_text == "Sunny."
    assert [message["role"] for message in form.asked["messages"]] == ["user", "assistant", "tool", "tool"]
    assistant = form.asked["messages"][1]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I shall look.", "Let me think.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_a", "call_b"]


CHOICES = {
    "auto": ("auto", ToolChoice()),
    "required": ("required", ToolChoice(mode="required")),
    "none": ("none", ToolChoice(mode="none")),
    "one by name": ({"type": "function", "name": "time"}, ToolChoice(mode="required", name="time", parallel=False)),
}


@pytest.mark.parametrize(("given", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_tools_effort_and_a_schema_reach_the_template(
    server: ChatServer, client: openai.OpenAI, given: Any, expected: ToolChoice
) -> None:
    server.use(form := ScriptedFormat([TextDelta("Hi.")], **ENDS))
    schema = {"type": "object", "properties": {}}
    response = ask(
        client,
        tools=[WEATHER, TIME],
        tool_choice=given,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "it", "schema": schema}},
    )
    strictly(Response, response.to_dict(), *OURS)
    function = form.asked["tools"][1]["function"]
    assert function == {"name": "time", "description": "What time it is."}
    assert form.asked["choice"] == expected
    assert form.asked["schema"] == schema
    assert form.asked["variables"] == {"reasoning_effort": "none", "enable_thinking": False}
    assert expect(ResponseFormatTextJSONSchemaConfig, some(response.text).format).schema_ == schema


UNREADABLE = {
    "no items": ([], "input"),
    "an image without its URL": (
        [{"role": "user", "content": [{"type": "input_image"}]}],
        "input[0].content[0].image_url",
    ),
    "a file": ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0]"),
    "an unknown role": ([{"role": "king", "content": "x"}], "input[0].role"),
    "a message without content": ([{"role": "user"}], "input[0].content"),
    "a reference": ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
    "a call without an id": ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
    "a result without one": ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
}


@pytest.mark.parametrize(("items", "field"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_content_that_is_not_text_is_refused_with_its_place(items: list[Json], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(items)
    assert refused.value.field == field


# --- errors -----------------------------------------------------------------------------------------------------------


REFUSED = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "in the background": ({"background": True}, "background"),
    "a stored prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a call of no tool": ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    "a choice of another kind": ({"tools": [TIME], "tool_choice": {"type": "mcp", "name": "f"}}, "tool_choice"),
    "a schema that is none": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}},
        "text.format",
    ),
    "a format of another kind": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "another API's field": ({"response_format": {"type": "json_object"}}, "response_format"),
    "too many log-probabilities": ({"top_logprobs": 21}, "top_logprobs"),
    "several answers": ({"n": 2}, "n"),
}


@pytest.mark.parametrize(("fields", "field"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_the_clients_bad_request_error(
    client: openai.OpenAI, fields: Json, field: str, *, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**HELLO, stream=stream, extra_body=fields)
    assert refused.value.param == field
    assert refused.value.type == "invalid_request_error"


def test_fields_that_request_no_storage_are_accepted(client: openai.OpenAI) -> None:
    extra: Json = {
        "previous_response_id": None,
        "background": False,
        "conversation": None,
        "stream_options": {},
        "x": 1,
    }
    assert ask(client, store=False, include=["reasoning.encrypted_content"], extra_body=extra).output_text


def test_a_stored_response_is_the_clients_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_keys_and_limits_are_the_clients_own_errors(tiny_llama: Path) -> None:
    server = ChatServer(tiny_llama, ServerSettings(keys=Keys(["right"]), limits=Limits(max_tokens=8, max_concurrent=1)))
    client = client_of(server, "right")
    try:
        with pytest.raises(openai.AuthenticationError):
            ask(client_of(server, "wrong"))
        with pytest.raises(openai.BadRequestError, match="--max-tokens"):
            ask(client, max_output_tokens=9)
        assert some(ask(client, max_output_tokens=openai.NOT_GIVEN).usage).output_tokens <= 8
    finally:
        server.stop()


def test_an_error_in_midstream_is_a_failed_response(
    server: ChatServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = server.fail_in_midstream(monkeypatch)
    stream = client.responses.create(**{**HELLO, "max_output_tokens": 100}, stream=True)
    next(stream)
    go_on.set()
    *_, last = stream
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the device is on fire")
    assert last.response.output_text
    strictly(ResponseStreamEvent, last.to_dict(), *OURS)
