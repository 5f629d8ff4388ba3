"""A model's text becomes a message while it streams: thoughts, text and calls, the same however it is split."""

from __future__ import annotations

import json
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.chat.output_parser import ArgumentsDelta, ReasoningDelta, TextDelta, ToolCallStart
from tests.support.chat_families import QUESTION, TEMPLATES, WEATHER, calls_of, chat_format, message, pieces, turn
from tests.support.randomised import cases

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": 'R"o}m\ne', "days": 3})
PING: tuple[str, dict[str, Any]] = ("ping", {})
SET = ("set", {"options": {"a": [1, "x", None], "b": {}}, "on": True, "note": "null and void"})

PARIS_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ROME_JSON = r'{"name": "get_weather", "arguments": {"city": "R\"o}m\ne", "days": 3}}'
SET_JSON = json.dumps({"name": SET[0], "arguments": SET[1]})


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def xml(name: str, *arguments: tuple[str, str], tag: str = "tool_call") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<{tag}>\n<function={name}>\n{inner}</function>\n</{tag}>"


def lfm2(calls: str) -> str:
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


XML_PARIS = xml("get_weather", ("city", "Paris"))
XML_SET = xml("set", ("options", '{"a": [1, "x", null], "b": {}}'), ("on", "True"), ("note", "null and void"))
GEMMA_PARIS = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
GEMMA_SET = (
    '<|tool_call>call:set{note:<|"|>null and void<|"|>,on:true,options:{a:[1,<|"|>x<|"|>,None],b:{}}}<tool_call|>'
)
TO_PARIS = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_PARIS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'

