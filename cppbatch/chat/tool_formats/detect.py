"""The tool-call format of a chat template: learned, or one of those that no description says."""

from __future__ import annotations

from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.template_form import NAME, CallForm
from cppbatch.chat.tool_formats.gemma4 import Gemma4Format
from cppbatch.chat.tool_formats.generic import GenericFormat
from cppbatch.chat.tool_formats.harmony import HarmonyFormat
from cppbatch.chat.tool_formats.learned import LearnedFormat
from cppbatch.chat.tool_formats.llama3 import Llama3Format
from cppbatch.chat.tool_formats.pythonic import OF_TEMPLATES, PythonicFormat
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

_TOLD = {
    "<|tool_call|> followed by a JSON list": CallForm(
        begin="<|tool_call|>[", open="", head=f'{{"name": "{NAME}", "arguments": ', tail="}", close="", separator=", ",
        end="]", is_json=True,
    ),
}  # fmt: skip
"""The words with which templates tell the model its form, where they render no calls: Granite 3."""


def detect_tool_format(template: ChatTemplate) -> ToolCallFormat:
    """Returns the format of the calls that the template renders, `GenericFormat` if it renders none."""
    source, has_tools = template.source, template.capabilities.tools
    if all(marker in source for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return HarmonyFormat()
    if has_tools and "<|tool_call>call:" in source:
        return Gemma4Format()
    if has_tools and any(mark in source for mark in OF_TEMPLATES):
        return PythonicFormat()
    form = template.form.calls or next((form for words, form in _TOLD.items() if words in source), None)
    learned = LearnedFormat(form) if form else None
    if learned and learned.start_markers:
        return learned
    if form and has_tools:
        return Llama3Format("parameters" if "parameters" in form.head else "arguments")
    return GenericFormat()
