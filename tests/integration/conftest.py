"""Engines over the tiny models, and the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.cli import main
from tests.support.native_engines import SETTINGS, OpenEngine, assert_everything_is_free


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Opens engines; at the end each must have given every cell and seq_id back."""
    with contextlib.ExitStack() as stack:

        def open_engine(path: Path, **settings: Any) -> BatchInferenceEngine:
            engine = stack.enter_context(BatchInferenceEngine(path, **{**SETTINGS, **settings}))
            stack.callback(assert_everything_is_free, engine)
            return engine

        yield open_engine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cppbatch", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run