# What the model writes, and what it means: text, thought, calls.
CASES: dict[str, tuple[str, str, str, str, list[Any]]] = {
    "a call": ("hermes", hermes(PARIS_JSON), "", "", [PARIS]),
    "two calls": ("hermes", hermes(ROME_JSON, SET_JSON), "", "", [ROME, SET]),
    "text before": ("hermes", "Let me see.\n\n" + hermes(PARIS_JSON), "Let me see.", "", [PARIS]),
    "text behind": ("hermes", hermes(PARIS_JSON) + "\n\nThere.\n", "There.\n", "", [PARIS]),
    "a thought before": ("hermes", "<think>\nHm.\n\nOh.\n</think>\n\n" + hermes(PARIS_JSON), "", "Hm.\n\nOh.", [PARIS]),
    "a thought and text": ("hermes", "\n<think>Hm.</think>\n\nHello <think>\n", "Hello <think>\n", "Hm.", []),
    "an empty thought": ("hermes", "<think>\n\n</think>\n\nHello", "Hello", "", []),
    "a call in a thought": ("hermes", f"<think>{hermes(PARIS_JSON)}", "", hermes(PARIS_JSON), []),
    "keys in another order": (
        "hermes", hermes('{"id": 7, "arguments": {"city": "Paris"}, "name": "get_weather"}'), "", "", [PARIS],
    ),
    "other keys": (
        "hermes", hermes('{"type":"function","name":"ping", "x": [{}, "]"], "parameters" : {}, "y": 1e5}'), "", "",
        [PING],
    ),
    "arguments as a string": (
        "hermes", hermes('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'), "", "", [PARIS],
    ),
    "no arguments": ("hermes", hermes('{"name": "ping"}', '{"name": "ping", "arguments": null}'), "", "", [PING, PING]),
    "a function within": (
        "hermes", hermes('{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}'), "", "", [PARIS],
    ),
    "a list in the tags": ("hermes", hermes(f"[{PARIS_JSON}, {ROME_JSON}]"), "", "", [PARIS, ROME]),
    "a tool that is not there": ("hermes", hermes('{"name": "other", "arguments": {}}'), "", "", [("other", {})]),
    "a brace forgotten": ("hermes", hermes(PARIS_JSON[:-1]) + "\nThere.", "There.", "", [PARIS]),
    "no closing tag": ("hermes", "<tool_call>\n" + PARIS_JSON, "", "", [PARIS]),
    "no JSON": ("hermes", "So:\n<tool_call>\nget_weather(Paris)\n</tool_call>\n", "", "", []),
    "JSON without a name": ("hermes", hermes('{"arguments": {"city": "Paris"}}'), "", "", []),
    "a name that is none": ("hermes", hermes('{"name": 5, "arguments": {}}'), "", "", []),
    "arguments that are none": ("hermes", hermes('{"arguments": [1], "name": "ping"}'), "", "", []),
    "a bad call before a good one": (
        "hermes", "<tool_call>no</tool_call>" + hermes(PARIS_JSON), "<tool_call>no</tool_call>", "", [PARIS],
    ),
    "a good call in a bad one": (
        "hermes", '<tool_call>{"arguments": "' + hermes(PARIS_JSON), '<tool_call>{"arguments": "', "", [PARIS],
    ),
    "cut before the name": ("hermes", 'Hm. <tool_call>\n{"name": "get_wea', "", "", []),
    "cut in the tag": ("hermes", "Hm. <tool_c", "", "", []),
    "no call at all": ("hermes", "a < b, <tool> and </tool_call>\n ", "", "", []),
    "XML": ("qwen_xml", XML_PARIS, "", "", [PARIS]),
    "two calls in XML": ("qwen_xml", XML_PARIS + "\n" + XML_SET, "", "", [PARIS, SET]),
    "text and XML": ("qwen_xml", "I look.\n" + XML_SET, "I look.", "", [SET]),
    "XML with lines": (
        "qwen_xml", xml("get_weather", ("city", 'R"o}m\ne'), ("days", "3")), "", "", [ROME],
    ),
    "XML without arguments": ("qwen_xml", xml("ping"), "", "", [PING]),
    "XML without the outer tag": ("qwen_xml", XML_PARIS.removeprefix("<tool_call>\n"), "", "", [PARIS]),
    "XML on one line": (
        "qwen_xml", "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>", "", "",
        [PARIS],
    ),
    "two functions in a tag": (
        "qwen_xml", xml("ping").replace("</tool_call>", "") + xml("ping").replace("<tool_call>\n", ""), "", "",
        [PING, PING],
    ),
    "a string with tags": (
        "qwen_xml", xml("get_weather", ("city", "<b></function>\n\n</parameter")), "", "",
        [("get_weather", {"city": "<b></function>\n\n</parameter"})],
    ),
    "a number that is none": (
        "qwen_xml", xml("get_weather", ("city", "5"), ("days", "two")), "", "",
        [("get_weather", {"city": "5", "days": "two"})],
    ),
    "null": (
        "qwen_xml", xml("set", ("options", "{'a': True}"), ("on", "False"), ("note", "null")), "", "",
        [("set", {"options": {"a": True}, "on": False, "note": None})],
    ),
    "JSON in Qwen's tags": ("qwen_xml", hermes(PARIS_JSON), "", "", [PARIS]),
    "XML of a tool that is not there": ("qwen_xml", xml("other", ("a", "[1]")), "", "", [("other", {"a": [1]})]),
    "XML that is none": ("qwen_xml", "<tool_call>\n<function>get</function>\n</tool_call>", "", "", []),
    "XML cut in the name": ("qwen_xml", "<tool_call>\n<function=get_wea", "", "", []),
    "Seed's tags": (
        "seed", XML_SET.replace("tool_call", "seed:tool_call").replace(">\n", ">").replace("\n</p", "</p"), "", "",
        [SET],
    ),
    "Llama's JSON": ("llama3", PARIS_JSON.replace("arguments", "parameters"), "", "", [PARIS]),
    "Llama's JSONs": ("llama3", f"{PARIS_JSON}; {ROME_JSON}\n{SET_JSON}", "", "", [PARIS, ROME, SET]),
    "Llama's tag": ("llama3", "<|python_tag|>" + PARIS_JSON, "", "", [PARIS]),
    "Llama's built-in tools": (
        "llama3", r'<|python_tag|>get_weather.call(city="R\"o}m\ne", days=3)', "", "", [ROME],
    ),
    "Llama's tag and many spaces": ("llama3", f"<|python_tag|>ping.call(a={' ' * 3000}\")", "", "", []),
    "Llama's words": (
        "llama3", "<|python_tag|>get_weather.call(city= Rome , days=3)", "", "",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
    "text before Llama's tag": ("llama3", "I look. <|python_tag|>ping.call()", "I look.", "", [PING]),
    "Llama's program": ("llama3", "<|python_tag|>print(1)", "", "", []),
    "JSON of no tool": ("llama3", ' {"name": "other", "parameters": {"a": 1}}', "", "", []),
    "JSON": ("llama3", '{"a": [1, 2]} ', "", "", []),
    "JSON behind a call": ("llama3", PARIS_JSON + '\n{"name": "other"}', '{"name": "other"}', "", [PARIS]),
    "JSON in text": ("llama3", f"It is {PARIS_JSON}", "", "", []),
    "a list that is none": ("llama3", "[1] See there.", "", "", []),
    "Nemo's list": ("nemo", f"[TOOL_CALLS][{PARIS_JSON[:-1]}, \"id\": \"abcdefghi\"}}]", "", "", [PARIS]),
    "two in Nemo's list": ("nemo", f"Hm.[TOOL_CALLS] [{PARIS_JSON},{SET_JSON}]", "Hm.", "", [PARIS, SET]),
    "Mistral's name": ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", "", [PARIS]),
    "Mistral's names": (
        "mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}[TOOL_CALLS]ping{}', "", "",
        [PARIS, PING],
    ),
    "Mistral's prose": ("mistral", "[TOOL_CALLS]I do not know", "", "", []),
    "Mistral's name, cut": ("mistral", "Hm.\n[TOOL_CALLS]get_weather[AR", "", "", []),
    "Gemma's": ("gemma4", GEMMA_PARIS, "", "", [PARIS]),
    "two of Gemma's": ("gemma4", "I look.\n" + GEMMA_SET + GEMMA_PARIS, "I look.", "", [SET, PARIS]),
    "Gemma's thought": ("gemma4", "<|channel>thought\nHm.\n<channel|>" + GEMMA_PARIS, "", "Hm.", [PARIS]),
    "Gemma's JSON": (
        "gemma4", '<|tool_call>call:get_weather{"city": "R\\"o}m\\ne", <|"|>days<|"|>: 3}<tool_call|>', "", "", [ROME],
    ),
    "Gemma without quotes": ("gemma4", "<|tool_call>call:get_weather{city: Paris}<tool_call|>", "", "", [PARIS]),
    "Gemma without arguments": ("gemma4", "<|tool_call>call:ping{}<tool_call|>\n", "", "", [PING]),
    "Gemma's, malformed": ("gemma4", "<|tool_call>ping()<tool_call|>", "", "", []),
    "an answer": ("harmony", "<|channel|>final<|message|>Hello <b>\n", "Hello <b>\n", "", []),
    "an answer after a thought": (
        "harmony", f"{HARMONY_THOUGHT}<|channel|>final<|message|>Hello<|return|>",
        "Hello", "Hm.", [],
    ),
    "a call after a thought": (
        "harmony", f"{HARMONY_THOUGHT}{HARMONY_PARIS}<|call|>", "", "Hm.", [PARIS],
    ),
    "the recipient first": ("harmony", TO_PARIS, "", "", [PARIS]),
    "an announcement": (
        "harmony", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_PARIS}", "I look.", "",
        [PARIS],
    ),
    "no argument": ("harmony", "<|channel|>commentary to=functions.ping<|message|><|call|>", "", "", [PING]),
    "two thoughts": (
        "harmony", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>", "",
        "A\n\nB", [],
    ),
    "no header": ("harmony", " to be or not <|end", " to be or not <|end", "", []),
    "a header that is cut": ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", "", "Hm.", []),
    "the generic form": ("generic", f'{{"tool_calls": [{PARIS_JSON}]}}', "", "", [PARIS]),
    "two of the generic form": (
        "generic", f'\n{{ "tool_calls" : [ {PARIS_JSON} , {ROME_JSON} ] }}\n', "", "", [PARIS, ROME],
    ),
    "the generic form, fenced": ("generic", f'```json\n{{"tool_calls": [{SET_JSON}]}}\n```\n', "", "", [SET]),
    "a call alone": ("generic", PARIS_JSON, "", "", [PARIS]),
    "a list alone": ("generic", f"[{PARIS_JSON},\n{ROME_JSON}] So.", "So.", "", [PARIS, ROME]),
    "the generic form of no tool": ("generic", '{"tool_calls": [{"name": "other", "arguments": {}}]}', "", "", []),
    "an empty list": ("generic", '{"tool_calls": []}', "", "", []),
    "some JSON": ("generic", '{"tool": "get_weather"}', "", "", []),
    "a program": ("generic", "```python\nprint({})\n```", "", "", []),
    "text": ("generic", "  Hello {} [] ``` <think>\n", "", "", []),
    "tags": (
        "tags", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", "", "",
        [PARIS],
    ),
    "half of a pair in a name": ("hermes", hermes(r'{"name": "\ud800", "arguments": {}}'), "", "", [("?", {})]),
    "half of a pair in a value": ("lfm2", lfm2(r'ping(a="\ud800")'), "", "", [("ping", {"a": "\ud800"})]),
    "Python": ("lfm2", lfm2("get_weather(city='Paris'), ping(), set(options={'a': [1, \"x\", None]})"), "", "", [
        PARIS, PING, ("set", {"options": {"a": [1, "x", None]}}),
    ]),
    "a set": ("lfm2", lfm2("ping(a={1, 2})"), "", "", []),
    "bytes": ("lfm2", lfm2("ping(a=[b'a'])"), "", "", []),
    "a key that is a tuple": ("lfm2", lfm2("ping(a={(1, 2): 3})"), "", "", []),
    "a key that is a list": ("lfm2", lfm2("ping(a={[1]: 2})"), "", "", []),
    "an unpacked set": ("lfm2", lfm2("ping(**{1})"), "", "", []),
    "not a number": ("lfm2", lfm2("ping(a=NaN)"), "", "", []),
    "infinity": ("lfm2", lfm2("ping(a=[1e999])"), "", "", []),
    "a call in Python's call": (
        "lfm2", "<|tool_call_start|>[ping(" + lfm2("ping()"), "<|tool_call_start|>[ping(", "", [PING],
    ),
    "the generic form, cut": ("generic", '{"tool_calls": [{"name": "get', "", "", []),
}  # fmt: skip


