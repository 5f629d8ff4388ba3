"""Engines over the tiny models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from tests.native_engines import SETTINGS, OpenEngine, assert_everything_is_free


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Opens engines; at the end each must have given every cell and seq_id back."""
    with contextlib.ExitStack() as stack:

        def open_engine(path: Path, **settings: Any) -> BatchInferenceEngine:
            engine = stack.enter_context(BatchInferenceEngine(path, **{**SETTINGS, **settings}))
            stack.callback(assert_everything_is_free, engine)
            return engine

        yield open_engine
