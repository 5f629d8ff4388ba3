"""In-place changes to rows of logits: the request's `logits_processor`, bans, biases, penalties."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sequence import Seq

log = logging.getLogger("cppbatch.engine")
Logits = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer[Any]]


def run_logits_processors(sequences: list[Seq], logits: Logits) -> dict[int, str]:
    """Calls each request's `logits_processor` on its row of float32[len(sequences), n_vocab].

    An object with `process_rows` is called once for all its rows. Returns error messages by row number: an exception
    only ends the requests that share the failing call.
    """
    rows_by_processor: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.params.logits_processor is not None:
            rows_by_processor.setdefault(id(sequence.params.logits_processor), []).append(i)
    errors: dict[int, str] = {}
    for rows in rows_by_processor.values():
        processor = sequences[rows[0]].params.logits_processor
        calls = [rows] if hasattr(processor, "process_rows") else [[i] for i in rows]
        for call in calls:
            try:
                _run_processor(processor, sequences, logits, call)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit, which would end the step of all requests
                log.warning("a logits_processor failed", exc_info=error)
                errors |= dict.fromkeys(call, f"logits_processor raised {type(error).__name__}: {error}")
    return errors


def _run_processor(processor: Any, sequences: list[Seq], logits: Logits, numbers: list[int]) -> None:
    """One call of a processor, with copies of the sequences' tokens and views of their rows."""
    tokens = [sequences[i].text_tokens(0).copy() for i in numbers]
    rows = [logits[i] for i in numbers]
    if hasattr(processor, "process_rows"):
        results = processor.process_rows(tokens, rows)
        results = [None] * len(numbers) if results is None else list(results)
        if len(results) != len(numbers):
            raise ValueError(f"process_rows returned {len(results)} rows instead of {len(numbers)}")
    else:
        results = [processor(tokens[0], rows[0])]
    # All results are copied before any row is written: a result may be a view of another row.
    changed = [None if result is None else np.array(result, np.float32) for result in results]
    for row, new in zip(rows, changed, strict=True):
        if new is None:
            continue
        if new.shape != row.shape:
            raise ValueError(f"it returned an array of shape {new.shape}; a row has shape {row.shape}")
        row[:] = new


def apply_bans_and_biases(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """Adds the plan's biases and sets banned tokens to -inf.

    `ids`: the token ids of the row's columns, ascending; None: the row is the whole vocabulary.
    """
    plan = sequence.sampling
    if plan.bias_ids.size:
        columns, found = _columns(plan.bias_ids, ids)
        row[columns] += plan.bias[found]
    if plan.banned_ids.size:
        row[_columns(plan.banned_ids, ids)[0]] = -np.inf
    if plan.min_tokens_ids.size and sequence.n_generated < sequence.params.min_tokens:
        row[_columns(plan.min_tokens_ids, ids)[0]] = -np.inf


def apply_penalties(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """Applies repetition, frequency and presence penalties to the logits of recent tokens, as llama.cpp does.

    (The repetition penalty is that of arXiv:1909.05858, but negative logits are multiplied.) `ids` as above.
    """
    params = sequence.params
    tokens, counts = np.unique(recent_tokens(sequence, params.penalty_last_n), return_counts=True)
    columns, found = _columns(tokens, ids)
    values, counts = row[columns], counts[found]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values <= 0, values * repetition, values / repetition)
    row[columns] = values - (counts * params.frequency_penalty + params.presence_penalty)


def _columns(tokens: Ids, ids: Ids | None) -> tuple[Ids, Ids | slice]:
    """The columns of these tokens in a row of `ids`, and the indices of the tokens that the row contains."""
    if ids is None:
        return tokens, slice(None)
    columns = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    found = np.flatnonzero(ids[columns] == tokens)
    return columns[found], found


def recent_tokens(sequence: Seq, last_n: int) -> npt.NDArray[np.int32]:
    """The text among the last `last_n` tokens, int32[n], prompt included; see `first_recent`."""
    return sequence.text_tokens(first_recent(sequence, last_n))


def first_recent(sequence: Seq, last_n: int) -> int:
    """The index of the first of the last `last_n` tokens; -1: of all, limited to the context."""
    most = len(sequence.tokens) if last_n < 0 else last_n
    return max(0 if sequence.params.penalize_prompt else sequence.n_prompt, sequence.n_text - most)


def penalty_window(params: SamplingParams) -> int:
    """The maximum number of recent tokens used by any sampler of the request; -1: all."""
    windows = [params.penalty_last_n, params.dry_penalty_last_n]
    return -1 if -1 in windows else max(windows)
