"""Which family a model belongs to, by its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable

from cppbatch.chat.family import Family
from cppbatch.chat.gemma4 import Gemma4
from cppbatch.chat.generic import Generic
from cppbatch.chat.harmony import Harmony
from cppbatch.chat.hermes import Hermes
from cppbatch.chat.llama3 import Llama3
from cppbatch.chat.mistral import Mistral
from cppbatch.chat.qwen_xml import QwenXml
from cppbatch.chat.template import ChatTemplate

_HERMES = re.compile(r"<tool_call>(\\n|\s|['\"~+{}-]|\\)*name\b")
_LLAMA3 = re.compile(r"""'\{"name": "' \+.*"parameters": '""", re.DOTALL)


def family_of(template: ChatTemplate) -> Family:
    """The family whose calls the template writes; `Generic` for those that are not known, and for templates that take
    no tools.
    """
    source = template.source
    if all(marker in source for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return Harmony()
    if not template.takes.tools:
        return Generic()
    tests: list[tuple[bool, Callable[[], Family]]] = [
        ("<|tool_call>call:" in source, Gemma4),
        ("[TOOL_CALLS]" in source, lambda: Mistral(source)),
        (_has_xml(source, "tool_call"), lambda: QwenXml("tool_call")),
        (_has_xml(source, "seed:tool_call"), lambda: QwenXml("seed:tool_call")),
        (bool(_HERMES.search(source)), Hermes),
        (bool(_LLAMA3.search(source)), Llama3),
    ]
    return next((make() for fits, make in tests if fits), Generic())


def _has_xml(source: str, tag: str) -> bool:
    return all(marker in source for marker in (f"<{tag}>", "<function=", "<parameter="))