def test_a_family_is_recognised_by_its_template() -> None:
    known = {name: chat_format(name).tool_format.name for name in TEMPLATES}
    learned = {
        "hermes": "json", "nemo": "json", "mistral": "named", "numbered": "named", "qwen_xml": "tagged",
        "seed": "tagged", "tags": "tagged", "typed_tags": "tagged", "lfm2": "pythonic",
    }  # fmt: skip
    assert known == {name: learned.get(name, name) for name in TEMPLATES}


def expected(name: str) -> tuple[str, str, list[Any]]:
    _, written, text, thought, calls = CASES[name]
    return (text, thought, calls) if text or thought or calls else (written, "", [])  # else all of it is text


@pytest.mark.parametrize("name", CASES)
def test_model_output_is_parsed_the_same_whole_and_character_by_character(name: str) -> None:
    family, written, *_ = CASES[name]
    its = turn(family)
    whole = message(its, [written])
    assert (whole.text, whole.reasoning, calls_of(whole)) == expected(name)
    assert message(its, written) == whole


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_text_means_the_same_however_it_is_split(family: str, data: st.DataObject) -> None:
    its = turn(family, opened=data.draw(st.booleans()))
    markers = [*chat_format(family).markers, *(case[1] for case in CASES.values() if case[0] == family)]
    fragments = st.one_of(
        st.sampled_from([*markers, "{", "}", "\n", " ", '"', "call:", '"name"', "get_weather"]), st.text()
    )
    some = data.draw(st.lists(fragments, max_size=6))
    written = "".join(
        part[: data.draw(st.integers(0, len(part)))] if data.draw(st.booleans()) else part for part in some
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=8)))
    parts = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert message(its, parts) == message(its, [written]) == message(its, written)


