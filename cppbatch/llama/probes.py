"""Probes of a loaded model: how sequences can share a prefix, whether its device can sample, and whether logits depend
on the rest of the batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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

_N_PROBE, _N_SHARED = 8, 5  # tokens of the probe, and the number of shared ones
_SAMPLING_S = 300  # a driver made of software compiles for a minute
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
    holder, target = context.n_seq_ids - 1, context.n_seq_max - 1  # the same seq_id if the context has only one
    tokens = np.linspace(1, context.model.vocab.n_tokens - 1, _N_PROBE).astype(np.int32)
    try:
        _continue(context, tokens[:_N_SHARED], 0, 0)
        expected = _continue(context, tokens[_N_SHARED:], _N_SHARED, 0)  # in the batches of below: rows change rounding
        if np.isnan(expected).all():
            raise ModelError(
                f"{context.model.path} cannot be used: all logits are NaN, because the file is damaged, or this build "
                "of llama.cpp or this device cannot compute it. Download it again, or use another file"
            )
        if kind in ("whole", "checkpoints"):
            context.remove(0)
            _continue(context, tokens[:_N_SHARED], 0, 0)
        if kind == "cells":
            context.copy(0, holder, 0, _N_SHARED)
            context.remove(0)
            context.copy(holder, target, 0, _N_SHARED)
        elif kind == "checkpoints":
            part = context.save_part(0)
            _continue(context, tokens[_N_SHARED:][::-1], _N_SHARED, 0)  # different tokens, to be truncated
            if context.shares_cells and target:
                context.share_cells(0, target, part)
                context.remove(0)
            else:
                context.restore_sequence(target, context.save_sequence(0))
                context.restore_part(target, part)
        else:
            context.restore_sequence(target, context.save_sequence(0))
        if kind == "copy" and not context.remove(target, _N_SHARED):
            return False
        got = _continue(context, tokens[_N_SHARED:], _N_SHARED, target)
        return bool(np.abs(got - expected).max() <= _MAX_DIFFERENCE * np.ptp(expected))
    except LlamaError as error:
        log.info("sharing by %s: %s", kind, error)
        return False
    finally:
        context.clear()


def _continue(context: Context, tokens: npt.NDArray[np.int32], position: int, seq_id: int) -> npt.NDArray[np.float32]:
    """Decodes these tokens in as few batches as possible. Returns the logits of the last one, float32[n_vocab]."""
    batch, n = Batch(context.n_batch), len(tokens)
    for start in range(0, n, context.n_batch):
        piece = tokens[start : start + context.n_batch]
        batch.clear()
        batch.add_run(piece, position + start, seq_id, n_logits=int(start + len(piece) == n))
        context.decode(batch)
    row: npt.NDArray[np.float32] = context.logits(1)[0].copy()
    return row


# --- sampling on the device ------------------------------------------------------------------------------------------
# Tried in a child process with a tiny model: a driver may crash when it compiles the kernels.


def find_sampling_crash(
    n_vocab: int, device: int | None, names: Sequence[str], *, tries_again: bool = False
) -> str | None:
    """How llama.cpp crashes when it samples on these GPUs from a vocabulary of `n_vocab` tokens; None if it does not.

    `device`, `names`: as in `Model`. The answer is cached for this library and its devices; with `tries_again`, only if
    it does not crash.
    """
    devices = [(each.name, each.description) for each in Backend.get().devices()]
    verdict = finding_path("sampling", finding_key(Path(library_path()).parent, (), devices, n_vocab, device, names))
    arguments = (str(n_vocab), "" if device is None else str(device), *names)
    command = child_command("cppbatch.llama.sampling_child", *arguments)
    return find_crash("sampling on the GPU", verdict, command, _SAMPLING_S, remembers=not tries_again)


# --- determinism -----------------------------------------------------------------------------------------------------
# Probes whether the logits of a sequence depend on what else is computed with it.


_N_PROMPT = 40  # tokens: BLAS multiplies matrices of 32 and more rows
_PIECES = (5, 17)
_ROWS = (1, 2, 3, 4, 7, 16, 33)

MIN_ROWS = (1, 2, 8)
"""Candidates for the minimum rows of a ubatch. With float weights, products of a single row use a different kernel;
with Q6_K, Q5_K, Q3_K and IQ4_XS, those of fewer than eight rows (ggml-cpu `llamafile/sgemm.cpp`, `tiled/`)."""

Logits = npt.NDArray[np.float32]


def least_rows_for_equal_bits(context: Context) -> int | None:
    """The smallest of `MIN_ROWS` for which logits are bit-identical for every number of rows and all pieces of a
    prompt, if padding rows fill smaller ubatches; None if there is none.

    This covers the weights, including those of all LoRA adapters. In attention, the order of summation is fixed if the
    layout and types of the cache are those of `--deterministic`. Takes about 70 decodes for each number. The context
    must be empty, and is empty again afterwards.
    """
    try:
        context.use_adapters(tuple((i, 1.0) for i in range(len(context.model.adapters))))
        return next((n for n in MIN_ROWS if _Probe(context, min_rows=n).passes()), None)
    finally:
        context.use_adapters(())
        context.clear()


class _Probe:
    """Computes one prompt in several ways, and decode rows in groups of several sizes."""

    def __init__(self, context: Context, *, min_rows: int) -> None:
        self._context = context
        self._min_rows = min_rows
        self._tokens = np.random.default_rng(0).integers(0, context.model.vocab.n_tokens, _N_PROMPT).astype(np.int32)
        self._batch = Batch(context.n_batch)
        self._most = min(_N_PROMPT, context.n_batch, context.n_ubatch) - max(MIN_ROWS)  # per piece, without padding

    def passes(self) -> bool:
        """Whether the logits are the same in all cases."""
        return self._rows_agree() and self._prompts_agree()

    def _rows_agree(self) -> bool:
        """Whether a decode row's logits are independent of the number of rows in the batch and of its place there."""
        self._context.clear()
        counts = [n for n in _ROWS if n <= self._context.n_seq_max]
        for seq_id in range(counts[-1]):
            self._compute(seq_id, 0, 2 + seq_id % 4, wants_logits=False)
        expected = self._rows(counts[-1])
        return all(np.array_equal(self._rows(n), expected[:n]) for n in counts)

    def _rows(self, n: int) -> Logits:
        """The logits of the next token of each of the first `n` sequences. Does not change their cells."""
        positions = [2 + seq_id % 4 for seq_id in range(n)]
        n_each = -(-self._min_rows // n)
        self._batch.clear()
        for seq_id, position in enumerate(positions):
            self._batch.add_rows([int(self._tokens[position])], [position], [seq_id])
            self._add_padding(n_each - 1, seq_id, position + 1)
        self._context.decode(self._batch)
        rows: Logits = self._context.logits(self._batch.n_outputs)[::n_each].copy()
        for seq_id, position in enumerate(positions):
            self._context.remove_padding(seq_id, position)
        return rows

    def _prompts_agree(self) -> bool:
        """Whether a prompt's last row of logits is independent of the pieces in which the prompt is computed, and of
        the number of other rows in the batch."""
        expected = _Probe(self._context, min_rows=max(MIN_ROWS))._prompt(0, self._most)
        ways = [(0, self._most), *((0, min(piece, self._most)) for piece in _PIECES), (_N_PROMPT - 2, 1)]
        return all(np.array_equal(self._prompt(*way), expected) for way in ways)

    def _prompt(self, start: int, piece: int) -> Logits:
        """The row of the prompt's last token, with the tokens from `start` on computed in pieces."""
        self._context.clear()
        piece_before = min(_PIECES[0], self._most)
        for at in range(0, start, piece_before):
            self._compute(0, at, min(start, at + piece_before), wants_logits=False)
        for at in range(start, _N_PROMPT, piece):
            end = min(_N_PROMPT, at + piece)
            self._compute(0, at, end, wants_logits=end == _N_PROMPT)
        row: Logits = self._context.logits(self._batch.n_outputs)[0].copy()
        return row

    def _compute(self, seq_id: int, start: int, end: int, *, wants_logits: bool) -> None:
        """Computes the tokens from `start` to `end` of a sequence."""
        n_more = self._min_rows - (1 if wants_logits else min(self._min_rows, end - start))
        self._batch.clear()
        self._batch.add_run(self._tokens[start:end], start, seq_id, n_logits=int(wants_logits))
        self._add_padding(n_more, seq_id, end)
        self._context.decode(self._batch)
        if n_more:
            self._context.remove_padding(seq_id, end)

    def _add_padding(self, n: int, seq_id: int, position: int) -> None:
        self._batch.add_rows([0] * n, list(range(position, position + n)), [seq_id] * n)
