"""Anthropic's API: how its own client parses the answers, and what the model gets."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import (
    Message,
    MessageTokensCount,
    RawMessageStreamEvent,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from anthropic.types.shared import ErrorResponse

from cppbatch.chat.output_parser import ArgumentsDelta, TextDelta, ToolCallStart
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest, client_name
from cppbatch.server.api.anthropic.conversion import message_turn
from cppbatch.server.api.anthropic.types import MessagesRequest
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.fixtures import chat_server
from tests.support.narrow import expect, some
from tests.support.scripted_chat import ENDS, SCRIPT, ChatServer, ScriptedFormat, strictly

Json = dict[str, Any]

ALIAS = "claude-here"

HELLO: Json = {"model": "tiny-llama", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}

GREEDY: dict[str, Any] = {"temperature": 0}

WEATHER = {"name": "weather", "description": "How it is.", "input_schema": {"type": "object"}}

TIME = {"name": "time", "input_schema": {"type": "object"}}

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}

server = chat_server(ServerSettings(aliases=(ALIAS,)))
pytestmark = pytest.mark.usefixtures("own_format")


@pytest.fixture
def client(server: ChatServer) -> anthropic.Anthropic:
    return client_of(server)


def client_of(server: ChatServer, key: str = "x") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    """Fields without an argument in the client go into the body too."""
    extra = {name: fields.pop(name) for name in ("temperature", "top_k", "top_p", "timeout") if name in fields}
    return expect(Message, client.messages.create(**{**HELLO, **fields}, extra_body=extra))


def streamed(client: anthropic.Anthropic, **fields: Any) -> Message:
    with client.messages.stream(**{**HELLO, **fields}, extra_body=GREEDY) as stream:
        return stream.get_final_message()


def text_of(message: Message) -> str:
    """The text of its first block."""
    return expect(TextBlock, message.content[0]).text


def like(message: Message) -> Json:
    """A message without what differs each time it is asked for."""
    shown: Json = message.model_dump(exclude={"id", "usage"})
    for block in shown["content"]:
        block.pop("parsed_output", None)
    return shown


# --- the client and its types -----------------------------------------------------------------------------------------


def test_an_answer_is_a_whole_message_of_the_clients_types(client: anthropic.Anthropic) -> None:
    message = ask(client, **GREEDY)
    strictly(Message, message.to_dict())
    assert message.id.startswith("msg_")
    assert (message.model, message.role, message.stop_reason) == (ALIAS, "assistant", "max_tokens")
    (block,) = message.content
    assert block.type == "text"
    assert block.text
    assert message.usage.output_tokens == 8


def test_a_streamed_message_is_the_same_as_a_whole_one(client: anthropic.Anthropic) -> None:
    whole, again = ask(client, **GREEDY), streamed(client)
    assert like(whole) == like(again)
    assert whole.usage.output_tokens == again.usage.output_tokens
    assert total_input(whole) == total_input(again)
    assert again.usage.cache_read_input_tokens == total_input(again) - 1  # asked a second time
    assert whole._request_id


def total_input(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_model_answers_to_any_name_and_returns_its_alias(client: anthropic.Anthropic) -> None:
    assert ask(client, model="claude-nine").model == ALIAS


def test_thoughts_text_and_calls_are_blocks_streamed_or_not(server: ChatServer, client: anthropic.Anthropic) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    whole, again = ask(client, max_tokens=40, tools=[WEATHER, TIME]), streamed(client, max_tokens=40)
    for message in (whole, again):
        first, second, third, fourth = message.content
        thoughts, text = expect(ThinkingBlock, first), expect(TextBlock, second)
        weather, time = expect(ToolUseBlock, third), expect(ToolUseBlock, fourth)
        assert (thoughts.type, thoughts.thinking, thoughts.signature) == ("thinking", "Let me think.", "")
        assert (text.type, text.text) == ("text", "I shall look.")
        assert (weather.type, weather.id, weather.name) == ("tool_use", "call_a", "weather")
        assert (weather.input, time.input) == ({"city": "Paris"}, {})
        assert message.stop_reason == "tool_use"
        assert 0 < some(message.usage.output_tokens_details).thinking_tokens < message.usage.output_tokens
        strictly(Message, message.to_dict(), "parsed_output")


# --- the client and its types -----------------------------------------------------------------------------------------


def test_every_event_of_a_stream_is_one_of_the_clients_types_in_order(server: ChatServer) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    events = server.events("/v1/messages", {**HELLO, "max_tokens": 40})
    for name, data in events:
        assert strictly(RawMessageStreamEvent, data).type == name
    names = [name.removeprefix("content_block_") for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names[1:-2] == [*["start", "delta", "delta", "stop"] * 3, "start", "delta", "stop"]
    assert [data["index"] for _, data in events[1:-2]] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3
    kinds = {data["delta"]["type"] for name, data in events if name == "content_block_delta"}
    assert kinds == {"text_delta", "thinking_delta", "input_json_delta"}


def test_a_call_that_was_cut_off_is_left_out(server: ChatServer, client: anthropic.Anthropic) -> None:
    server.use(
        ScriptedFormat([TextDelta("So: "), ToolCallStart(0, "call_a", "weather"), ArgumentsDelta(0, '{"city": "Par')])
    )
    message = ask(client)
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


# --- how a message ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_matched_stop_sequence_is_reported_and_not_part_of_the_text(
    client: anthropic.Anthropic, *, stream: bool
) -> None:
    text = text_of(ask(client, max_tokens=20, **GREEDY))
    stop = text[5:8]
    fields: Json = {"max_tokens": 20, "stop_sequences": ["never this", stop[1:], stop, stop[-1:] * 9]}
    message = streamed(client, **fields) if stream else ask(client, **fields, **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_a_text_that_ends_by_itself_is_the_end_of_the_turn(server: ChatServer, client: anthropic.Anthropic) -> None:
    server.use(ScriptedFormat([TextDelta("Hi.")], **ENDS))
    message = ask(client, max_tokens=40)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_max_tokens_may_exceed_the_context_but_the_prompt_may_not(client: anthropic.Anthropic) -> None:
    message = ask(client, max_tokens=12_000)
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 5\d+ tokens > \d+ maximum"):
        ask(client, messages=[{"role": "user", "content": "x" * 5000}])


def test_a_message_that_times_out_is_paused(client: anthropic.Anthropic) -> None:
    assert ask(client, max_tokens=1000, timeout=0.05).stop_reason == "pause_turn"


def test_tokens_are_counted_as_the_message_would_have_them(client: anthropic.Anthropic) -> None:
    fields: Json = {"system": "Be brief.", "messages": [{"role": "user", "content": "the cat sat on the mat"}]}
    counted = client.messages.count_tokens(model="tiny-llama", **fields)
    strictly(MessageTokensCount, counted.to_dict())
    assert counted.input_tokens == total_input(ask(client, **fields))
    longer = client.messages.count_tokens(model="tiny-llama", messages=HELLO["messages"] * 50)
    assert longer.input_tokens > counted.input_tokens


# --- what the model is given ------------------------------------------------------------------------------------------


def read(messages: list[Json], **fields: Any) -> list[Json]:
    return message_turn(msgspec.convert({**HELLO, "messages": messages, **fields}, MessagesRequest)).messages


def test_a_conversation_with_tools_and_thoughts_becomes_openais() -> None:
    messages: list[Json] = [
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where?", "signature": "s"},
                {"type": "redacted_thinking", "data": "..."},
                {"type": "text", "text": "I shall look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Here you are."},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny."}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_3", "name": "time", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_3"}]},
    ]
    calls = [("toolu_1", "weather", '{"city":"Paris"}'), ("toolu_2", "time", "{}"), ("toolu_3", "time", "{}")]
    first, second, third = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for name, tool, arguments in calls
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert read(messages, system=system) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": "I shall look.",
            "reasoning_content": "Where?",
            "tool_calls": [first, second],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"},
        {"role": "user", "content": "Here you are."},
        {"role": "assistant", "content": None, "tool_calls": [third]},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
    ]


@pytest.mark.parametrize("as_blocks", [False, True])
def test_the_hash_in_the_first_line_of_claude_code_does_not_change_the_prompt(*, as_blocks: bool) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};"
    said = "You are Claude Code; cch=kept;"

    def system(stamp: str) -> Any:
        texts = [line.format(stamp), said]
        return [{"type": "text", "text": text} for text in texts] if as_blocks else "".join(texts)

    def prompt(given: Any) -> list[Json]:
        return read([{"role": "user", "content": "Hi."}], system=given)

    assert prompt(system("a5145")) == prompt(system("0b1c2"))
    assert prompt(system("a5145"))[0]["content"].endswith(said)
    assert prompt("Write: cch=a5145;")[0]["content"] == "Write: cch=a5145;"


def test_messages_of_one_role_in_a_row_are_one() -> None:
    texts = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")]
    merged = read([{"role": role, "content": text} for role, text in texts])
    assert merged == [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "cd"}]


# --- what the model is given ------------------------------------------------------------------------------------------


NEITHER: Json = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "document", "source": {"type": "text"}}],
}

UNREADABLE = {
    "no messages": ([], "messages"),
    "an image": ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].source"),
    "a document": ([{"role": "user", "content": [{"type": "document"}]}], "messages[0].content[0]"),
    "a document that a tool gave": ([{"role": "user", "content": [NEITHER]}], "messages[0].content[0].content[0]"),
    "a call by the user": ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages[0].content[0]"),
    "a reference to no tool": (
        [{"role": "user", "content": [{**NEITHER, "content": [{"type": "tool_reference"}]}]}],
        "messages[0].content[0].content[0].tool_name",
    ),
    "a text without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "a call without a name": (
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]}],
        "messages[0].content[0].name",
    ),
    "nothing": ([{"role": "user", "content": []}], "messages[0].content"),
}


@pytest.mark.parametrize(("messages", "field"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_content_that_is_not_text_is_refused_with_its_place(messages: list[Json], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(messages)
    assert refused.value.field == field


def test_a_deferred_tool_comes_last_once_a_result_refers_to_it() -> None:
    deferred = [{"name": name, "input_schema": {"type": "object"}, "defer_loading": True} for name in ("date", "zone")]
    body = {**HELLO, "tools": [*deferred, WEATHER, TIME]}
    turn = message_turn(msgspec.convert(body, MessagesRequest))
    assert [tool["function"]["name"] for tool in turn.tools] == ["weather", "time"]

    references = [{"type": "tool_reference", "tool_name": name} for name in ("zone", "date", "zone", "gone")]
    for n, names in ((1, ["zone"]), (4, ["zone", "date"])):
        result = {"type": "tool_result", "tool_use_id": "t", "content": references[:n]}
        turn = message_turn(
            msgspec.convert({**body, "messages": [{"role": "user", "content": [result]}]}, MessagesRequest)
        )
        assert [tool["function"]["name"] for tool in turn.tools] == ["weather", "time", *names]
        assert turn.messages[0]["content"].startswith("The tool zone can be called from now on.")
        assert client_name("tools[0].function.parameters", turn.field_names) == "tools[2].input_schema"
        assert client_name("tools[2].function.name", turn.field_names) == "tools[1].name"


CHOICES = {
    "auto": ({"type": "auto"}, ToolChoice()),
    "any": ({"type": "any"}, ToolChoice(mode="required")),
    "none": ({"type": "none"}, ToolChoice(mode="none")),
    "one by name": ({"type": "tool", "name": "time"}, ToolChoice(mode="required", name="time", parallel=False)),
    "one at a time": ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
}


@pytest.mark.parametrize(("given", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_tools_thinking_and_a_schema_reach_the_template(
    server: ChatServer, client: anthropic.Anthropic, given: Json, expected: ToolChoice
) -> None:
    server.use(form := ScriptedFormat([TextDelta("Hi.")], **ENDS))
    ask(
        client,
        tools=[WEATHER, TIME],
        tool_choice=given,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "array"}}},
    )
    assert [tool["function"]["name"] for tool in form.asked["tools"]] == ["weather", "time"]
    assert form.asked["tools"][0]["function"]["description"] == "How it is."
    assert form.asked["choice"] == expected
    assert form.asked["schema"] == {"type": "array"}
    assert form.asked["variables"] == {"enable_thinking": True, "reasoning_effort": "low"}


def test_a_tool_that_runs_on_anthropics_servers_is_left_out_and_reported(
    server: ChatServer, client: anthropic.Anthropic
) -> None:
    server.use(form := ScriptedFormat([TextDelta("Hi.")], **ENDS))
    answer = client.messages.with_raw_response.create(**HELLO, extra_body={"tools": [SEARCH, TIME]})
    assert [tool["function"]["name"] for tool in form.asked["tools"]] == ["time"]
    assert answer.headers["X-Ignored-Fields"] == "tools%5B0%5D"


def test_thinking_can_be_switched_off_and_is_otherwise_decided_by_the_template(
    server: ChatServer, client: anthropic.Anthropic
) -> None:
    server.use(form := ScriptedFormat([TextDelta("Hi.")], **ENDS))
    ask(client, thinking={"type": "disabled"})
    assert form.asked["variables"] == {"enable_thinking": False}
    ask(client)
    assert form.asked["variables"] == {}


# --- errors -----------------------------------------------------------------------------------------------------------


REFUSED = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no tokens wanted": ({"max_tokens": 0}, "max_tokens"),
    "a call of Anthropic's tool": (
        {"tools": [SEARCH, TIME], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice",
    ),
    "a bad schema after Anthropic's tool": (
        {"tools": [SEARCH, {"name": "f", "input_schema": {"type": 5}}]},
        "tools[1].input_schema",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a tool without a name": ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    "two tools of one name": ({"tools": [TIME, TIME]}, "tools[1].name"),
    "a call of no tool": ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    "a call without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences"),
    "several answers": ({"n": 2}, "n"),
    "a schema that is none": (
        {"output_format": {"type": "json_schema", "schema": {"type": 5}}},
        "output_config.format",
    ),
    "another API's field": ({"response_format": {"type": "json_object"}}, "response_format"),
}


@pytest.mark.parametrize(("fields", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_request_is_the_clients_bad_request_error(client: anthropic.Anthropic, fields: Json, field: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**HELLO, extra_body=fields)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id
    error = strictly(ErrorResponse, refused.value.body)
    assert error.error.message.startswith(f"{field}:")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_the_clients_not_found_error(tiny_llama: Path) -> None:
    server = ChatServer(tiny_llama, ServerSettings(strict_model=True))
    try:
        with pytest.raises(anthropic.NotFoundError, match="--alias") as refused:
            ask(client_of(server), model="claude-nine")
    finally:
        server.stop()
    assert strictly(ErrorResponse, refused.value.body).error.type == "not_found_error"


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/v1/messages/nothing", "POST", 404, "not_found_error"),
        ("/v1/messages", "GET", 405, "invalid_request_error"),
        ("/v1/messages", "POST", 413, "request_too_large"),
    ],
)
def test_errors_of_the_server_itself_have_anthropics_form_too(
    server: ChatServer, path: str, method: str, status: int, kind: str
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    body = b"x" if status != 413 else None
    headers = {} if body else {"Content-Length": str(1 << 30)}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    error = json.loads(answer.read())
    assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["error"]["message"]


def test_other_paths_keep_openais_form(server: ChatServer) -> None:
    for path in ("/v1/messagesx", "/v1/chat/completions"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}{path}", b"{", timeout=30)
        assert set(json.loads(refused.value.read())["error"]) == {"message", "type", "param", "code"}


def test_keys_and_limits_are_the_clients_own_errors(tiny_llama: Path) -> None:
    settings = ServerSettings(keys=Keys(["right"]), limits=Limits(max_tokens=8))
    server = ChatServer(tiny_llama, settings, n_parallel=1, max_queue=1)
    try:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(client_of(server, "wrong"))
        strictly(ErrorResponse, refused.value.body)
        with pytest.raises(anthropic.BadRequestError, match="--max-tokens"):
            ask(client_of(server, "right"), max_tokens=9)
        assert ask(client_of(server, "right")).usage.output_tokens == 8
    finally:
        server.stop()


def test_too_many_at_once_are_the_clients_rate_limit_error(tiny_llama: Path) -> None:
    server = ChatServer(tiny_llama, ServerSettings(limits=Limits(max_concurrent=1)))
    client = client_of(server)
    try:
        with client.messages.stream(**{**HELLO, "max_tokens": 1000}) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError) as refused:
                ask(client)
        assert strictly(ErrorResponse, refused.value.body).error.type == "rate_limit_error"
    finally:
        server.stop()


def test_an_error_in_midstream_is_raised_by_the_client(
    server: ChatServer, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = server.fail_in_midstream(monkeypatch)
    with client.messages.stream(**{**HELLO, "max_tokens": 100}) as stream:
        next(iter(stream))
        go_on.set()
        with pytest.raises(anthropic.APIStatusError, match="on fire") as failed:
            stream.until_done()
    assert strictly(ErrorResponse, failed.value.body).error.type == "api_error"


# --- nothing is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_with_the_error_code_that_the_client_recognises(
    client: anthropic.Anthropic, thread: Any
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}], "thread": thread}
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.post(path, cast_to=object, body=body)
        error: Any = refused.value.body
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["details"] == {"error_code": "thread_unsupported_request"}


STATE: list[tuple[str, Any]] = [
    ("container", "container_1"),
    ("mcp_servers", [{"type": "url", "name": "x", "url": "http://x"}]),
    ("compaction", {"type": "auto"}),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
    ),
]


@pytest.mark.parametrize(("field", "value"), STATE)
def test_stored_state_and_context_edits_are_refused(client: anthropic.Anthropic, field: str, value: Any) -> None:
    asked: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.BadRequestError, match=field):
        client.messages.create(**asked, extra_body={field: value})


def test_an_edit_that_changes_nothing_is_taken(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    keeping: Any = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    assert client.messages.create(**asked, extra_body=keeping).usage.output_tokens > 0
