"""`engine.chat`: conversations in, the assistant's messages out, in batches and streamed, parsed as on the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, ChatCompletion, ChatEvent, FinishReason, InvalidRequest, SamplingParams
from cppbatch.chat.messages import ChatMessage, conversation_of
from cppbatch.chat.output_parser import TextDelta, ToolCall
from cppbatch.engine.chats import AssistantOutput
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import ConfigError, LlamaError
from cppbatch.typed_json import convert
from tests.support.chat_families import turn
from tests.support.fakes import context_of, fake_engine, greedy
from tests.support.scripted_chat import SCRIPT, ScriptedFormat

SHORT = greedy(8, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]
CHATML = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def engine() -> BatchInferenceEngine:
    return fake_engine(n_ctx=1024, n_batch=64)


def scripted(engine: BatchInferenceEngine, script: list[Any] = SCRIPT, **params: Any) -> ScriptedFormat:
    """From now on the engine's chats go like this."""
    form = ScriptedFormat(script, **params)
    engine._chat_formats.made[None] = form  # type: ignore[assignment]
    return form


def test_the_prompt_of_a_conversation_is_the_models_template(engine: BatchInferenceEngine) -> None:
    (alone,) = engine.generate([CHATML], SHORT)
    answer = engine.chat(HELLO, SHORT)
    assert (answer.text, answer.tokens, answer.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_one_conversation_has_one_answer_and_a_list_has_a_list_in_its_order(engine: BatchInferenceEngine) -> None:
    one = engine.chat("hello", SHORT)
    several = engine.chat(["hello", HELLO, [*HELLO, {"role": "assistant", "content": "a"}]], SHORT)
    assert isinstance(one, ChatCompletion)
    assert [answer.text for answer in several[:2]] == [one.text, one.text]
    assert len(several) == 3
    assert [answer.text for answer in engine.chat([HELLO], SHORT)] == [one.text]
    assert engine.chat(list[str]()) == []


def test_several_conversations_share_the_steps(engine: BatchInferenceEngine) -> None:
    engine.chat(["a", "b", "c", "d"], SHORT)
    assert max(len(step) for step in context_of(engine).steps) == 4


def test_each_conversation_may_have_its_own_params(engine: BatchInferenceEngine) -> None:
    answers = engine.chat(["a", "b"], [greedy(2, ignore_eos=True), greedy(5, ignore_eos=True)])
    assert [len(answer.tokens) for answer in answers] == [2, 5]
    with pytest.raises(InvalidRequest, match="params: has 1 entries for 2 conversations"):
        engine.chat(["a", "b"], [SHORT])


def test_a_system_message_is_put_before_each_conversation(engine: BatchInferenceEngine) -> None:
    form = scripted(engine)
    engine.chat("hello", SHORT, system="Be brief.")
    assert form.asked["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    with pytest.raises(InvalidRequest, match="system: cannot be combined with a system message"):
        engine.chat([{"role": "system", "content": "x"}, *HELLO], SHORT, system="Be brief.")


def test_answers_are_parsed_into_reasoning_text_and_calls(engine: BatchInferenceEngine) -> None:
    scripted(engine)
    answer = engine.chat("hello", SHORT)
    assert (answer.reasoning, answer.text) == ("Let me think.", "I shall look.")
    assert answer.tool_calls == [
        ToolCall("call_a", "weather", '{"city": "Paris"}'), ToolCall("call_b", "time", "{}")
    ]  # fmt: skip
    assert answer.usage.completion_tokens == len(answer.tokens) == 8


def test_the_message_of_an_answer_goes_back_into_the_conversation(engine: BatchInferenceEngine) -> None:
    form = scripted(engine)
    message = engine.chat("hello", SHORT).message
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    results = [{"role": "tool", "tool_call_id": "call_a", "content": "sunny"}]
    engine.chat([*HELLO, message, *results], SHORT)
    said = form.asked["messages"][1]
    assert said == conversation_of(convert([message], list[ChatMessage]))[0]
    assert (said["content"], said["reasoning_content"]) == ("I shall look.", "Let me think.")


def test_a_stream_has_the_same_parts_and_at_its_end_the_whole_answer(engine: BatchInferenceEngine) -> None:
    scripted(engine)
    whole = engine.chat("hello", SHORT)
    stream = engine.chat_stream("hello", SHORT)
    events = list(stream)
    assert "".join(event.text for event in events) == whole.text
    assert "".join(event.reasoning for event in events) == whole.reasoning
    assert [delta for event in events for delta in event.deltas] == SCRIPT
    assert [event.completion is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert stream.completion
    assert (stream.completion.message, stream.message) == (whole.message, whole.message)


def test_on_event_gets_the_events_of_each_conversation(engine: BatchInferenceEngine) -> None:
    scripted(engine, [TextDelta("yes")])
    seen: list[tuple[int, ChatEvent]] = []
    engine.chat(["a", "b"], SHORT, on_event=lambda i, event: seen.append((i, event)))
    for i in range(2):
        assert "".join(event.text for index, event in seen if index == i) == "yes"


def test_a_stream_that_is_left_is_cancelled_and_keeps_the_partial_text(engine: BatchInferenceEngine) -> None:
    with engine.chat_stream("hello", greedy(200, ignore_eos=True)) as stream:
        text = next(stream).text + next(stream).text + next(stream).text
    assert stream.message == {"role": "assistant", "content": text}
    assert stream.completion is None
    assert not engine.has_work


def test_a_conversation_that_fails_says_so_and_has_no_message_of_another(engine: BatchInferenceEngine) -> None:
    context_of(engine).fail_at[2] = LlamaError("the device is on fire")
    answer = engine.chat("hello", SHORT)
    assert answer.finish_reason is FinishReason.ERROR
    assert "on fire" in str(answer.error)


def test_template_options_work_as_on_the_server(engine: BatchInferenceEngine) -> None:
    form = scripted(engine)
    choice = {"type": "function", "function": {"name": "weather"}}
    variables = {"a": 1}
    engine.chat(HELLO, SHORT, tools=TOOLS, tool_choice=choice, reasoning_effort="low", chat_template_kwargs=variables)
    asked = form.asked
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["weather"]
    assert (asked["choice"].mode, asked["choice"].name) == ("required", "weather")
    assert asked["variables"] == {"reasoning_effort": "low", "a": 1}
    assert asked["continue_final_message"] is None


def test_a_schema_is_that_of_the_answer_and_not_of_the_reasoning_before_it(engine: BatchInferenceEngine) -> None:
    form = scripted(engine, guided_choice=["ab"])  # in place of the grammar with reasoning
    answer = engine.chat("hello", SamplingParams(json_schema={"type": "object"}))
    assert form.asked["schema"] == {"type": "object"}
    assert answer.finish_reason is FinishReason.STOP


def test_another_template_may_be_given(engine: BatchInferenceEngine) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert engine.chat("hello", SHORT, chat_template=template).usage.prompt_tokens == len("hello")
    assert engine.chat("hello", SHORT).usage.prompt_tokens > len("hello")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda engine: engine.chat([{"role": "usr", "content": "x"}]), r"^messages\[0\].role: is 'usr'"),
        (lambda engine: engine.chat([{"role": "user"}]), r"^messages\[0\].content: is required"),
        (lambda engine: engine.chat([{"content": "x"}]), "role"),
        (lambda engine: engine.chat(["a", [{"role": "user"}]]), r"^conversations\[1\]: messages\[0\].content"),
        (lambda engine: engine.chat(["a", 5]), r"^conversations\[1\]: is 5; a conversation is a string or a list"),
        (lambda engine: engine.chat(5), r"^conversations: is 5"),
        (lambda engine: engine.chat("a", system=5), r"^system: is 5"),
        (lambda engine: engine.chat("a", tools=[{"function": {}}]), r"^tools\[0\].function"),
        (lambda engine: engine.chat("a", tool_choice="always"), r"^tool_choice: is 'always'"),
        (
            lambda engine: engine.chat("a", tool_choice="required"),
            r"^tool_choice: requires a tool call, but tools is empty",
        ),
        (lambda engine: engine.chat("a", reasoning_effort="much"), r"^reasoning_effort: is 'much'"),
        (lambda engine: engine.chat("a", chat_template_kwargs={"messages": []}), r"^chat_template_kwargs.messages"),
        (lambda engine: engine.chat("a" * 2000), r"^messages: has \d+ tokens"),
        (lambda engine: engine.generate(HELLO), r"^prompts: is a single conversation; give a list of conversations"),
        (
            lambda engine: next(engine.map(HELLO)),
            r"^prompts: is a single conversation; give an iterable of conversations",
        ),
    ],
)
def test_invalid_arguments_are_named_before_anything_runs(
    engine: BatchInferenceEngine, wrong: Callable[[BatchInferenceEngine], object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        wrong(engine)
    assert engine.stats().steps == 0


def test_an_unknown_template_is_refused(engine: BatchInferenceEngine) -> None:
    with pytest.raises(ConfigError, match=r"nosuch.*chatml"):
        engine.chat("a", chat_template="nosuch")


def test_generate_stream_and_map_take_messages_beside_texts(engine: BatchInferenceEngine) -> None:
    answer = engine.chat(HELLO, SHORT)
    first, second = engine.generate([HELLO, CHATML], SHORT)
    assert (first.text, second.text) == (answer.text, answer.text)
    assert isinstance(first, ChatCompletion)
    assert not isinstance(second, ChatCompletion)
    assert "".join(event.text for event in engine.stream(HELLO, SHORT)) == answer.text
    mapped = list(engine.map([HELLO, (HELLO, SHORT), [{"role": "usr"}]], SHORT, ordered=True))
    assert [result.completion.text for result in mapped] == [answer.text, answer.text, ""]
    assert mapped[0].prompt == HELLO
    assert "usr" in str(mapped[2].completion.error)


def test_map_separates_reasoning_and_calls_from_the_answer(engine: BatchInferenceEngine) -> None:
    scripted(engine)
    (result,) = engine.map([HELLO], SHORT)
    assert isinstance(result.completion, ChatCompletion)
    assert result.completion.reasoning == "Let me think."
    assert result.completion.tool_calls[0].name == "weather"


def test_map_shows_progress_on_stderr_on_request(
    engine: BatchInferenceEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    list(engine.map([[1, 2], [3], [64]], SHORT))  # the last one is refused
    assert capsys.readouterr().err == ""
    list(engine.map([[1, 2], [3], [64]], SHORT, progress=True))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "left:" in shown
    list(engine.map(iter([[1, 2]]), SHORT, progress=True))
    assert "1/?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "stop", "finish_reason", "has_cut_call"),
    [
        ('<tool_call>\n{"name": "ping", "arguments": {"a": ', "b", "stop", True),
        ('<tool_call>\n{"name": "ping", "arguments": ', "{", "stop", True),
        ('<tool_call>\n{"name": "ping", "arguments": {"a": 1}}\n', "</tool_call>", "tool_calls", False),
        ('<tool_call>\n{"name": "ping", "arguments": {"a": 1}}\n</tool_call>', None, "tool_calls", False),
        ("Well", ",", "stop", False),
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_executed(
    text: str, stop: str | None, finish_reason: str, has_cut_call: bool
) -> None:
    output = AssistantOutput(turn("hermes"))
    output.read(GenerationEvent(request_id="r", text=text, finish_reason=FinishReason.STOP, stop=stop))
    assert (output.finish_reason, output.has_cut_call) == (finish_reason, has_cut_call)
