"""A llama.cpp context: the KV cache of many sequences, and decoding."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import FlashAttention, Pooling, setting_name
from cppbatch.errors import CacheFull, DecodeFailed, LlamaError, OutOfRange
from cppbatch.interrupts import interrupts_deferred
from cppbatch.llama.backend import Backend
from cppbatch.llama.backend_sampling import MAX_CANDIDATES, BackendSampling
from cppbatch.llama.batch_parts import ALL_ROWS, Part, parts_of
from cppbatch.llama.control_vector import apply_directions
from cppbatch.llama.library import C, layer_rows, nextn
from cppbatch.llama.llama_batch import Batch, BatchLimits, EmbeddingBatch
from cppbatch.llama.lora import adapter_arguments
from cppbatch.llama.model import Model
from cppbatch.llama.owned import Owned
from cppbatch.llama.sequence_state import CELL_BYTES, HEADER_BYTES, PLANAR_CELL_BYTES, Rollback, SequenceState
from cppbatch.setting import INT32_MAX

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_POOLING: dict[Pooling, int] = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}  # llama_pooling_type
_CACHE_TYPES = {  # ggml_type
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
_WHOLE_COPIES = frozenset({"deepseek4"})  # aborts on copies of a part of a sequence: src/llama-kv-cache-dsv4.cpp:1513
_EQUAL_SHARES = frozenset({"kimi-linear"})  # aborts if it cannot reserve the same part of a ubatch for each sequence
_DECODE_ERRORS = {2: "aborted", -1: "the batch is invalid", -2: "out of memory"}


class Context:
    """A context of a model. A context manager; not thread-safe: only one thread may use it.

    `n_ctx`: total KV cells. `kv_unified`: one pool for all sequences, else n_ctx / n_seq_max cells for each.
    llama.cpp may round sizes up; the attributes contain the actual sizes.
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
        swa_full: bool = False,
        n_outputs: int = 0,
        is_head: bool = False,
        target: Context | None = None,
    ) -> None:
        """Raises `OutOfRange` for invalid sizes, and `OutOfMemory` or `LlamaError` if there can be no context.

        `pooling`: a decode computes one vector for each sequence (none: for each token) instead of logits. Pooling and
        non-causal attention need the whole sequence in one ubatch, so `n_ubatch` becomes `n_batch` and the layout
        unified.
        `n_rollback`: the maximum number of last tokens that `remove` can remove from a sequence if memory is not only
        cells. For recurrent states, each needs the memory of one more state, up to `Model.most_snapshots`.
        `swa_full`: sliding windows keep all of their cells.
        `n_outputs`: rows of logits for which the device of the output reserves memory; a batch with more is decoded in
        parts. 0: a row for each token of a ubatch.
        `is_head`: the context of the model's draft head, or of a draft model that reads hidden rows (`HeadContext`).
        All of its memory is cells. `target`: for such a draft model, the context of its target model, which must stay
        open as long as this one.
        """
        self._owned: Owned | None = None
        self._is_recurrent = model.is_recurrent and not is_head
        self._n_swa = 0 if is_head else model.n_swa
        self._is_head = is_head
        if pooling:
            n_ubatch, kv_unified = n_batch, True
        _check_sizes(n_seq_max, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=n_threads)
        if model.architecture in _EQUAL_SHARES:
            n_ubatch = max(1, min(n_batch, n_ubatch) // n_seq_max) * n_seq_max
            n_batch = max(n_batch, n_ubatch)
        params = self._params = C.llama_context_default_params()
        for name, value in model.context_params.items():
            setattr(params, name, value)
        params.n_batch, params.n_ubatch = n_batch, n_ubatch
        if pooling:
            params.embeddings, params.pooling_type = True, _POOLING[pooling]
        self._n_threads = n_threads
        self._n_rollback = n_rollback
        self._n_rows = 0 if model.architecture in ALL_ROWS else min(n_outputs, n_batch)
        self._target = target
        if is_head:
            params.ctx_type = C.LLAMA_CONTEXT_TYPE_DEFAULT if target else C.LLAMA_CONTEXT_TYPE_MTP
        elif most := model.most_snapshots:  # llama.cpp asserts that a ubatch is larger than the tokens kept together
            params.n_rs_seq = max(0, min(n_rollback, most, n_ubatch - 2, n_batch - 2, n_ctx - 2))
        params.swa_full = swa_full
        params.type_k, params.type_v = _CACHE_TYPES[type_k], _CACHE_TYPES[type_v]
        params.no_perf = True
        self.model = model  # also keeps the model alive
        self.n_seq_max = n_seq_max
        """seq_ids that may be in a batch: 0 to n_seq_max - 1."""
        self.is_pooled = pooling is not None
        self._logits_key: tuple[int, int] = (0, 0)
        self._logits: npt.NDArray[np.float32]
        self._hidden_key: tuple[int, int] = (0, 0)
        self._hidden: npt.NDArray[np.float32]
        self._part_logits: npt.NDArray[np.float32] | None = None  # of a batch decoded in parts
        self.backend_sampling: BackendSampling | None = None
        """Top-k on the device, once `enable_backend_sampling` has returned True."""
        self._part_hidden: npt.NDArray[np.float32] | None = None
        self.gives_hidden_rows = False
        self._row_layers: tuple[int, ...] = ()
        self._n_embd = model.n_scores if pooling == "rank" else model.n_embd if pooling else 0
        self._n_vocab: int = model.vocab.n_tokens
        self.reopen(n_ctx=n_ctx, kv_unified=kv_unified, flash_attn=flash_attn)
        model.adopt(self)
        if self._memory is None and pooling is None:
            self.close()
            raise LlamaError(
                f"{model.description} has no KV cache, so it cannot generate text, only embeddings "
                f"({setting_name('pooling')})"
            )

    def reopen(self, *, n_ctx: int, kv_unified: bool, flash_attn: FlashAttention = "auto") -> None:
        """Frees the context, then recreates it with another layout. All sequences are empty, and no adapter is applied.

        Backend sampling is off. Two KV caches never exist at once. Raises as the constructor does; the context is then
        closed, and `reopen` may be called again.
        """
        _check_sizes(self.n_seq_max, n_ctx=n_ctx)
        self.close()
        model, params, max_ids = self.model, self._params, C.llama_max_parallel_sequences()
        all_cells = not (self.is_pooled or self._is_recurrent or self._n_swa)
        has_extra_ids = kv_unified and all_cells and self.n_seq_max < max_ids
        params.n_ctx, params.n_seq_max = n_ctx, self.n_seq_max + has_extra_ids
        # llama.cpp asserts that the output buffer holds a row per seq_id; 0: a row per token of a batch.
        is_set = self._n_rows or params.n_seq_max > params.n_batch
        params.n_outputs_max = max(self._n_rows, params.n_seq_max) if is_set else 0
        params.n_threads = params.n_threads_batch = self._n_threads
        params.flash_attn_type, params.kv_unified = _FLASH_ATTENTION[flash_attn], kv_unified
        params.ctx_other = self._target.handle if self._target else None
        with interrupts_deferred(), Backend.get().errors() as lines:  # Ctrl-C would be lost in the log callback
            if handle := C.llama_init_from_model(model.handle, params):
                needs = [model.owned, self._target._owned] if self._target else [model.owned]
                self._owned = Owned(handle, C.llama_free, *needs)
        if not handle:
            step = "n_batch" if self.is_pooled else "n_ubatch"
            smaller = f"{setting_name('n_ctx')}, {setting_name(step)} or {setting_name('n_parallel')}"
            message = (
                f"cannot create a context of {n_ctx} cells for {self.n_seq_max} sequences: "
                f"{lines[-1] if lines else 'llama.cpp gave no reason'}. To use less memory, lower {smaller}"
            )
            raise Backend.get().failure(LlamaError(message), lines)
        if model.control_vectors and not self._is_head:  # llama.cpp allocates memory for them here, not in a step
            apply_directions(handle, model.control_vectors[0], ())
            apply_directions(handle, None, ())
        self.kv_unified = kv_unified
        self.n_ctx: int = C.llama_n_ctx(handle)
        self.n_ctx_seq: int = C.llama_n_ctx_seq(handle)
        """Maximum cells of one sequence."""
        self.n_batch: int = C.llama_n_batch(handle)
        self.n_ubatch: int = C.llama_n_ubatch(handle)
        self.n_seq_ids: int = max_ids - 1 if has_extra_ids else self.n_seq_max
        """seq_ids that can hold cells: above `n_seq_max` in the unified layout, unless the model has other memory."""
        self._limits = BatchLimits(
            self.n_batch, self.n_seq_max, self._n_vocab,
            min(self.n_ctx_seq, model.n_ctx_train),  # some models have a table of n_ctx_train positions
            self._n_vector, model.n_dimensions,
        )  # fmt: skip
        self.flash_attn: FlashAttention = flash_attn
        """The setting as requested."""
        if self.gives_hidden_rows:
            self.give_hidden_rows(self._row_layers)
        self._memory = C.llama_get_memory(handle)  # None for BERT; llama.cpp's functions accept it
        self._adapters: tuple[tuple[int, float], ...] = ()
        self._n_outputs = self._n_decoded = 0
        self._shifted: set[int] = set()  # sequences that were shifted after the last decode
        self._copy_sources: set[int] = set()  # sequences whose streams llama.cpp copies in the next decode
        self._copy_targets: set[int] = set()
        self._rollback = Rollback(
            C.llama_n_rs_seq(handle) if self._is_recurrent else self._n_rollback if self._n_swa else 0,
            any_lengths=kv_unified and not self._is_recurrent,
            any_seq_ids=kv_unified,
        )

    @property
    def _n_vector(self) -> int:
        """Numbers of a vector in place of a token."""
        return self.model.n_embd_inp

    @property
    def n_rollback(self) -> int:
        """The maximum number of last tokens that `remove` can remove from a sequence, if memory is not only cells."""
        return self._rollback.n

    @property
    def has_streams(self) -> bool:
        """Whether each seq_id has its own memory: llama.cpp only computes rows of consecutive seq_ids together."""
        return not self.kv_unified or self._is_recurrent

    @property
    def attention_tile(self) -> int:
        """The number of a sequence's tokens that flash attention computes together on a CPU (ggml-cpu `common.h`:
        `GGML_FA_TILE_Q`); it computes fewer one by one, each over all cells. 1: any number at once."""
        types = {self._params.type_k, self._params.type_v}
        is_float = types in ({_CACHE_TYPES["f16"]}, {_CACHE_TYPES["f32"]})
        has_tiles = is_float and self.flash_attn != "off" and not self._is_recurrent
        return 64 if has_tiles else 1

    @property
    def n_window(self) -> int:
        """Tokens of the sliding window; 0: no window."""
        return self._n_swa

    @property
    def has_states(self) -> bool:
        """Whether a sequence has recurrent states, with or without cells."""
        return self._is_recurrent

    @property
    def shares_cells(self) -> bool:
        """Whether a sequence can share the first cells of another one (`share_cells`).

        With a sliding window, each sequence has its own cells for the window's layers. There are at most `n_ctx` of
        them: if that is not enough for the windows of all sequences, these could run out while other cells are free.
        """
        windows_fit = not self._n_swa or self._n_swa * self.n_seq_max + self.n_ubatch <= self.n_ctx
        return self.kv_unified and windows_fit and self.model.architecture not in _WHOLE_COPIES

    @property
    def is_closed(self) -> bool:
        """Whether the context is freed."""
        return self._owned is None or self._owned.pointer is None

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the context is closed."""
        if self._owned is None or (pointer := self._owned.pointer) is None:
            raise LlamaError("the context is closed")
        return pointer

    def use_adapters(self, adapters: tuple[tuple[int, float], ...]) -> None:
        """Sets the LoRA adapters, (index in `Model.adapters`, scale), from the next decode on, and the control vectors,
        whose indices follow.

        A change makes llama.cpp rebuild its graph in that decode; an unchanged set costs nothing. Raises `OutOfRange`
        for an index out of range, and `LlamaError`.
        """
        if adapters == self._adapters:
            return
        model = self.model
        n, n_all = len(model.adapters), len(model.adapters) + len(model.control_vectors)
        for i, _ in adapters:
            if not 0 <= i < n_all:
                raise OutOfRange(f"adapter {i} was requested; the model has {n_all}")
        lora = [(model.adapters[i], scale) for i, scale in adapters if i < n]
        C.llama_set_adapters_lora(self.handle, *adapter_arguments([each for each, _ in lora], [s for _, s in lora]))
        vectors, used = ([pair for pair in pairs if pair[0] >= n] for pairs in (adapters, self._adapters))
        if vectors != used:
            scaled = (np.float32(scale) * model.control_vectors[i - n] for i, scale in vectors)
            apply_directions(self.handle, sum(scaled) if vectors else None, model.control_vector_layers)
        self._adapters = adapters

    def use_threads(self, n: int) -> None:
        """Sets the number of compute threads, from the next decode on."""
        if n != self._n_threads:
            C.llama_set_n_threads(self.handle, n, n)
            self._n_threads = n

    def decode_vectors(self, batch: EmbeddingBatch, *, causal: bool) -> None:
        """Computes vectors of images or audio, as `decode` does for tokens, but without logits.

        `causal`: each attends only to earlier ones. False: all vectors of the batch, which must fit into a ubatch,
        attend to each other.
        """
        if causal:
            self.decode(batch)
            return
        if batch.n_tokens > self.n_ubatch:
            raise OutOfRange(
                f"{batch.n_tokens} vectors attend to each other and must be in one ubatch, which holds {self.n_ubatch}"
            )
        C.llama_set_causal_attn(self.handle, False)
        try:
            self.decode(batch)
        finally:
            C.llama_set_causal_attn(self.handle, True)

    def decode(self, batch: Batch) -> None:
        """Computes the batch and waits for the device, without the GIL.

        Raises `OutOfRange` for an invalid batch, before it reaches C; `CacheFull` if too few cells are free (nothing
        has changed then); `OutOfMemory` if a buffer cannot be allocated; `DecodeFailed` for any other error.
        """
        if self.model.no_alloc:
            raise OutOfRange(f"{self.model.path.name} was loaded with no_alloc: there are no weights to compute with")
        batch.check(self._limits)
        self._n_outputs = 0
        parts = parts_of(
            batch, architecture=self.model.architecture, n_swa=self.model.n_swa, n_ubatch=self.n_ubatch,
            n_rows=self._n_rows, has_streams=self.has_streams,
            keeps_whole=self.is_pooled or self._is_head or isinstance(batch, EmbeddingBatch),
        )  # fmt: skip
        if self.backend_sampling:
            self.backend_sampling.kept.clear()
        if len(parts) == 1 and (self.is_pooled or self._is_head or self.model.architecture not in ALL_ROWS):
            self._part_logits = self._part_hidden = None
            self._decode(batch.struct)
        else:
            self._decode_parts(batch, parts)
        self._n_outputs = batch.n_outputs
        self._shifted.clear()
        self._copy_sources.clear()
        self._copy_targets.clear()
        self._rollback.record_decode(batch, self.n_ubatch)

    def _decode(self, struct: Any) -> None:
        self._n_decoded = 0
        code = C.llama_decode(self.handle, struct)
        if code == 1:
            raise CacheFull(f"no free KV cells for {struct.n_tokens} tokens among {self.n_ctx}")
        if code:
            error = DecodeFailed(code, _DECODE_ERRORS.get(code, "fatal error during computation"))
            backend = Backend.get()
            raise backend.failure(error, [*backend.recent_errors(), str(error)])
        C.llama_synchronize(self.handle)
        self._n_decoded = struct.n_tokens

    def _decode_parts(self, batch: Batch, parts: list[Part]) -> None:
        """Decodes the parts, and collects their rows of logits."""
        n, all_rows = batch.n_tokens, self.model.architecture in ALL_ROWS
        wanted = batch.wants_logits[:n].astype(bool)
        rows = [np.empty((0, self._n_vocab), np.float32)]
        hidden = []
        self._part_logits = self._part_hidden = None
        backend, seq_ids = self.backend_sampling, batch.seq_ids[:n]
        needs_rows = not backend or not all(map(backend.is_enabled, seq_ids[wanted].tolist()))
        try:
            if all_rows:
                batch.wants_logits[:n] = 1
            for start, stop in parts:
                self._decode(batch.part(start, stop))
                if self.gives_hidden_rows:
                    hidden.append(self.hidden_rows(stop - start).copy())
                self._n_outputs = int(np.count_nonzero(batch.wants_logits[start:stop]))
                if self._n_outputs and backend:
                    backend.keep(seq_ids[start:stop][wanted[start:stop]].tolist())
                if self._n_outputs and needs_rows:
                    of_part = self.logits(self._n_outputs)
                    rows.append(of_part[wanted[start:stop]] if all_rows else of_part.copy())
        except CacheFull as error:
            if start:
                raise DecodeFailed(1, str(error)) from error  # the previous parts have changed the memory
            raise
        finally:
            batch.wants_logits[:n] = wanted
        self._part_logits = np.concatenate(rows)
        self._part_hidden = np.concatenate(hidden) if hidden else None

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """The logits of the last decode, float32[n_outputs, n_vocab], in batch order.

        `n_outputs`: the number of outputs of the batch. The array is a writable view of llama.cpp's buffer, valid until
        the next decode. Raises `OutOfRange` for more rows than that decode computed.
        """
        handle = self.handle
        if not 0 < n_outputs <= self._n_outputs:
            raise OutOfRange(f"{n_outputs} rows of logits were requested; the last decode produced {self._n_outputs}")
        if self._part_logits is not None:
            return self._part_logits[:n_outputs]
        pointer = C.llama_get_logits(handle)
        if not pointer:
            raise LlamaError("llama.cpp returns no logits for this model")
        address = ctypes.addressof(pointer.contents)
        if self._logits_key != (address, n_outputs):
            buffer = (ctypes.c_float * (n_outputs * self._n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(buffer).reshape(n_outputs, self._n_vocab)
            self._logits_key = (address, n_outputs)
        return self._logits

    def give_hidden_rows(self, layers: tuple[int, ...] = ()) -> None:
        """From the next decode on, `hidden_rows` returns a row per token, for a draft head or draft model.

        `layers`: the rows are the concatenated inputs of these layers. The architecture must export them
        (`models.draft_files`); otherwise llama.cpp aborts the process. (): the rows are the output of the last layer,
        which llama.cpp then computes for all prompt tokens. The rows are copied to the host. Raises `LlamaError` if
        llama.cpp's library lacks the functions (`why_no_heads`, `why_no_layer_rows`).
        """
        self.gives_hidden_rows, self._row_layers = True, layers
        for layer in layers:
            layer_rows().set_rows(self.handle, layer, True)
        if not layers:
            nextn().llama_set_embeddings_nextn(self.handle, True, self._is_head)  # a head: of tokens with logits only

    def hidden_rows(self, n: int) -> npt.NDArray[np.float32]:
        """The hidden rows of the last decode, float32[n, n_row], in batch order: one per token; for a head, one per
        output.

        `n_row` is n_embd times the number of `layers`, at least n_embd. The array may be a view of llama.cpp's buffer,
        valid until the next decode.
        """
        if self._part_hidden is not None:
            return self._part_hidden[:n]
        if not (self.gives_hidden_rows and 0 < n <= self._n_decoded):
            raise OutOfRange(f"{n} hidden rows were requested; the last decode produced at most {self._n_decoded}")
        if self._row_layers:
            rows = [layer_rows().get_rows(self.handle, layer) for layer in self._row_layers]
            n_embd = C.llama_model_n_embd(self.model.handle)
            return np.concatenate([np.ctypeslib.as_array(each, (n, n_embd)) for each in rows], axis=1)
        pointer = nextn().llama_get_embeddings_nextn(self.handle)
        if not pointer:
            raise LlamaError("llama.cpp returns no hidden rows for this model")
        address = ctypes.addressof(pointer.contents)
        if self._hidden_key != (address, n):
            self._hidden = np.ctypeslib.as_array(pointer, (n, self.model.n_embd))
            self._hidden_key = (address, n)
        return self._hidden

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]:
        """A copy of a sequence's vector from the last decode, float32[n_embd]; for a reranker, float32[n_scores]."""
        vector = C.llama_get_embeddings_seq(self.handle, self._native(seq_id))
        if not vector or not self._n_embd:
            raise LlamaError(f"the last decode produced no vector for sequence {seq_id}")
        row: npt.NDArray[np.float32] = np.ctypeslib.as_array(vector, (self._n_embd,)).copy()
        return row

    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """The token vectors of the last decode, float32[n_outputs, n_embd], in batch order; for pooling "none".

        `n_outputs`: the number of outputs of the batch. The array is a view of llama.cpp's buffer, valid until the next
        decode.
        """
        address = C.llama_get_embeddings(self.handle)
        if not address or not self._n_embd or not 0 < n_outputs <= self._n_outputs:
            raise LlamaError(f"the last decode did not produce vectors for {n_outputs} tokens")
        return np.ctypeslib.as_array(address, (n_outputs, self._n_embd))

    def enable_backend_sampling(self, n: int | None = None) -> bool:
        """From the next decode on, rows are their `n` largest logits, computed on the device: `self.backend_sampling`.

        `n`: None for 128, or the whole vocabulary if it is smaller. Decodes one token to find out whether the device
        supports it; if not, rows stay logits and the result is False. The context must be empty.
        """
        self.backend_sampling = backend = BackendSampling(
            self, n or min(MAX_CANDIDATES, self._n_vocab), n_vocab=self._n_vocab
        )
        assert self._owned
        self._owned.keep(backend.owned)
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
        tokens of the last decode, up to `n_rollback`, if that decode was a single ubatch: the same number of tokens of
        each sequence (with a sliding window in the unified layout: any number), and consecutive ascending seq_ids in
        the per-sequence layout.
        """
        native = self._native(seq_id)
        if start <= 0 and stop < 0:
            self._shifted.discard(seq_id)
        if (self._is_recurrent or self._n_swa) and not self._is_whole(seq_id, start, stop):
            last = self.last_position(seq_id)
            if start > last:
                return True
            if stop >= 0 or last - start >= self._rollback.removable(seq_id):
                return False  # llama.cpp would return True
            self._rollback.record_partial_removal(seq_id)
        else:
            self._rollback.record_removal(seq_id)
        return bool(C.llama_memory_seq_rm(self._open_memory(), native, start, stop))

    def remove_padding(self, seq_id: int, position: int) -> None:
        """Removes the tokens from `position` on, which the last decode computed: a whole sequence or its last token.

        Unlike `remove`, this works if a sliding window has dropped cells: the next token at this position needs no
        cells that the removed token did not need.
        """
        C.llama_memory_seq_rm(self._open_memory(), self._native(seq_id), position, -1)

    @property
    def can_shift(self) -> bool:
        """Whether `shift` works: the memory is all cells, and its keys can be rotated to other positions."""
        return not (self._is_recurrent or self._n_swa) and bool(C.llama_memory_can_shift(self._open_memory()))

    def shift(self, seq_id: int, start: int, by: int) -> None:
        """Adds `by` to the positions of a sequence from `start` on. No other sequence may share these cells.

        llama.cpp rotates the keys in the next decode; until then the sequence cannot be saved. Raises `OutOfRange`
        if `can_shift` is False (llama.cpp would abort), and for positions below 0.
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

        Unified layout: the cells are shared without a copy. Per-sequence layout: the data is copied. In the latter, and
        for recurrent models, only whole sequences can be copied: raises `OutOfRange` for a part.
        """
        native = self._native(source), self._native(target)
        if (self._is_recurrent or not self.kv_unified) and (start > 0 or stop >= 0):
            raise OutOfRange(f"positions {start} to {stop} were requested; this layout can only copy whole sequences")
        if self._rollback.is_pending(source):
            self.restore_sequence(target, self.save_sequence(source))
            return
        self._rollback.record_move()
        if not self.kv_unified:
            self._copy_sources.add(source)
            self._copy_targets.add(target)
        C.llama_memory_seq_cp(self._open_memory(), *native, start, stop)

    def share_prefix(self, source: int, target: int, n: int) -> None:
        """Replaces the first `n` positions of `target`, which must have the same tokens, by those of `source`.

        Raises `OutOfRange` if cells cannot be shared, or if either sequence has fewer positions.
        """
        native = self._native(source), self._native(target)
        if self._is_recurrent or self._n_swa or not self.kv_unified:
            raise OutOfRange(
                "sequences can share cells only in the unified layout, and only if all memory of the model is KV cells"
            )
        if not 0 < n <= 1 + min(self.last_position(source), self.last_position(target)):
            raise OutOfRange(f"{n} positions were requested; one of the sequences has fewer")
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

        Raises `LlamaError` if it was shifted or created as a copy after the last decode.
        """
        self._check_settled(seq_id)
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

    def _check_settled(self, seq_id: int) -> None:
        if seq_id in self._shifted:
            raise LlamaError(f"sequence {seq_id} was shifted, and its keys are rotated in the next decode")
        if seq_id in self._copy_targets:
            raise LlamaError(f"sequence {seq_id} is a copy; its cells are only copied in the next decode")

    def _state(self, native: int, n_tokens: int, flags: int = 0) -> SequenceState:
        data = np.empty(C.llama_state_seq_get_size_ext(self.handle, native, flags), np.uint8)
        written = C.llama_state_seq_get_data_ext(self.handle, _bytes_pointer(data), data.size, native, flags)
        if written == 0:
            raise LlamaError(f"the memory of llama.cpp's sequence {native} cannot be saved")
        n_window = 0
        if self._n_swa and not flags:  # the size of the second cache alone, with the same header as both together
            n_window = (
                C.llama_state_seq_get_size_ext(self.handle, native, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) - HEADER_BYTES
            )
        stream = 0 if self.kv_unified else native
        return SequenceState(
            data[:written], n_tokens, self._model_key, self._n_streams, stream, n_window, self.flash_attn,
            PLANAR_CELL_BYTES if self.model.n_dimensions > 1 else CELL_BYTES,
        )  # fmt: skip

    def restore_sequence(self, seq_id: int, state: SequenceState) -> None:
        """Replaces the contents of a sequence (any seq_id) by a saved state.

        The state may come from another context of the same model, in the other layout, with or without flash attention.
        Raises `OutOfRange` for a state of another model; `LlamaError` if too few cells are free, if the kinds of cache
        differ, or if a copy from or to this seq_id's stream is pending until the next decode. The sequence is empty
        then.
        """
        if state.model_key != self._model_key:
            raise OutOfRange(f"the state belongs to {state.model_key}; the context belongs to {self._model_key}")
        self.remove(seq_id)
        if state.n_tokens == 0:
            return
        if not self._set_state(seq_id, state, 0):
            self.remove(seq_id)
            raise LlamaError(f"no free cells to restore {state.n_tokens} tokens into sequence {seq_id}")

    def save_part(self, seq_id: int) -> SequenceState:
        """Copies the part of a sequence that cannot be truncated to host memory: cells of sliding windows, recurrent
        states.

        Raises `LlamaError` if the memory has no such part.
        """
        self._check_settled(seq_id)
        part = self._state(self._native(seq_id), self.last_position(seq_id) + 1, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if part.n_bytes <= HEADER_BYTES:
            raise LlamaError(f"the memory of sequence {seq_id} has no part that cannot be truncated")
        return part

    def restore_part(self, seq_id: int, part: SequenceState) -> None:
        """Truncates a sequence to the tokens of `part`, which must be its first ones: `save_part` of it or another one.

        Raises `OutOfRange` for a part of another model, or if the sequence has fewer cells; `LlamaError` if too few
        cells are free. The sequence is empty then.
        """
        native = self._native(seq_id)
        if part.model_key != self._model_key:
            raise OutOfRange(f"the part belongs to {part.model_key}; the context belongs to {self._model_key}")
        n = part.n_tokens
        restored = self._set_state(seq_id, part, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if not (restored and C.llama_memory_seq_rm(self._open_memory(), native, n, -1)):
            self.remove(seq_id)
            raise LlamaError(f"sequence {seq_id} cannot be truncated to its first {n} tokens")
        if self.last_position(seq_id) != n - 1:
            n_had = self.last_position(seq_id) + 1
            self.remove(seq_id)
            raise OutOfRange(f"sequence {seq_id} has {n_had} tokens and cannot be truncated to {n}")

    def first_cut(self, seq_id: int) -> int:
        """The minimum number of positions to which `cut` can currently truncate a sequence: the window before them
        still has all of its cells.

        Later decodes and restored parts reuse cells before the window, which raises the minimum. With recurrent states,
        it is larger than any sequence.
        """
        if self._is_recurrent:
            return INT32_MAX
        first = C.llama_memory_seq_pos_min(self._open_memory(), self._native(seq_id))
        return min(self.last_position(seq_id) + 1, first + self._n_swa) if first > 0 else 0

    def cut(self, seq_id: int, n: int) -> None:
        """Truncates a sequence to its first `n` positions. Below `first_cut`, empties it and raises `LlamaError`."""
        if n < self.first_cut(seq_id):
            self.remove(seq_id)
            raise LlamaError(f"the window of sequence {seq_id} no longer has all cells before position {n}")
        self._rollback.record_move()
        C.llama_memory_seq_rm(self._open_memory(), self._native(seq_id), n, -1)

    def copy_cut(self, source: int, target: int, n: int) -> SequenceState | None:
        """Makes an empty sequence hold the first `n` positions of `source`: the same cells with `shares_cells`, else
        a copy. Raises `LlamaError` below the `first_cut` of `source`. With `shares_cells`: returns the part."""
        if n < self.first_cut(source):
            raise LlamaError(f"the window of sequence {source} no longer has all cells before position {n}")
        if not self.shares_cells:
            if self.kv_unified:
                self.restore_sequence(target, self.save_sequence(source))
            else:
                self.copy(source, target)
            self.cut(target, n)
            return None
        C.llama_memory_seq_cp(self._open_memory(), self._native(source), self._native(target), 0, n)
        part = self.save_part(target)
        self.restore_part(target, part)  # window cells held by two sequences would never become free
        return part

    def share_cells(self, source: int, target: int, part: SequenceState) -> None:
        """Makes an empty sequence share the first cells of `source`: those of the tokens of `part`.

        Memory that cannot be shared comes from `part`. For the unified layout; raises as `restore_part` does.
        """
        if not self.shares_cells:
            raise OutOfRange("sequences can share cells only in the unified layout, and not with this architecture")
        native = self._native(source), self._native(target)
        C.llama_memory_seq_cp(self._open_memory(), *native, 0, part.n_tokens)
        self.restore_part(target, part)

    def _set_state(self, seq_id: int, state: SequenceState, flags: int) -> bool:
        if seq_id in self._copy_sources | self._copy_targets:
            self.remove(seq_id)
            raise LlamaError(f"the cells of sequence {seq_id} are only copied in the next decode")
        data = state.for_context(self._n_streams, self.flash_attn)
        self._rollback.record_move()
        n = C.llama_state_seq_set_data_ext(self.handle, _bytes_pointer(data), data.size, self._native(seq_id), flags)
        return bool(n == data.size)

    def read_state(self, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> SequenceState:
        """The state with this `data` and `form`, which must belong to this model."""
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

        llama.cpp only saves the state of seq_ids that may be in a batch; `save_sequence` uses the reserved one for the
        others.
        """
        if not 0 <= seq_id < self.n_seq_ids:
            raise OutOfRange(f"seq_id is {seq_id}; it must be 0 to {self.n_seq_ids - 1}")
        return seq_id if seq_id < self.n_seq_max else seq_id + 1

    def _open_memory(self) -> Any:
        self.handle  # noqa: B018  raises if the context is closed: its memory is freed
        return self._memory

    def close(self) -> None:
        """Frees the context. Repeated calls do nothing."""
        if self._owned is not None:
            self._owned.close()
            self._owned = self._memory = None
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
