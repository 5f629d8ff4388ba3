"""A llama.cpp context: the KV cache of many sequences, and decoding."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import FlashAttention, Pooling, named
from cppbatch.errors import CacheFull, DecodeFailed, LlamaError, OutOfRange
from cppbatch.llama.backend import Backend
from cppbatch.llama.backend_sampling import MAX_CANDIDATES, BackendSampling
from cppbatch.llama.embedding_batch import EmbeddingBatch
from cppbatch.llama.library import C
from cppbatch.llama.llama_batch import Batch
from cppbatch.llama.lora import adapter_arguments
from cppbatch.llama.model import Model
from cppbatch.llama.rollback import Rollback
from cppbatch.llama.sequence_state import HEADER_BYTES, SequenceState

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_POOLING: dict[Pooling, int] = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}  # llama_pooling_type
_CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml_type
_WINDOW_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_DECODE_ERRORS = {2: "aborted", -1: "the batch is invalid", -2: "out of memory, or no free cells"}


class Context:
    """A context of a model. A context manager; not thread-safe: only one thread may use it.

    `n_ctx`: total KV cells. `kv_unified`: one pool for all sequences, else n_ctx / n_seq_max cells for each.
    llama.cpp may round sizes up: the attributes contain the actual ones.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int,
        flash_attn: FlashAttention = "auto",
        kv_unified: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        pooling: Pooling | None = None,
        n_rollback: int = 0,
    ) -> None:
        """Raises `OutOfRange` for bad sizes and `LlamaError` when llama.cpp cannot allocate the context.

        `pooling`: a decode computes one vector for each sequence (none: for each token) instead of logits. Pooling and
        non-causal attention need the whole sequence in one ubatch, so `n_ubatch` becomes `n_batch` and the layout
        unified.
        `n_rollback`: how many of its last tokens `remove` can take from a sequence whose memory is not all cells. For a
        recurrent state each takes the memory of one more state; models without `has_snapshots` allow none.
        """
        self._handle: Any = None
        if pooling:
            n_ubatch, kv_unified = n_batch, True
        _check_sizes(n_seq_max, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=n_threads)
        params = self._params = C.llama_context_default_params()
        params.n_batch, params.n_ubatch = n_batch, n_ubatch
        if pooling:
            params.embeddings, params.pooling_type = True, _POOLING[pooling]
        self._n_threads = n_threads
        self._n_rollback = n_rollback
        if model.has_snapshots:  # llama.cpp asserts that a ubatch is larger than the tokens that it keeps together
            params.n_rs_seq = max(0, min(n_rollback, n_ubatch - 2, n_batch - 2, n_ctx - 2))
        params.type_k, params.type_v = _CACHE_TYPES[type_k], _CACHE_TYPES[type_v]
        params.no_perf = True
        self.model = model  # also keeps the model alive
        self.n_seq_max = n_seq_max
        """seq_ids that may be in a batch: 0 to n_seq_max - 1."""
        self.is_pooled = pooling is not None
        self._logits_key: tuple[int, int] = (0, 0)
        self._logits: npt.NDArray[np.float32]
        self.backend_sampling: BackendSampling | None = None
        """Top-k on the device, once `enable_backend_sampling` has returned True."""
        self._n_embd = model.n_scores if pooling == "rank" else model.n_embd if pooling else 0
        self._n_vocab: int = model.vocab.n_tokens
        self.reopen(n_ctx=n_ctx, kv_unified=kv_unified, flash_attn=flash_attn)
        model.adopt(self)
        if self._memory is None and pooling is None:
            self.close()
            raise LlamaError(
                f"{model.description} has no memory to write text with; it can only embed ({named('pooling')})"
            )

    def reopen(self, *, n_ctx: int, kv_unified: bool, flash_attn: FlashAttention = "auto") -> None:
        """Frees the context, then makes it again with another layout. All sequences are empty, no adapter applies.

        Backend sampling is off. Two KV caches are never held at once. Raises as the constructor does; the context is
        closed then, and `reopen` may be called again.
        """
        _check_sizes(self.n_seq_max, n_ctx=n_ctx)
        self.close()
        model, params, max_ids = self.model, self._params, C.llama_max_parallel_sequences()
        all_cells = not self.is_pooled and not model.is_recurrent and not model.n_swa
        has_extra_ids = kv_unified and all_cells and self.n_seq_max < max_ids
        params.n_ctx, params.n_seq_max = n_ctx, self.n_seq_max + has_extra_ids
        # llama.cpp asserts that the output buffer holds a row for each seq_id; 0: a row for each token of a batch.
        params.n_outputs_max = params.n_seq_max if params.n_seq_max > params.n_batch else 0
        params.n_threads = params.n_threads_batch = self._n_threads
        params.flash_attn_type, params.kv_unified = _FLASH_ATTENTION[flash_attn], kv_unified
        made: list[Any] = []
        with Backend.get().errors() as lines:
            try:
                made.extend(map(C.llama_init_from_model, (model.handle,), (params,)))
            finally:  # Ctrl-C is raised when the call returns: the context must not be lost then
                self._handle = (made and made[0]) or None
        if self._handle is None:
            step = "n_batch" if self.is_pooled else "n_ubatch"
            smaller = f"{named('n_ctx')}, {named(step)} or {named('n_parallel')}"
            raise LlamaError(
                f"a context of {n_ctx} cells for {self.n_seq_max} sequences cannot be made: "
                f"{lines[-1] if lines else 'llama.cpp gives no reason'}. Less memory: lower {smaller}"
            )
        self.kv_unified = kv_unified
        self.n_ctx: int = C.llama_n_ctx(self._handle)
        self.n_ctx_seq: int = C.llama_n_ctx_seq(self._handle)
        """Cells that one sequence may take."""
        self.n_batch: int = C.llama_n_batch(self._handle)
        self.n_ubatch: int = C.llama_n_ubatch(self._handle)
        self.n_seq_ids: int = max_ids - 1 if has_extra_ids else self.n_seq_max
        """seq_ids that can hold cells: above `n_seq_max` in the unified layout, unless the model has other memory."""
        # Some models have a table of n_ctx_train positions.
        self._n_positions = min(self.n_ctx_seq, model.n_ctx_train)
        self._flash_attn = flash_attn
        self._memory = C.llama_get_memory(self._handle)  # None for BERT; llama.cpp's functions accept it
        self._adapters: tuple[tuple[int, float], ...] = ()
        self._n_outputs = 0
        self._shifted: set[int] = set()  # sequences that were shifted after the last decode
        is_recurrent = model.is_recurrent
        self._rollback = Rollback(
            C.llama_n_rs_seq(self._handle) if is_recurrent else self._n_rollback if model.n_swa else 0,
            any_lengths=kv_unified and not is_recurrent,
            any_seq_ids=kv_unified,
        )

    @property
    def n_rollback(self) -> int:
        """How many of its last tokens `remove` can take from a sequence at most, where memory is not all cells."""
        return self._rollback.n

    @property
    def has_streams(self) -> bool:
        """Whether each seq_id has memory of its own: llama.cpp computes only rows of consecutive seq_ids together."""
        return not self.kv_unified or self.model.is_recurrent

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the context is closed."""
        if self._handle is None:
            raise LlamaError("the context is closed")
        return self._handle

    def use_adapters(self, adapters: tuple[tuple[int, float], ...]) -> None:
        """Applies exactly these LoRA adapters, (index in `Model.adapters`, scale), from the next decode on.

        A change makes llama.cpp rebuild its graph in that decode; the same set costs nothing. Raises `OutOfRange` for
        an index out of range.
        """
        if adapters == self._adapters:
            return
        known = self.model.adapters
        for i, _ in adapters:
            if not 0 <= i < len(known):
                raise OutOfRange(f"adapter {i} was asked for; the model has {len(known)}")
        handles, scales = [known[i] for i, _ in adapters], [scale for _, scale in adapters]
        C.llama_set_adapters_lora(self.handle, *adapter_arguments(handles, scales))
        self._adapters = adapters

    def use_threads(self, n: int) -> None:
        """Sets the number of compute threads, from the next decode on."""
        if n != self._n_threads:
            C.llama_set_n_threads(self.handle, n, n)
            self._n_threads = n

    def decode_vectors(self, batch: EmbeddingBatch, *, causal: bool) -> None:
        """Computes vectors of pictures or sound, as `decode` does tokens; there are no logits.

        `causal`: each sees only those before it. False: all of the batch see each other; it must fit into a ubatch.
        """
        if causal:
            self.decode(batch)
            return
        if batch.n_tokens > self.n_ubatch:
            raise OutOfRange(f"{batch.n_tokens} vectors see each other; a ubatch has {self.n_ubatch}")
        C.llama_set_causal_attn(self.handle, False)
        try:
            self.decode(batch)
        finally:
            C.llama_set_causal_attn(self.handle, True)

    def decode(self, batch: Batch) -> None:
        """Computes the batch and waits for the device, without the GIL.

        Raises `OutOfRange` for a bad batch, before it reaches C; `CacheFull` when too few cells are free (nothing has
        changed then); `DecodeFailed` for any other error.
        """
        self._check(batch)
        self._n_outputs = 0
        code = C.llama_decode(self.handle, batch.struct)
        if code == 0:
            C.llama_synchronize(self.handle)
            self._n_outputs = batch.n_outputs
            self._shifted.clear()
            self._rollback.decoded(batch, self.n_ubatch)
            return
        if code == 1:
            raise CacheFull(f"no free KV cells for {batch.n_tokens} tokens among {self.n_ctx}")
        raise DecodeFailed(code, _DECODE_ERRORS.get(code, "a fatal error in the computation"))

    def _check(self, batch: Batch) -> None:
        n = batch.n_tokens
        if self.model.no_alloc:
            raise OutOfRange(f"{self.model.path.name} was loaded with no_alloc: there are no weights to compute with")
        if not 1 <= n <= self.n_batch:
            raise OutOfRange(f"a batch has {n} tokens; it must have 1 to {self.n_batch}")
        limits = [(batch.seq_ids, self.n_seq_max, "seq_id")]
        if not isinstance(batch, EmbeddingBatch):
            limits.append((batch.tokens, self._n_vocab, "token id"))
        elif batch.vectors.shape[1] != self.model.n_embd_inp:
            raise OutOfRange(f"vectors of {batch.vectors.shape[1]} numbers; the model takes {self.model.n_embd_inp}")
        for array, limit, name in (*limits, (batch.positions, self._n_positions, "position")):
            low, high = int(array[:n].min()), int(array[:n].max())
            if low < 0 or high >= limit:
                raise OutOfRange(f"a batch has {name} {low if low < 0 else high}; the limit is {limit - 1}")

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """The logits of the last decode, float32[n_outputs, n_vocab], in batch order.

        `n_outputs`: the batch's. The array is a writable view of llama.cpp's buffer, valid until the next decode.
        Raises `OutOfRange` for more rows than that decode computed.
        """
        handle = self.handle
        if not 0 < n_outputs <= self._n_outputs:
            raise OutOfRange(f"{n_outputs} rows of logits were asked for; the last decode gave {self._n_outputs}")
        address = ctypes.cast(C.llama_get_logits(handle), ctypes.c_void_p).value
        if not address:
            raise LlamaError("llama.cpp gives no logits for this model")
        if self._logits_key != (address, n_outputs):
            buffer = (ctypes.c_float * (n_outputs * self._n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(buffer).reshape(n_outputs, self._n_vocab)
            self._logits_key = (address, n_outputs)
        return self._logits

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]:
        """A copy of the vector of a sequence of the last decode, float32[n_embd] (a reranker: float32[n_scores])."""
        vector = C.llama_get_embeddings_seq(self.handle, self._native(seq_id))
        if not vector or not self._n_embd:
            raise LlamaError(f"the last decode gave no vector for sequence {seq_id}")
        row: npt.NDArray[np.float32] = np.ctypeslib.as_array(vector, (self._n_embd,)).copy()
        return row

    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """The vectors of the tokens of the last decode, float32[n_outputs, n_embd], in batch order; with pooling none.

        `n_outputs`: the batch's. The array is a view of llama.cpp's buffer, valid until the next decode.
        """
        address = C.llama_get_embeddings(self.handle)
        if not address or not self._n_embd or not 0 < n_outputs <= self._n_outputs:
            raise LlamaError(f"the last decode gave no vectors for {n_outputs} tokens")
        return np.ctypeslib.as_array(address, (n_outputs, self._n_embd))

    def enable_backend_sampling(self, n: int | None = None) -> bool:
        """From the next decode on, rows are their `n` largest logits, computed on the device: `self.backend_sampling`.

        `n`: None for 128, or the whole vocabulary if it is smaller. Decodes one token to find out whether the device
        supports it; where it does not, rows stay logits and the result is False. The context must be empty.
        """
        self.backend_sampling = backend = BackendSampling(
            self, n or min(MAX_CANDIDATES, self._n_vocab), n_vocab=self._n_vocab
        )
        batch = Batch(1)
        batch.add_run(np.zeros(1, np.int32), 0, 0, n_logits=1)
        try:
            for seq_id in range(self.n_seq_max):
                backend.set_enabled(seq_id, True)
            self.decode(batch)
            backend.candidates([0], 1)
        except LlamaError:
            for seq_id in range(self.n_seq_max):
                backend.set_enabled(seq_id, False)
            backend.close()
            self.backend_sampling = None
            return False
        finally:
            self.remove(0)
        return True

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool:
        """Removes the positions [start, stop) of a sequence; `stop` -1: up to its end.

        Returns False if the memory does not allow it: part of a recurrent state, or part of a sequence whose earlier
        cells a sliding window may have dropped. Removing a whole sequence always works. So does removing the last
        tokens of the last decode, up to `n_rollback`, if that was a single ubatch: equally many tokens of each sequence
        (a sliding window in the unified layout: any number), and consecutive rising seq_ids in the per-sequence layout.
        """
        native = self._native(seq_id)
        if start <= 0 and stop < 0:
            self._shifted.discard(seq_id)
        if (self.model.is_recurrent or self.model.n_swa) and not self._is_whole(seq_id, start, stop):
            last = self.last_position(seq_id)
            if start > last:
                return True
            if stop >= 0 or last - start >= self._rollback.removable(seq_id):
                return False  # llama.cpp would return True
            self._rollback.removed_part(seq_id)
        else:
            self._rollback.removed(seq_id)
        return bool(C.llama_memory_seq_rm(self._open_memory(), native, start, stop))

    def remove_padding(self, seq_id: int, position: int) -> None:
        """Removes the tokens from `position` on, all of a sequence or the last one, which the last decode computed.

        Unlike with `remove`, a sliding window may have dropped cells: the token that comes to this position needs none
        of those that this token did not need.
        """
        C.llama_memory_seq_rm(self._open_memory(), self._native(seq_id), position, -1)

    @property
    def can_shift(self) -> bool:
        """Whether `shift` works: the memory is all cells, and its keys can be rotated to other positions."""
        model = self.model
        return not (model.is_recurrent or model.n_swa) and bool(C.llama_memory_can_shift(self._open_memory()))

    def shift(self, seq_id: int, start: int, by: int) -> None:
        """Adds `by` to the positions of a sequence from `start` on, whose cells no other sequence may share.

        llama.cpp rotates the keys in the next decode; until then the sequence cannot be saved. Raises `OutOfRange`
        where that is impossible (llama.cpp would abort), and for positions below 0.
        """
        native = self._native(seq_id)
        if not self.can_shift:
            raise OutOfRange("positions of this model's memory cannot be shifted")
        if start + by < 0:
            raise OutOfRange(f"position {start} was to be shifted by {by}")
        C.llama_memory_seq_add(self._open_memory(), native, start, -1, by)
        self._shifted.add(seq_id)

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Makes `target` share the positions [start, stop) of `source`.

        Unified layout: the same cells, nothing is copied. Per-sequence layout: the data is copied. There, and for
        recurrent models, only whole sequences can be copied: raises `OutOfRange` for a part.
        """
        native = self._native(source), self._native(target)
        if (self.model.is_recurrent or not self.kv_unified) and (start > 0 or stop >= 0):
            raise OutOfRange(f"positions {start} to {stop} were asked for; here only whole sequences can be copied")
        if self._rollback.is_pending(source):
            self.restore_sequence(target, self.save_sequence(source))
            return
        self._rollback.moved()
        C.llama_memory_seq_cp(self._open_memory(), *native, start, stop)

    def share_prefix(self, source: int, target: int, n: int) -> None:
        """Makes `target` hold the first `n` cells of `source` in place of its own, which must have equal tokens.

        Raises `OutOfRange` where cells cannot be shared, and if one of the two has fewer cells.
        """
        native = self._native(source), self._native(target)
        if self.model.is_recurrent or self.model.n_swa or not self.kv_unified:
            raise OutOfRange("sequences share cells only in the unified layout of models whose memory is all cells")
        if not 0 < n <= 1 + min(self.last_position(source), self.last_position(target)):
            raise OutOfRange(f"{n} cells were asked for; one of the sequences has fewer")
        C.llama_memory_seq_rm(self._open_memory(), native[1], 0, n)
        C.llama_memory_seq_cp(self._open_memory(), *native, 0, n)

    def clear(self) -> None:
        """Removes all sequences."""
        self._shifted.clear()
        C.llama_memory_clear(self._open_memory(), False)

    def last_position(self, seq_id: int) -> int:
        """The highest position of a sequence in the cache, -1 if it has none."""
        return int(C.llama_memory_seq_pos_max(self._open_memory(), self._native(seq_id)))

    def save_sequence(self, seq_id: int) -> SequenceState:
        """Copies a sequence's keys and values to host memory; the sequence does not change.

        Raises `LlamaError` if it was shifted after the last decode.
        """
        if seq_id in self._shifted:
            raise LlamaError(f"sequence {seq_id} was shifted, and its keys are rotated in the next decode")
        n_tokens = self.last_position(seq_id) + 1
        native = self._native(seq_id)
        if seq_id < self.n_seq_max:
            return self._state(native, n_tokens)
        spare, memory = self.n_seq_max, self._open_memory()
        try:
            C.llama_memory_seq_cp(memory, native, spare, 0, -1)
            return self._state(spare, n_tokens)
        finally:
            C.llama_memory_seq_rm(memory, spare, 0, -1)

    def _state(self, native: int, n_tokens: int) -> SequenceState:
        data = np.empty(C.llama_state_seq_get_size(self.handle, native), np.uint8)
        written = C.llama_state_seq_get_data(self.handle, _bytes_pointer(data), data.size, native)
        if written == 0:
            raise LlamaError(f"the memory of llama.cpp's sequence {native} cannot be saved")
        n_window = 0
        if self.model.n_swa:  # the size of the second cache alone, with a header as before both
            n_window = C.llama_state_seq_get_size_ext(self.handle, native, _WINDOW_ONLY) - HEADER_BYTES
        stream = 0 if self.kv_unified else native
        return SequenceState(
            data[:written], n_tokens, self._model_key, self._n_streams, stream, n_window, self._flash_attn
        )

    def restore_sequence(self, seq_id: int, state: SequenceState) -> None:
        """Replaces the contents of a sequence (any seq_id) by a saved state.

        The state may come from another context of the same model, in the other layout, with or without flash attention.
        Raises `OutOfRange` for a state of another model; `LlamaError` when too few cells are free, or when the kinds of
        cache differ. The sequence is empty then.
        """
        native = self._native(seq_id)
        if state.model_key != self._model_key:
            raise OutOfRange(f"this state is of {state.model_key}; this context is of {self._model_key}")
        self.remove(seq_id)
        if state.n_tokens == 0:
            return
        data = state.for_context(self._n_streams, self._flash_attn)
        self._rollback.moved()
        if C.llama_state_seq_set_data(self.handle, _bytes_pointer(data), data.size, native) != data.size:
            self.remove(seq_id)
            raise LlamaError(f"no free cells to restore {state.n_tokens} tokens into sequence {seq_id}")

    def read_state(self, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> SequenceState:
        """The state that had this `data` and `form`. The caller knows that it is of this model."""
        return SequenceState(data, model_key=self._model_key, **form)

    @property
    def _model_key(self) -> tuple[object, ...]:
        return (str(self.model.path), self.model.n_params)

    @property
    def _n_streams(self) -> int:
        return 1 if self.kv_unified else self.n_seq_max

    def _is_whole(self, seq_id: int, start: int, stop: int) -> bool:
        return start <= 0 and not 0 <= stop <= self.last_position(seq_id)

    def _native(self, seq_id: int) -> int:
        """llama.cpp's seq_id. Its seq_id n_seq_max is reserved, so from there on ours are lower by one.

        llama.cpp saves the state only of seq_ids that may be in a batch; `save_sequence` uses the reserved one for
        the others.
        """
        if not 0 <= seq_id < self.n_seq_ids:
            raise OutOfRange(f"seq_id is {seq_id}; it must be 0 to {self.n_seq_ids - 1}")
        return seq_id if seq_id < self.n_seq_max else seq_id + 1

    def _open_memory(self) -> Any:
        self.handle  # noqa: B018  raises if the context is closed: its memory is freed
        return self._memory

    def close(self) -> None:
        """Frees the context. A second call does nothing."""
        if self._handle is not None:
            C.llama_free(self._handle)
            self._handle = self._memory = None
        if self.backend_sampling:
            self.backend_sampling.close()
            self.backend_sampling = None
        self._logits_key = (0, 0)
        self._logits = np.empty((0, self._n_vocab), np.float32)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _check_sizes(n_seq_max: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if not 1 <= value < 2**31:
            raise OutOfRange(f"{name} is {value}; it must be at least 1")
    if not 1 <= n_seq_max <= C.llama_max_parallel_sequences():
        raise OutOfRange(f"n_seq_max is {n_seq_max}; it must be 1 to {C.llama_max_parallel_sequences()}")


def _bytes_pointer(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