def test_an_invalid_key_is_text_however_it_is_split() -> None:
    its, key = turn("tags"), "a</arg_key}>\n<arg_key>b</arg_key>\n<arg_key>c"
    written = f"<tool_call>ping<arg_key>{key}</arg_key><arg_value>1</arg_value></tool_call>"
    whole = message(its, [written])
    assert whole == message(its, written)
    assert whole.text == f"{key}</arg_key><arg_value>1</arg_value></tool_call>"


@given(st.lists(st.text(min_size=1), max_size=10))
def test_without_tools_and_thoughts_every_character_passes_at_once(parts: list[str]) -> None:
    for its in (turn("generic", tools=[]), turn("llama3", mode="none"), turn("nemo", tools=[])):
        reader = its.output_parser()
        for part in parts:
            assert reader.push(part) == [TextDelta(part)]
        assert reader.close() == []


@given(st.text(alphabet="ab <>{}/tcolink_\n"))
def test_text_without_calls_is_as_it_was_written(written: str) -> None:
    for family in ("hermes", "llama3", "nemo", "gemma4", "generic"):
        its = turn(family)
        assert message(its, written).text == written


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name][4]])
def test_without_a_call_no_character_is_lost(name: str) -> None:
    family, written, _, thought, _ = CASES[name]
    if not thought and family != "harmony" and "think" not in written:
        assert message(turn(family), written).text == written


