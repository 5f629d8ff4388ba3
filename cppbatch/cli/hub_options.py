"""The meaning of -hf, -hff and --mmproj-auto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


def hub_name(repository: str | None, file: str | None) -> str | None:
    """The name of the model given by -hf and -hff; None: neither is given."""
    if file and not repository:
        raise click.UsageError(f"-hff {file} requires -hf OWNER/REPO")
    if not repository:
        return None
    from cppbatch.models.hub import hub_model

    name = f"{repository.partition(':')[0]}:{file}" if file else repository
    if hub_model(name) is None:
        raise click.BadParameter(f"{repository!r} is not OWNER/REPO or OWNER/REPO:TYPE", param_hint="-hf")
    return name


def may_see(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether to load the projector from the model's hub repository, given these engine settings."""
    from cppbatch.models.hub import hub_model

    is_text_only = settings.get("pooling") or settings.get("deterministic")
    if not hub_model(name) or settings["mmproj"] or is_text_only:
        return False
    from cppbatch.llama.media_encoder import has_mtmd  # loads llama.cpp's library

    return has_mtmd()
