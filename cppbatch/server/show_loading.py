"""The progress of loading a model, and how it is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

ShowLoading = Callable[[Callable[[], float]], contextlib.AbstractContextManager[None]]
"""Shows the progress until the context ends. Its argument returns how much is loaded, 0.0 to 1.0."""


def hide_loading(_fraction: Callable[[], float]) -> contextlib.AbstractContextManager[None]:
    """Shows nothing."""
    return contextlib.nullcontext()
