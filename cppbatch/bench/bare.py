"""A loop over `llama_decode` and nothing else: the ceiling of any engine over it."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.engine.runtime import Computation
from cppbatch.llama import Batch

Prompts = list[npt.NDArray[np.int32]]


class Speeds(NamedTuple):
    """Tokens/s over all sequences: reading prompts, and writing."""

    prefill: float
    decode: float


def bare_loop(context: Computation, batch: Batch, prompts: Prompts, n_new: int) -> Speeds:
    """Reads the prompts in full steps, then feeds each sequence a fixed token n_new - 1 times; samples nothing.

    The context must be empty, and is empty again afterwards. Prompts are of one length.
    """
    began = perf_counter()
    _read(context, batch, prompts)
    read = perf_counter()
    rows, n_prompt = list(range(len(prompts))), len(prompts[0])
    token = int(prompts[0][0])
    for position in range(n_prompt, n_prompt + n_new - 1):
        batch.clear()
        batch.add_rows([token] * len(rows), [position] * len(rows), rows)
        context.decode(batch)
        context.logits(len(rows))  # waits for the device
    ended = perf_counter()
    for seq_id in rows:
        context.remove(seq_id)
    return Speeds(len(rows) * n_prompt / (read - began), len(rows) * (n_new - 1) / (ended - read))


def _read(context: Computation, batch: Batch, prompts: Prompts) -> None:
    batch.clear()
    for seq_id, prompt in enumerate(prompts):
        at = 0
        while at < len(prompt):
            n = min(len(prompt) - at, batch.capacity - batch.n_tokens)
            batch.add_run(prompt[at : at + n], at, seq_id, n_logits=int(at + n == len(prompt)))
            at += n
            if batch.n_tokens == batch.capacity:
                context.decode(batch)
                batch.clear()
    if batch.n_tokens:
        context.decode(batch)
        context.logits(batch.n_outputs)
