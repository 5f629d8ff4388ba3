"""Which family a model belongs to, by its chat template."""

from __future__ import annotations

from cppbatch.chat.family import Family
from cppbatch.chat.generic import Generic
from cppbatch.chat.template import ChatTemplate


def family_of(template: ChatTemplate) -> Family:
    """The family whose calls the template writes; `Generic` for those that are not known."""
    if not template.takes_tools:
        return Generic()
    return Generic()
