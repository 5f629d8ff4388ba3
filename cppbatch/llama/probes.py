"""Probes of a loaded model: how sequences can share a prefix, and whether its device can sample."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cppbatch.child_processes import child_command
from cppbatch.config import Sharing
from cppbatch.errors import LlamaError, ModelError
from cppbatch.findings import finding_key, finding_path, read_finding, write_finding
from cppbatch.llama.backend import Backend
from cppbatch.llama.context import Context
from cppbatch.llama.library import library_path
from cppbatch.llama.llama_batch import Batch
from cppbatch.llama.selfcheck import find_crash
from cppbatch.models.find import model_parts

log = logging.getLogger("cppbatch.llama")

Tokens = npt.NDArray[np.int32]

_N_PROBE, _N_SHARED = 8, 5  # tokens of the probe, and the number of shared ones
_MAX_DIFFERENCE = 0.1  # of the range of the logits; rounding changes them far less, a wrong prefix far more


def expected_sharing(context: Context) -> Sharing:
    """The kind of sharing expected for this kind of memory: up to checkpoints for models with a sliding window and
    hybrid models; whole sequences for recurrent models."""
    if context.n_ctx_seq <= _N_PROBE:
        return "none"
    if context.model.is_recurrent or context.model.n_swa > 0:
        return "checkpoints" if context.model.has_cells else "whole"
    return "cells" if context.kv_unified else "copy"


def probe_prefix_sharing(context: Context) -> Sharing:
    """The kind of sharing that an empty context supports; the context is empty again afterwards.

    The expected kind is verified with a few tokens, so an unknown kind of memory results in "whole" or "none", never in
    wrong text. Raises `ModelError` if all logits are NaN.
    """
    kinds = dict.fromkeys((expected_sharing(context), "whole"))
    for kind in kinds if "none" not in kinds else ():
        if _works(context, kind):
            return kind
        log.warning("this model's memory cannot share prefixes (kind %r): the probe computed different logits", kind)
    return "none"


def find_prefix_sharing(context: Context, *settings: object) -> Sharing:
    """Returns the kind that `probe_prefix_sharing` finds. The expected kind is cached for a model's files, this
    library, its devices and the `repr` of these settings; any other is probed each time, with a warning."""
    devices = [(each.name, each.description) for each in Backend.get().devices()]
    shape = context.kv_unified, context.n_ctx_seq, context.n_seq_max, context.n_batch
    files = model_parts(context.model.path)
    path = finding_path("sharing", finding_key(Path(library_path()).parent, files, devices, shape, *settings))
    expected = expected_sharing(context)
    if read_finding(path, str) == expected:
        return expected
    found = probe_prefix_sharing(context)
    if found == expected:
        write_finding(path, found)
    return found


def _works(context: Context, kind: Sharing) -> bool:
    target = context.n_seq_max - 1
    tokens = np.linspace(1, context.model.vocab.n_tokens - 1, _N_PROBE).astype(np.int32)
    try:
        _continue(context, tokens[:_N_SHARED], 0, 0)
        expected = _continue(context, tokens[_N_SHARED:], _N_SHARED, 0)  # in the batches of below: rows change rounding
        if np.isnan(expected).all():
            raise ModelError(
                f"{context.model.path} cannot be used: all logits are NaN, because the file is damaged, or this build "
                "of llama.cpp or this device cannot compute it. Download it again, or use another file"
            )
        if not _TRIALS[kind](context, tokens, target):
            return False
        got = _continue(context, tokens[_N_SHARED:], _N_SHARED, target)
        return bool(np.abs(got - expected).max() <= _MAX_DIFFERENCE * np.ptp(expected))
    except LlamaError as error:
        log.info("sharing by %s: %s", kind, error)
        return False
    finally:
        context.clear()


def _share_cells(context: Context, _tokens: Tokens, target: int) -> bool:
    holder = context.n_seq_ids - 1  # the same seq_id as `target` if the context has only one
    context.copy(0, holder, 0, _N_SHARED)
    context.remove(0)
    context.copy(holder, target, 0, _N_SHARED)
    return True


def _copy(context: Context, _tokens: Tokens, target: int) -> bool:
    context.restore_sequence(target, context.save_sequence(0))
    return context.remove(target, _N_SHARED)


def _copy_whole(context: Context, tokens: Tokens, target: int) -> bool:
    context.remove(0)
    _continue(context, tokens[:_N_SHARED], 0, 0)
    context.restore_sequence(target, context.save_sequence(0))
    return True


def _restore_checkpoint(context: Context, tokens: Tokens, target: int) -> bool:
    context.remove(0)
    _continue(context, tokens[:_N_SHARED], 0, 0)
    part = context.save_part(0)
    _continue(context, tokens[_N_SHARED:][::-1], _N_SHARED, 0)  # different tokens, to be truncated
    if context.shares_cells and target:
        context.share_cells(0, target, part)
        context.remove(0)
    else:
        context.restore_sequence(target, context.save_sequence(0))
        context.restore_part(target, part)
    return True


_TRIALS: dict[Sharing, Callable[[Context, Tokens, int], bool]] = {
    "cells": _share_cells, "copy": _copy, "checkpoints": _restore_checkpoint, "whole": _copy_whole,
}  # fmt: skip
"""Give the sequence `target` the first `_N_SHARED` tokens of sequence 0. False: the memory cannot do it."""


def _continue(context: Context, tokens: Tokens, position: int, seq_id: int) -> npt.NDArray[np.float32]:
    """Decodes these tokens in as few batches as possible. Returns the logits of the last one, float32[n_vocab]."""
    batch, n = Batch(context.n_batch), len(tokens)
    for start in range(0, n, context.n_batch):
        piece = tokens[start : start + context.n_batch]
        batch.clear()
        batch.add_run(piece, position + start, seq_id, n_logits=int(start + len(piece) == n))
        context.decode(batch)
    row: npt.NDArray[np.float32] = context.logits(1)[0].copy()
    return row


# Tried in a child process with a tiny model: a driver may crash when it compiles the kernels.


def find_sampling_crash(
    n_vocab: int, device: int | None, names: Sequence[str], *, tries_again: bool = False
) -> str | None:
    """How llama.cpp crashes when it samples on these GPUs from a vocabulary of `n_vocab` tokens; None if it does not.

    `device`, `names`: the GPU by number, or devices by ggml's names. The answer is cached for this library and its
    devices; with `tries_again`, only if it does not crash.
    """
    devices = [(each.name, each.description) for each in Backend.get().devices()]
    verdict = finding_path("sampling", finding_key(Path(library_path()).parent, (), devices, n_vocab, device, names))
    arguments = (str(n_vocab), "" if device is None else str(device), *names)
    command = child_command("cppbatch.llama.sampling_child", *arguments)
    # a software driver compiles for a minute: 300 s are enough
    return find_crash("sampling on the GPU", verdict, command, 300, remembers=not tries_again)
