"""The known chat templates write their documented formats."""

from __future__ import annotations

import pytest

from cppbatch.chat.template import builtin_names, find_template
from tests.support.conversations import (
    template_of,
)  # fmt: skip

TURNS = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]

_IM, _HEAD = "<|im_start|>", "<|start_header_id|>"

FORMATS = {
    "chatml": f"{_IM}system\nS<|im_end|>\n{_IM}user\nA<|im_end|>\n{_IM}assistant\nB<|im_end|>\n"
    f"{_IM}user\nC<|im_end|>\n{_IM}assistant\n",
    "gemma": "<start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]",
    "llama3": f"{_HEAD}system<|end_header_id|>\n\nS<|eot_id|>{_HEAD}user<|end_header_id|>\n\nA<|eot_id|>"
    f"{_HEAD}assistant<|end_header_id|>\n\nB<|eot_id|>{_HEAD}user<|end_header_id|>\n\nC<|eot_id|>"
    f"{_HEAD}assistant<|end_header_id|>\n\n",
    "mistral": "[INST] S\n\nA [/INST] B</s>[INST] C [/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nA</s>\n<|assistant|>\nB</s>\n<|user|>\nC</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_known_name_writes_its_documented_format(name: str) -> None:
    template, expected = template_of(find_template(name)), FORMATS[name]
    messages = [{"role": role, "content": content} for role, content in TURNS]
    assert template.render(messages) == expected
    assert template.render(messages[:3], continue_final_message=True) == expected[: expected.index("B") + 1]
    assert template.capabilities.system


def test_the_known_names_are_those_tested_here() -> None:
    assert builtin_names() == list(FORMATS)
    assert template_of(None).source == find_template("chatml")
