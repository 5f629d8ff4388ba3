"""How far one sequence can take over what another has computed: tried out, not believed."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from cppbatch.config import Sharing
from cppbatch.errors import LlamaError
from cppbatch.llama.context import Context
from cppbatch.llama.llama_batch import Batch

log = logging.getLogger("cppbatch.llama")

_N, _TAKEN = 8, 5  # tokens of the trial, and how many of them are taken over
_MOST_DIFFERENCE = 0.1  # of the logits' spread; the order of sums moves them far less, a wrong prefix far more


def probe_prefix_sharing(context: Context) -> Sharing:
    """The kind of sharing that an empty context allows; it is empty again afterwards.

    Recurrent and hybrid models and those with a sliding window have no part of a sequence that could be kept alone.
    What should work is tried with a few tokens: a kind of memory that behaves otherwise gets "whole" or "none", never a
    wrong text.
    """
    if context.n_ctx_seq <= _N:
        return "none"
    exact_only = context.model.is_recurrent or context.model.n_swa > 0
    kinds: list[Sharing] = ["whole"] if exact_only else ["cells" if context.kv_unified else "copy", "whole"]
    for kind in kinds:
        if _works(context, kind):
            return kind
        log.warning("this model's memory cannot share prefixes (kind %r): the trial gave other logits", kind)
    return "none"


def _works(context: Context, kind: Sharing) -> bool:
    shelf, target = context.n_seq_ids - 1, context.n_seq_max - 1  # with only one seq_id, it gets its own state back
    tokens = np.linspace(1, context.model.vocab.n_tokens - 1, _N).astype(np.int32)
    try:
        expected = _continue(context, tokens, 0, 0)
        if kind == "whole":
            context.remove(0)
            _continue(context, tokens[:_TAKEN], 0, 0)
        if kind == "cells":
            context.copy(0, shelf, 0, _TAKEN)
            context.remove(0)
            context.copy(shelf, target, 0, _TAKEN)
        else:
            context.restore_sequence(target, context.save_sequence(0))
        if kind == "copy" and not context.remove(target, _TAKEN):
            return False
        got = _continue(context, tokens[_TAKEN:], _TAKEN, target)
        return bool(np.abs(got - expected).max() <= _MOST_DIFFERENCE * np.ptp(expected))
    except LlamaError as error:
        log.info("sharing by %s: %s", kind, error)
        return False
    finally:
        context.clear()


def _continue(context: Context, tokens: npt.NDArray[np.int32], position: int, seq_id: int) -> npt.NDArray[np.float32]:
    """The logits after the last of these tokens."""
    batch = Batch(1)
    for i, token in enumerate(tokens, position):
        batch.clear()
        batch.add_rows([int(token)], [i], [seq_id])
        context.decode(batch)
    row: npt.NDArray[np.float32] = context.logits(1)[0].copy()
    return row