def test_the_name_is_streamed_before_the_arguments_and_those_as_they_are_generated() -> None:
    for family, first, more in (
        ("hermes", '<tool_call>\n{"name": "get_weather"', ', "arguments": {"city": "Par'),
        ("qwen_xml", "<tool_call>\n<function=get_weather>", "\n<parameter=city>\nPar"),
        ("llama3", '{"name": "get_weather"', ', "parameters": {"city": "Par'),
        ("mistral", "[TOOL_CALLS]get_weather[ARGS]{", '"city": "Par'),
        ("gemma4", "<|tool_call>call:get_weather{", 'city:<|"|>Par'),
        ("harmony", HARMONY_PARIS[: HARMONY_PARIS.index("{")], '{"city": "Par'),
        ("generic", '{"tool_calls": [{"name": "get_weather"', ', "arguments": {"city": "Par'),
    ):
        reader = turn(family).output_parser()
        began = [piece for piece in reader.push(first) if isinstance(piece, ToolCallStart)]
        assert [(piece.index, piece.name) for piece in began] == [(0, "get_weather")], family
        told = reader.push(more)
        assert "Par" in "".join(piece.text for piece in told if isinstance(piece, ArgumentsDelta)), family
        assert reader.close() == [], family  # nothing that was sent changes


@cases(ring=2_000, nightly=5_000, soak=50_000)
@pytest.mark.parametrize("family", TEMPLATES)
def test_long_texts_are_read_in_time_that_grows_with_them(family: str, n_cases: int) -> None:
    """In the ring only what would not end. `n_cases`: letters."""
    opening = {"llama3": "{", "nemo": "[TOOL_CALLS]", "mistral": "[TOOL_CALLS]", "gemma4": "<|tool_call>call:f{"}
    begun = opening.get(family, "<tool_call>") + "x"
    for written in (begun * (n_cases // 10), '<tool_call>{"a": "' + "x" * n_cases, begun + "word " * (n_cases // 5)):
        its = turn(family)
        started = thread_time()
        assert message(its, written) == message(its, [written])
        assert thread_time() - started < 5


def test_ids_are_new_for_each_call_and_of_the_kind_that_the_family_wants() -> None:
    def ids(family: str, written: str) -> list[str]:
        return [piece.id for piece in pieces(turn(family), [written]) if isinstance(piece, ToolCallStart)]

    two = ids("hermes", hermes(PARIS_JSON, PARIS_JSON)) + ids("hermes", hermes(PARIS_JSON))
    assert len(set(two)) == 3
    assert all(name.startswith("call_") and len(name) == 29 and name[5:].isalnum() for name in two)
    (nine,) = ids("nemo", f"[TOOL_CALLS][{PARIS_JSON}]")
    assert len(nine) == 9
    assert nine.isalnum()
    assert ids("mistral", "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}") == ["abcdefghi"]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    "arguments", [PARIS[1], SET[1], {}, {"city": "<|im_end|> </tool_call> \\ \t 日本 🙂", "days": -1}]
)
def test_a_call_as_the_template_writes_it_is_read_back(family: str, arguments: dict[str, Any]) -> None:
    name = {0: "ping", 3: "set"}.get(len(arguments), "get_weather")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    form = chat_format(family)
    asked = turn(family)
    answered: list[dict[str, Any]] = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    if family in ("generic", "lfm2"):  # calls are part of the text that the template renders
        again = turn(family, messages=[*answered, {"role": "user", "content": "?"}]).prompt
        written = again.removeprefix(asked.prompt)
    else:
        tools = [WEATHER]
        before = form.template.render(QUESTION, tools=tools)
        written = form.template.render(answered, tools=tools, add_generation_prompt=False).removeprefix(before)
    whole = message(asked, written)
    assert calls_of(whole)[:1] == [(name, arguments)]
    assert whole.reasoning == ""


def test_a_thought_that_the_prompt_opened_is_read_from_the_first_letter() -> None:
    its = turn("hermes", opened=True)
    assert its.prompt.endswith("<think>\n")
    whole = message(its, "\nHm.\n\nWell.\n</think>\n\nHello\n")
    assert (whole.reasoning, whole.text) == ("Hm.\n\nWell.", "Hello\n")
    assert message(its, "Hm. </thi").reasoning == "Hm. </thi"
    assert pieces(its, ["Hm", ".", "\n"]) == [ReasoningDelta("Hm"), ReasoningDelta(".")]


def test_after_a_thought_that_the_prompt_closed_comes_the_answer() -> None:
    its = turn("hermes", quick=True)
    assert message(its, "Hello").text == "Hello"


def test_parts_of_a_continued_message_are_paragraphs_as_in_llama_server() -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    assert turn("hermes", messages=[*QUESTION, {"role": "assistant", "content": parts}]).prompt.endswith("Wh\n\nill")


@pytest.mark.parametrize(
    ("prefill", "written", "thought", "text"),
    [
        ("The answer is", " 42.\n", "", " 42.\n"),
        ("<think>\nHalf a", " thought.\n</think>\n\nYes.", " thought.", "Yes."),
        ("<think>\n", "\nAll of it.</think>Yes.", "All of it.", "Yes."),
        ("<think>Whole.</think>\n\nWell", ", yes.", "", ", yes."),
        ("What does <think> mean?</think>", " It", "", " It"),
    ],
)
def test_a_continued_message_is_parsed_from_its_current_state(
    prefill: str, written: str, thought: str, text: str
) -> None:
    its = turn("hermes", messages=[*QUESTION, {"role": "assistant", "content": prefill}])
    assert its.prompt.endswith(prefill)
    whole = message(its, written)
    assert (whole.reasoning, whole.text) == (thought, text)


def test_tags_in_the_conversation_start_no_thought() -> None:
    its = turn("hermes", messages=[{"role": "user", "content": "What does <think> mean?"}])
    assert message(its, "It opens a thought.").text == "It opens a thought."


def test_a_continued_channel_is_parsed_as_that_channel() -> None:
    half = [*QUESTION, {"role": "assistant", "content": "The answer"}]
    its = turn("harmony", messages=half)
    assert its.prompt.endswith("<|channel|>final<|message|>The answer")
    assert message(its, " is 42.<|return|>").text == " is 42."


ZIP: dict[str, Any] = {"Zip": {"type": "string"}, "Count": {"type": "integer"}}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"allOf": [{"$ref": "#/$defs/Zip"}], "description": "As pydantic 1 writes it."},
        "n": {"$ref": "#/$defs/Count"},
    },
}


@pytest.mark.parametrize(
    "parameters",
    [
        ARGUMENTS | {"$defs": ZIP},
        {"$ref": "#/$defs/Arguments", "$defs": ZIP | {"Arguments": ARGUMENTS}},
        {"allOf": [{"$ref": "#/$defs/Arguments"}], "$defs": ZIP | {"Arguments": ARGUMENTS}},
    ],
    ids=["allOf", "$ref", "allOf of a $ref"],
)
@pytest.mark.parametrize("tag", ["tool_call", "seed:tool_call"])
def test_a_value_without_quotes_has_the_type_that_a_reference_gives_it(tag: str, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "set", "parameters": parameters}}
    its = turn("qwen_xml" if tag == "tool_call" else "seed", tools=[tool])
    text = xml("set", ("zip", "5"), ("n", "7"), tag=tag)
    assert calls_of(message(its, [text])) == [("set", {"zip": "5", "n": 7})]
