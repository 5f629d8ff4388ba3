"""Tokens that a rectangle has and no request asked for."""

from __future__ import annotations

import numpy as np

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.scheduler import Chunk
from cppbatch.engine.sequence import Seq


class Padding:
    """A sequence that nobody waits for. What is computed of it costs what a prompt does, and is dropped again."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        # With one token more than can be computed, so that it never comes to want logits.
        request = GenerationRequest(id="padding", prompt=[0], cache_prompt=False)
        self._sequence = Seq(request, np.zeros(kv.n_ctx + 1, np.int32), max_new=0, seed=0, now=0.0)

    def chunk(self, n: int, adapters: AdapterSet) -> Chunk:
        """So many tokens for the next step. A seq_id and that many cells must be free."""
        self._sequence.adapters = adapters
        self._kv.admit(self._sequence)
        return self._sequence, n

    def drop(self) -> None:
        """Frees what the last step computed."""
        if self._sequence.seq_id >= 0:
            self._kv.release(self._sequence, keep=False)

    def restart(self) -> None:
        """The pool has forgotten it."""
        self._sequence.restarted()
