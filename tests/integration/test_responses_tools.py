"""The tools of coding agents in OpenAI's responses: namespaces, tools of OpenAI's servers, items about them."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from cppbatch.chat.output_parser import ArgumentsDelta, Delta, TextDelta, ToolCallStart
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.types import ResponsesRequest
from tests.support.fixtures import chat_server
from tests.support.scripted_chat import ENDS, ChatServer, ScriptedFormat

Json = dict[str, Any]

server = chat_server()
pytestmark = pytest.mark.usefixtures("own_format")


def function(name: str, description: str = "Does it.") -> Json:
    schema = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": schema}


AGENTS: Json = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [function("spawn"), function("close")],
}
DOCS: Json = {"type": "namespace", "name": "mcp__docs__", "tools": [function("close"), {"type": "custom", "name": "p"}]}
SEARCH: Json = {"type": "web_search", "external_web_access": False}
CODEX: Json = {
    "model": "local",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be safe."}],
        },
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "Skills."}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Say hi."}]},
    ],
    "tools": [function("exec_command"), AGENTS, function("get_goal"), SEARCH, {"type": "local_shell"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2"},
    "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "answer", "strict": True}},
    "context_management": [{"type": "compaction", "compact_threshold": 200000}],
    "max_output_tokens": 40,
}
"""A request in the form of Codex CLI 0.171."""


def turn(**fields: Any) -> Any:
    return response_turn(msgspec.convert({"input": "Hi.", **fields}, ResponsesRequest))


def names(**fields: Any) -> list[str]:
    return [tool[tool["type"]]["name"] for tool in turn(**fields).tools]


def test_a_request_of_codex_is_answered_and_told_what_it_does_not_get(
    server: ChatServer, client: openai.OpenAI
) -> None:
    server.use(form := ScriptedFormat([TextDelta("{}")], **ENDS))
    answer = client.responses.with_raw_response.create(
        **{k: v for k, v in CODEX.items() if k in ("model", "input")}, extra_body=CODEX
    )
    assert answer.parse().output_text == "{}"
    ignored = answer.headers["X-Ignored-Fields"].split(", ")
    assert {"store", "context_management", "text.verbosity", "tools%5B3%5D", "tools%5B4%5D"} <= {*ignored}
    assert [tool["function"]["name"] for tool in form.asked["tools"]] == ["exec_command", "spawn", "close", "get_goal"]
    assert form.asked["schema"] == {"type": "object"}
    echo = answer.parse().to_dict()["tools"]
    assert [(tool["type"], tool["name"]) for tool in echo] == [
        ("function", "exec_command"),
        ("namespace", "agents"),
        ("function", "get_goal"),
    ]
    assert [tool["name"] for tool in echo[1]["tools"]] == ["spawn", "close"]


def test_the_description_of_a_namespace_reaches_the_model_once() -> None:
    assert [tool["function"]["description"] for tool in turn(tools=[AGENTS]).tools] == [
        "Sub-agents.\n\nDoes it.",
        "Does it.",
    ]


def test_a_tool_has_its_own_name_or_that_of_its_namespace_too_if_another_has_it() -> None:
    assert names(tools=[AGENTS, DOCS]) == ["spawn", "agents__close", "mcp__docs__close", "p"]
    assert names(tools=[AGENTS, function("close")]) == ["spawn", "agents__close", "close"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_in_a_namespace_names_both_and_can_be_sent_back(server: ChatServer, *, stream: bool) -> None:
    script: list[Delta] = [
        ToolCallStart(0, "call_a", "agents__close"),
        ArgumentsDelta(0, '{"target": "a"}'),
        ToolCallStart(1, "call_b", "p", is_custom=True),
        ArgumentsDelta(1, "text"),
    ]
    server.use(ScriptedFormat(script, **ENDS))
    body: Json = {"input": "Close it.", "tools": [AGENTS, DOCS], "max_output_tokens": 40}
    if stream:
        *_, (_, last) = server.events("/v1/responses", body)
        said = last["response"]["output"]
    else:
        said = server.post("/v1/responses", body)["output"]
    assert [(item["type"], item["namespace"], item["name"]) for item in said] == [
        ("function_call", "agents", "close"),
        ("custom_tool_call", "mcp__docs__", "p"),
    ]
    back = turn(input=[{"role": "user", "content": "Close it."}, *said], tools=[AGENTS, DOCS]).messages[-1]
    assert [call["function"]["name"] for call in back["tool_calls"]] == ["agents__close", "p"]


def test_a_namespace_is_named_in_the_choice_of_a_tool_too() -> None:
    choice: Json = {"type": "function", "name": "close", "namespace": "agents"}
    assert turn(tools=[AGENTS, DOCS], tool_choice=choice).choice.name == "agents__close"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice, SEARCH]}
    assert turn(tools=[AGENTS, DOCS, SEARCH], tool_choice=allowed).choice.allowed == ("agents__close",)
    only = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    assert turn(tools=[AGENTS, SEARCH], tool_choice=only).choice.mode == "none"


def test_a_tool_of_openais_servers_is_refused_only_where_it_is_demanded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="web_search") as refused:
        client.responses.create(input="Hi.", extra_body={"tools": [SEARCH], "tool_choice": {"type": "web_search"}})
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="tools is empty"):
        client.responses.create(input="Hi.", extra_body={"tools": [SEARCH], "tool_choice": "required"})


def test_an_error_names_a_tool_as_the_client_has_it(client: openai.OpenAI) -> None:
    bad = {**function("f"), "parameters": {"type": "string"}}
    group = {"type": "namespace", "name": "g", "tools": [bad]}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="Hi.", extra_body={"tools": [SEARCH, function("a"), group]})
    assert refused.value.param == "tools[2].tools[0].parameters"


def test_tools_in_items_are_added_to_those_of_the_request() -> None:
    items = [
        {"role": "user", "content": "Find it."},
        {"type": "additional_tools", "role": "developer", "tools": [function("first"), AGENTS]},
        {"type": "tool_search_call", "call_id": "call_1", "arguments": {"query": "close"}, "status": "completed"},
        {"type": "tool_search_output", "call_id": "call_1", "tools": [DOCS, function("first", "Again.")]},
    ]
    asked = turn(input=items, tools=[function("own")])
    found = [(tool[tool["type"]]["name"], tool[tool["type"]]["description"]) for tool in asked.tools]
    assert found[:2] == [("own", "Does it."), ("spawn", "Sub-agents.\n\nDoes it.")]
    assert found[-1] == ("first", "Again.")
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool"]
    assert asked.messages[2]["content"] == "mcp__docs__, first"


def test_calls_that_another_server_has_made_stay_in_the_conversation_with_their_results() -> None:
    items = [
        {"role": "user", "content": "Look."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"role": "assistant", "content": "Found."},
        {"type": "local_shell_call", "call_id": "call_2", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "call_2", "output": "a.py"},
    ]
    said = [
        (message["role"], message.get("tool_calls", [{}])[0].get("function"), message["content"])
        for message in turn(input=items).messages
    ]
    assert said == [
        ("user", None, "Look."),
        ("assistant", {"name": "web_search", "arguments": {"type": "search", "query": "x"}}, None),
        ("tool", None, "completed"),
        ("assistant", {"name": "local_shell", "arguments": {"command": ["ls"]}}, "Found."),
        ("tool", None, "a.py"),
    ]


def test_an_item_of_an_unknown_kind_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidRequest, match="compaction") as refused:
        turn(input=[{"type": "compaction", "encrypted_content": "x"}])
    assert refused.value.field == "input[0]"
