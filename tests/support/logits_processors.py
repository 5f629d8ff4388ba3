"""Logits processors, good and bad, and helpers to check their effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch import BatchInferenceEngine, Completion
from tests.support.fakes import context_of

Tokens = npt.NDArray[np.int32]
Row = npt.NDArray[np.float32]
PROMPTS = [[i, 2 * i, 7] for i in range(1, 9)]


class Together:
    """One function for each row, called for all rows of a step; `answer` of their results is returned."""

    def __init__(self, of_row: Callable[[Tokens, Row], Any], answer: Callable[[list[Any]], Any] = lambda rows: rows):
        self._of_row, self._answer = of_row, answer

    def process_rows(self, tokens: list[Tokens], rows: list[Row]) -> Any:
        return self._answer([self._of_row(*pair) for pair in zip(tokens, rows, strict=True)])


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def assert_all_is_free(engine: BatchInferenceEngine) -> None:
    assert not engine.has_work
    assert (engine.core.kv.n_used, engine.core.kv.n_free_ids, context_of(engine).n_used) == (
        0,
        engine.core.kv.n_seq_ids,
        0,
    )


def raise_it(_: Tokens, __: Row) -> None:
    raise KeyError("no such thing")


def fill_with_nan(_: Tokens, row: Row) -> None:
    row[:] = np.nan


def one_nan(_: Tokens, row: Row) -> None:
    row[17] = np.nan


def forbid_all(_: Tokens, row: Row) -> None:
    row[:] = -np.inf
