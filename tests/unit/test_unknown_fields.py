"""Fields that a request's type does not have: refused if they would change the answer, otherwise listed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cppbatch.errors import InvalidRequest
from cppbatch.server.api.anthropic.types import MessagesRequest
from cppbatch.server.api.embeddings import EmbeddingRequest
from cppbatch.server.api.generate.generate_endpoint import GenerateRequest
from cppbatch.server.api.llama_server.completion import LlamaCompletionRequest
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.openai.completions import CompletionRequest
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.fields.parse import read_body
from cppbatch.server.fields.unknown import format_names, known_fields, refuse_unknown

KINDS = (
    ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateRequest,
    LlamaCompletionRequest,
)  # fmt: skip

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

CHANGES: dict[str, Any] = {
    "guided_decoding": {"json": {}}, "guided_whitespace_pattern": " ", "my_grammar": "x", "json_schema_v2": True,
    "frequence_penalty_2": 1.0, "bad_words": ["x"], "allowed_token_ids": [1], "use_beam_search": True,
    "length_penalty": 1.3, "truncate_prompt_tokens": 5, "extra_body": {"top_k": 1}, "sampling_params": {"top_k": 1},
    "no_repeat_ngram_size": 3, "max_new_tokens": 7, "web_search_options": {}, "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"}, "verbosity": "low", "do_sample": False, "enable_thinking": False, "watermark": True,
    "stop_words": ["a"], "think": False, "chat_template": "{{ x }}", "documents": [{}], "vllm_xargs": {"a": 1},
}  # fmt: skip

STATE: dict[str, Any] = {
    "store": True, "previous_response_id": "resp_1", "conversation": "conv_1", "container": "cntr_1", "cache_id": "a",
    "context_management": [{"type": "compaction"}], "cached_content": "cachedContents/1", "session_params": {"id": 1},
}  # fmt: skip

HARMLESS: dict[str, Any] = {
    "metadata_2": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "request_id": "1", "session_id": "s", "return_token_ids": True, "guided_decoding_backend": "xgrammar",
    "kv_transfer_params": {"a": 1}, "id_slot_2": 3, "extra": 1, "trace_id": "t", "tags": ["a"],
}  # fmt: skip

WITHOUT_EFFECT: dict[str, Any] = {
    "modalities": ["text"], "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "guided_decoding": None,
    "no_repeat_ngram_size": 0, "do_sample": True, "web_search_options": None, "my_grammar": "", "verbosity": "medium",
    "conversation_id": None, "container": "", "n_predict": -1,
}  # fmt: skip


def refusal(kind: type, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        refuse_unknown(fields, kind)
    return refused.value


@each_kind
@pytest.mark.parametrize("name", CHANGES)
def test_unknown_fields_that_would_change_the_answer_are_refused_with_their_name(kind: type, name: str) -> None:
    assert refusal(kind, **{name: CHANGES[name]}).field == name


@each_kind
@pytest.mark.parametrize("name", STATE)
def test_state_that_is_not_kept_is_refused_or_a_field_that_the_type_checks_itself(kind: type, name: str) -> None:
    if name in known_fields(kind):
        assert kind in (ResponsesRequest, MessagesRequest)
    else:
        assert "keeps no state" in refusal(kind, **{name: STATE[name]}).message


@each_kind
def test_harmless_ones_are_listed_in_their_order(kind: type) -> None:
    assert refuse_unknown(HARMLESS, kind) == tuple(HARMLESS)


@each_kind
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_values_without_effect_are_accepted(kind: type, name: str) -> None:
    refuse_unknown({name: WITHOUT_EFFECT[name]}, kind)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("temprature", "temperature"), ("topP", "top_p"), ("top-k", "top_k"), ("logitbias", "logit_bias"),
        ("repetition_penalties", "repetition_penalty"),
        ("respone_format", "response_format"), ("tool", "tools"),
        ("maxTokens", "max_tokens"), ("STOP", "stop"),
        ("guided_regexp", "guided_regex"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_refused_with_the_likely_name(written: str, meant: str) -> None:
    error = refusal(ChatCompletionRequest, **{written: 1})
    assert (error.field, error.message) == (written, f"is an unknown field; did you mean {meant}?")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatCompletionRequest, b"{}", "messages: is required"),
        (
            ChatCompletionRequest,
            b'{"user_2": 1, "mesages": []}',
            "messages: is required; mesages is an unknown field; did you mean messages?",
        ),
        (ChatCompletionRequest, b'{"text": "a"}', "messages: is required; text is an unknown field"),
        (
            ChatCompletionRequest,
            b'{"temprature": 1}',
            "messages: is required; temprature is an unknown field; did you mean temperature?",
        ),
        (
            ChatCompletionRequest,
            b'{"history": []}',
            "messages: is required; history is not supported; send all messages",
        ),
        (EmbeddingRequest, b'{"inputs": "a"}', "input: is required; inputs is an unknown field; did you mean input?"),
        (ChatCompletionRequest, b'{"mesages": [], "messages": 1}', "messages: expected `array`, got `int`"),
    ],
)
def test_a_missing_field_is_named_with_an_unknown_field_that_may_be_its_misspelling(
    kind: type[msgspec.Struct], body: bytes, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(body, kind)
    assert str(refused.value) == message


def test_a_field_may_be_sent_under_several_servers_names_at_once() -> None:
    fields = {"max_tokens": 5, "n_predict": 5, "max_new_tokens": 5, "top_p": 0.5, "topP": 0.5}
    assert refuse_unknown(fields, ChatCompletionRequest) == ("n_predict", "max_new_tokens", "topP")


def test_special_tokens_are_added_as_each_kind_of_prompt_has_them() -> None:
    for kind, usual in ((ChatCompletionRequest, False), (CompletionRequest, True)):
        assert refuse_unknown({"add_special_tokens": usual}, kind) == ("add_special_tokens",)
        assert refusal(kind, add_special_tokens=not usual).field == "add_special_tokens"


def test_no_field_of_this_server_is_unknown() -> None:
    for kind in KINDS:
        names = known_fields(kind)
        assert refuse_unknown(dict.fromkeys(names, 1), kind) == ()


def test_more_than_a_hundred_unknown_fields_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"prompt": "a", **{f"zqwkey{i}": 1 for i in range(100)}}
    assert len(refuse_unknown(fields, CompletionRequest)) == 100
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("each would be compared"))
    fields |= {f"{name}2": 1 for name in known_fields(CompletionRequest)}
    with pytest.raises(InvalidRequest, match="zqwkey0: is one of more than 100 unknown fields"):
        refuse_unknown(fields, CompletionRequest)


def test_the_header_has_names_of_any_characters_and_not_too_many() -> None:
    assert format_names(["a", "b c", "é\r\nSet-Cookie: x"]) == "a, b%20c, %C3%A9%0D%0ASet-Cookie%3A%20x"
    assert format_names(["x" * 1000]) == "x" * 64
    assert format_names(map(str, range(1000))).split(", ") == [*map(str, range(20)), "..."]
