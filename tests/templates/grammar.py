"""Random texts that the grammars of demanded calls, and of those of free will, let through, for every template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cppbatch.chat.call_form import KEY
from cppbatch.chat.chat_format import ChatFormat, ChatTurn
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from tests.templates.round_trip import QUESTION
from tests.unit.test_chat_grammar import FUNCTIONS, check, make_vocabulary, random_text_of
from tests.unit.test_lazy_grammar import writer_of


def sample_calls(files: Sequence[Path], n: int) -> bool:
    """Whether all texts are parsed as calls with arguments that match their schemas."""
    n_faults = n_lazy = 0
    for file in files:
        template = ChatTemplate(file.read_text("utf-8"), bos="", eos="")
        vocabulary = make_vocabulary(ChatFormat(template).markers)
        tags, calls = ChatFormat(template).reasoning_tags, template.form.calls
        keys = [key for each in FUNCTIONS for key in each["function"]["parameters"].get("properties", {})]
        ends = [tags.end] if tags else []
        ends += [calls.value_close.replace(KEY, key) for key in keys] if calls and calls.key_open else []
        for seed in range(n):
            form = ChatFormat(template, vocabulary[0].ids if seed % 2 else {})
            function = FUNCTIONS[seed % len(FUNCTIONS)]
            choice = ToolChoice(mode="required", name=function["function"]["name"], parallel=False)
            try:
                its = form.render(ChatTurn([QUESTION], tools=FUNCTIONS, choice=choice))
            except InvalidRequest as error:
                print(f"{file.stem}: {error}")
                n_faults += 1
                break
            text = ""
            try:
                text = random_text_of(vocabulary, its.params["grammar"], seed, longest=20_000, more_ends=ends)
                assert check(its, text) == 1, text
                its = form.render(ChatTurn([QUESTION], tools=[function], choice=ToolChoice(mode="auto")))
                if lazy := its.params.get("lazy_grammar"):
                    n_lazy += seed < 2
                    new = writer_of(vocabulary, lazy)
                    new.write(*([lazy.thought[1]] if lazy.in_thought else []), lazy.start)
                    new.write_calls(seed, more_ends=ends)
                    text = new.text
                    assert check(its, text) >= 1, text
            except AssertionError as error:
                print(f"{file.stem}: seed {seed}: {error!s:.300} {text[-200:]!r}")
                n_faults += 1
                break
    print(f"{n_lazy} templates have a grammar that starts at the marker of a call of free will")
    print(f"{n_faults} of {len(files)} templates let something through that is not read as a valid call")
    return not n_faults
