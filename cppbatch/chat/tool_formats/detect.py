"""Detecting a model's tool-call format from its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable

from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tool_formats.gemma4 import Gemma4Format
from cppbatch.chat.tool_formats.generic import GenericFormat
from cppbatch.chat.tool_formats.harmony import HarmonyFormat
from cppbatch.chat.tool_formats.hermes_qwen import HermesFormat, QwenXmlFormat
from cppbatch.chat.tool_formats.llama3 import Llama3Format
from cppbatch.chat.tool_formats.mistral import MistralFormat
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat

_HERMES = re.compile(r"<tool_call>(\\n|\s|['\"~+{}-]|\\)*name\b")
_LLAMA3 = re.compile(r"""'\{"name": "' \+.*"parameters": '""", re.DOTALL)


def detect_tool_format(template: ChatTemplate) -> ToolCallFormat:
    """Returns the format of the calls that the template renders.

    `GenericFormat` for unknown formats, and for templates that do not render tools.
    """
    source = template.source
    if all(marker in source for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return HarmonyFormat()
    if not template.capabilities.tools:
        return GenericFormat()
    formats: list[tuple[bool, Callable[[], ToolCallFormat]]] = [
        ("<|tool_call>call:" in source, Gemma4Format),
        ("[TOOL_CALLS]" in source, lambda: MistralFormat(source)),
        (_has_xml(source, "tool_call"), lambda: QwenXmlFormat("tool_call")),
        (_has_xml(source, "seed:tool_call"), lambda: QwenXmlFormat("seed:tool_call")),
        (bool(_HERMES.search(source)), HermesFormat),
        (bool(_LLAMA3.search(source)), Llama3Format),
    ]
    return next((make() for fits, make in formats if fits), GenericFormat())


def _has_xml(source: str, tag: str) -> bool:
    return all(marker in source for marker in (f"<{tag}>", "<function=", "<parameter="))
