"""Requests' own Python functions over their logits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sequence import Seq

log = logging.getLogger("cppbatch.engine")

Rows = npt.NDArray[np.float32]


def run_processors(sequences: list[Seq], logits: Rows) -> dict[int, str]:
    """Lets each `logits_processor` change its rows, in place. What went wrong, by the number of the row.

    Whatever a processor raises ends the requests that have it, and no other.
    """
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.params.logits_processor is not None:
            groups.setdefault(id(sequence.params.logits_processor), []).append(i)
    errors: dict[int, str] = {}
    for rows in groups.values():
        processor = sequences[rows[0]].params.logits_processor
        batches = [rows] if hasattr(processor, "process_rows") else [[i] for i in rows]
        for batch in batches:
            try:
                _process(processor, sequences, logits, batch)
            except Exception as error:
                log.warning("a logits_processor failed", exc_info=error)
                errors |= dict.fromkeys(batch, f"logits_processor raised {type(error).__name__}: {error}")
    return errors


def _process(processor: Any, sequences: list[Seq], logits: Rows, batch: list[int]) -> None:
    known = [sequences[i].tokens[: sequences[i].n_tokens].copy() for i in batch]
    rows = [logits[i] for i in batch]
    if hasattr(processor, "process_rows"):
        results = processor.process_rows(known, rows)
        results = [None] * len(batch) if results is None else list(results)
        if len(results) != len(batch):
            raise ValueError(f"process_rows returned {len(results)} rows for {len(batch)}")
    else:
        results = [processor(known[0], rows[0])]
    # Copies first: what is returned may be views of these rows.
    changed = [None if result is None else np.array(result, np.float32) for result in results]
    for row, new in zip(rows, changed, strict=True):
        if new is None:
            continue
        if new.shape != row.shape:
            raise ValueError(f"it returned an array of the shape {new.shape}; a row has {row.shape}")
        row[:] = new
