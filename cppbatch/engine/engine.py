"""The engine and its step loop.

A step (`BatchInferenceEngine.compute`): `Scheduler.plan` > `KVPool.apply` > `Batch.refill` > `llama_decode` >
`Sampler.sample` > `OutputProcessor.accept`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from cppbatch.chat.chat_format import ChatFormat
from cppbatch.config import EngineConfig, EngineSettings, KvLayout, disk_folder, engine_config
from cppbatch.engine import offline, offline_chat
from cppbatch.engine.chat_requests import ChatFormats, ChatOptions, Conversation, PromptOrMessages
from cppbatch.engine.chat_results import ChatCompletion, ChatEvent, ChatStream
from cppbatch.engine.checkpoints import CheckpointPlaces
from cppbatch.engine.embeddings import Vector
from cppbatch.engine.input_processor import InputProcessor
from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.layout_policy import LayoutPolicy, LayoutSwitch
from cppbatch.engine.live_state import LiveEngine, live_engine
from cppbatch.engine.metrics import EngineParts, EngineStats, Metrics
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.output_processor import OutputProcessor
from cppbatch.engine.params import Params, SamplingParams, sampling_params
from cppbatch.engine.pooler import Pooler
from cppbatch.engine.prefix_disk.disk_prefixes import DiskPrefixes
from cppbatch.engine.prefix_disk.prefix_folder import PrefixFolder
from cppbatch.engine.request import (
    Completion,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Mapped,
    MediaPrompt,
    Prompt,
    RequestOptions,
    ResumeState,
    Task,
    TokenPiece,
)
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.engine.sampling import Sampler, SamplerOutput
from cppbatch.engine.scheduler import Chunk, PoolingScheduler, Scheduler, StepPlan
from cppbatch.engine.sequence import Seq
from cppbatch.engine.slots import Slots
from cppbatch.engine.speculation.speculator import Speculator, max_draft_rows
from cppbatch.engine.state_key import StateKey
from cppbatch.engine.trace import Trace
from cppbatch.engine.turns import Turns
from cppbatch.engine.vocabulary import IsCancelled, never_cancelled
from cppbatch.errors import ConfigError, EngineClosed, InvalidRequest, LlamaError, QueueFull
from cppbatch.llama import Batch, EmbeddingBatch, apply_builtin_template

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.engine")


_IDLE_S = 1.0
_DISK_WAIT_S = 0.02  # for a prefix that is read, when no sequence can compute anything: commands wait meanwhile
_LAST_WRITES_S = 5.0  # how long writing cached prefixes may delay the end of an engine


class BatchInferenceEngine:
    """Runs many requests in one llama.cpp context, as one batch that sequences join and leave at any step.

    Offline: `chat`, `generate`, `stream`, `map`, `embed`. Requests one by one: `add_request`, then `step` until
    `has_work` is False. For asyncio use `cppbatch.LocalEngine`, for many clients `cppbatch serve`.

    A context manager. Thread-safe: requests of several threads share the batches, and each call waits for at most a few
    steps of the others. Not for forked processes, where every call raises `EngineClosed`.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        progress: Callable[[float], bool] | None = None,
        runtime: Runtime | None = None,
        policy: Callable[..., Scheduler] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Loads a GGUF file.

        `settings`: fields of `EngineConfig` (n_ctx, n_parallel, n_gpu_layers ...). `progress`: called with 0.0 to 1.0
        while loading; returning False stops it. `runtime`: a computation in place of the model (tests). `policy`:
        another scheduler (benchmarks). Raises `ModelError`, `ConfigError`, `LibraryError`, `LlamaError`.
        """
        config = self.config = engine_config(model, settings)
        self._trace = Trace(config.trace) if config.trace else None
        self._runtime = runtime or load_runtime(config, progress)
        context = self._context = self._runtime.context
        self._vocab = self._runtime.vocab
        self._batch = Batch(context.n_batch)
        self._media_batch: EmbeddingBatch | None = None  # made for the first picture
        self.kv = KVPool(
            context,
            self._runtime.sharing,
            swap_bytes=config.swap_space << 20,
            cache_bytes=config.prefix_cache_ram << 20,
            cached_share=self._runtime.cached_share,
            # Cells that were moved are not exact: whether one moves them depends on the other sequences.
            shifts_cells=config.context_shift and context.can_shift and not config.deterministic,
            on_gpu=self._runtime.on_gpu,
            places=self._checkpoint_places(),
            token_s=lambda: self._scheduler.prompt_token_s,
        )
        self._layout_policy: LayoutPolicy | None = None  # the layout is fixed
        if (layouts := self._runtime.layouts) is not None:
            self._layout_policy = LayoutPolicy(layouts.stream_cells, layouts.n_cached)
        self._layout_before: KvLayout | None = None  # during a switch: the context may be closed
        self._inputs = InputProcessor(
            self._vocab,
            self.info,
            context_shift=config.context_shift,
            n_keep=config.n_keep,
            media=self._runtime.media,
        )
        policy = policy or (PoolingScheduler if self.info.pooling else Scheduler)
        target = config.target_itl_ms / 1000 if config.target_itl_ms else None
        self._speculator = self._make_speculator()
        self._scheduler = policy(
            self.kv,
            step_tokens=context.n_batch,
            ubatch_tokens=context.n_ubatch,
            n_parallel=config.n_parallel,
            target_step_s=target,
            prefer=config.prefer,
            may_pad=self._runtime.may_pad,
            on_gpu=self._runtime.on_gpu,
            min_rows=self._runtime.min_rows,
            rows_s=[(rows, ms / 1000) for rows, ms in config.step_ms],
            speculator=self._speculator,
            max_draft_rows=max_draft_rows(self.info.n_vocab),
        )
        self._sampler = (
            Pooler(context, each_token=self.info.pooling == "none")
            if self.info.pooling
            else Sampler(self._vocab, context)
        )
        self.metrics = Metrics(self._trace)
        self.outputs = OutputProcessor(self._vocab, self.metrics)
        """The queue of step outputs. After `compute` another thread may make events of them (`StepLoop`)."""
        self.turns = Turns()
        """All methods that change the engine take one, except `compute`."""
        key = StateKey(self.info, config, self._runtime.state_settings)
        self.slots = Slots(self.kv, key)
        """Saves the cached prefixes of slots to files, and restores them."""
        self._disk = self._open_disk(key)
        self._sequences: dict[str, Seq] = {}
        self._chat_formats = ChatFormats(self.info, apply_builtin_template)
        self._numbers = itertools.count(1)
        self._closed = False
        self.survives_failures = True
        """When a batch fails, True ends its sequences with an error, and the others go on; False makes `step` raise."""
        self.on_plan: Callable[[StepPlan], object] = lambda plan: None
        """Called in every step with the step's plan, before llama.cpp is called."""
        self.on_admitted: Callable[[], object] = lambda: None
        """Called before llama.cpp is called, when `outputs` reports the admission of a request (`usage_events`)."""

    def _checkpoint_places(self) -> CheckpointPlaces | None:
        most, min_step = self.config.ctx_checkpoints, self.config.checkpoint_min_step
        return CheckpointPlaces(self._vocab.markers, most=most, min_step=min_step) if most else None

    def _make_speculator(self) -> Speculator | None:
        proposers = self._runtime.proposers
        if not proposers:
            return None
        most, n_rollback = self.config.draft_max, self._runtime.n_rollback
        most = min(most, n_rollback or most)
        return Speculator(proposers, most, equal_only=n_rollback > 0, clock=thread_time)

    def _open_disk(self, key: StateKey) -> DiskPrefixes | None:
        """Raises `ConfigError` if the folder cannot be written."""
        folder = disk_folder(self.config.prefix_cache_disk)
        if folder is None or self.info.pooling or self.kv.cache.sharing == "none":
            return None
        prefixes = DiskPrefixes(self.kv, PrefixFolder(*folder), key, lambda: self._scheduler.prompt_token_s)
        self.kv.cache.disk = prefixes
        return prefixes

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._runtime.info

    def prepare(
        self,
        request: GenerationRequest,
        resume: ResumeState | None = None,
        *,
        cancelled: IsCancelled = never_cancelled,
    ) -> Seq:
        """Tokenises and validates a request. Any thread may call this, until the engine is closed.

        `resume`: the tokens that the request got from an engine that crashed. With the same seed the request
        continues with the same text, except that mirostat and adaptive-p start to learn again. `cancelled`: called now
        and then while a long text is tokenised; if it returns True, `RequestCancelled` is raised.

        Raises `InvalidRequest` for a request that can never run (an empty prompt, unknown token ids, too many tokens,
        a wrong grammar); `RequestCancelled`; `EngineClosed`.
        """
        self.turns.check_process()
        if self._closed:
            raise EngineClosed("the engine is closed")
        sequence = self._inputs.prepare(request, cancelled)
        if resume:
            sequence.resume(resume, perf_counter())
            self.outputs.resume(sequence)
        if self._disk:
            self._disk.refresh()
        return sequence

    def prepare_beside_steps(self) -> None:
        """From now on `prepare` may wait until sequences have ended, because a thread steps meanwhile."""
        if self._runtime.media:
            self._runtime.media.has_bound = True

    def is_quick(self, request: GenerationRequest) -> bool:
        """Whether `prepare` takes only milliseconds: a short text, and no grammar that must be compiled."""
        return self._inputs.is_quick(request)

    def tokens(
        self,
        text: str | list[int] | MediaPrompt,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        cancelled: IsCancelled = never_cancelled,
    ) -> list[TokenPiece]:
        """The tokens of a prompt, or the pieces of token ids. Any thread may call this, until the engine is closed.

        `add_special`: begin with BOS if the model wants it. `parse_special`: the text may contain control tokens. Both
        are so in a `MediaPrompt`; the tokens of its pictures and sounds have no bytes. `cancelled`: as in `prepare`.
        Raises `InvalidRequest` for unknown ids; `RequestCancelled`.
        """
        return self._inputs.tokens(text, add_special=add_special, parse_special=parse_special, cancelled=cancelled)

    def new_request_id(self) -> str:
        """An id that no request of this engine has: "request-1", "request-2" ..."""
        return next(new for n in self._numbers if (new := f"request-{n}") not in self._sequences)

    def add(self, sequence: Seq, *, limited: bool = True) -> None:
        """Queues a prepared sequence. `limited`: raise `QueueFull` if `max_queue` sequences wait already.

        Raises `InvalidRequest` when its id is in use, `QueueFull`, `EngineClosed`.
        """
        self.turns.run(lambda: self._add(sequence, limited=limited))

    def _add(self, sequence: Seq, *, limited: bool) -> None:
        limit = self.config.max_queue
        if limited and len(self._scheduler.waiting) >= limit:
            raise QueueFull(limit, self.metrics.seconds_per_request())
        if self._closed:
            raise EngineClosed("the engine is closed")
        if sequence.id in self._sequences:
            raise InvalidRequest("id", f"{sequence.id!r} is already the id of a running request; choose another")
        if not self._scheduler.has_work:
            self.metrics.ends_idleness(sequence.arrived_at)
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)

    def add_request(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        task: Task = "generate",
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queues a prompt (text or token ids) and returns the request's id. `step` returns its events.

        `task`, `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...).
        Raises `InvalidRequest`, `QueueFull`, `EngineClosed`.
        """
        if request_id is None:
            request_id = self.new_request_id()
        request = GenerationRequest(id=request_id, prompt=prompt, params=sampling_params(params), task=task, **options)
        self.add(self.prepare(request))
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its cells. Returns False if the request neither waits nor runs."""
        return self.turns.run(lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        with self._restart_if_interrupted():
            self._finish(sequence, FinishReason.CANCELLED)
        return True

    def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text of a request, as if the model had generated them; it continues from there.

        They are in the request's next event, and count as generated. Returns False if the request neither waits nor
        runs. Raises `InvalidRequest` for unknown ids, and for more tokens than its `max_tokens` and context leave.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Sized):
            raise InvalidRequest("tokens", f"is {tokens!r:.80}; give a list of token ids")
        return self.turns.run(lambda: self._update(request_id, tokens))

    def _update(self, request_id: str, tokens: Sequence[int]) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.request.task != "generate":
            raise InvalidRequest("id", f"{request_id!r} is an embedding request; only text can be continued")
        given = [piece.id for piece in self._inputs.tokens(list(tokens), add_special=False, parse_special=False)]
        if len(given) > sequence.n_room:
            raise InvalidRequest("tokens", f"has {len(given)} ids, but there is room for only {sequence.n_room} more")
        with self._restart_if_interrupted():
            if reason := self.outputs.extend(sequence, given):
                self._finish(sequence, reason)
        return True

    def limit_threads(self, n: int) -> None:
        """Steps use at most `n` compute threads from now on. No effect on a GPU, or where `n_threads` is given."""
        if self._runtime.threads and not self.config.n_threads:
            self._runtime.threads.limit(n)

    # --- the step loop ------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Seq]:
        """The running sequences, in order of rank."""
        return self._scheduler.running

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything or return events."""
        return self._scheduler.has_work or self.outputs.has_events

    def collecting_s(self) -> float:
        """Seconds for which a step loop should wait for more requests (`max_wait_ms`) before it computes the next step.

        0 while any sequence runs, when n_parallel of them wait, and when the first has waited long enough.
        """
        most, scheduler = self.config.max_wait_ms / 1000, self._scheduler
        if not most or scheduler.running or not 0 < len(scheduler.waiting) < self.config.n_parallel:
            return 0.0
        first = min(sequence.arrived_at for sequence in scheduler.waiting)
        return max(0.0, first + most - perf_counter())

    def step(self) -> list[GenerationEvent]:
        """Computes one batch and returns the new events of all requests, except those that another call waits for."""

        def step() -> list[GenerationEvent]:
            self.compute()
            return self.outputs.take_all()

        return self.turns.run(step)

    def compute(self) -> None:
        """Computes one batch. The results wait in `outputs`. For the one thread that uses the engine, or in a turn."""
        self.metrics.begin_step()
        if self._disk:
            self._disk.collect()
        with self._restart_if_interrupted():
            if policy := self._layout_policy:
                scheduler = self._scheduler
                switch = policy.wanted(
                    perf_counter(), self.kv.layout, scheduler.running, scheduler.waiting, scheduler.blocked
                )
                if switch:
                    self._switch_layout(policy, switch)
            plan = self._plan()
            self.on_plan(plan)
            self.kv.apply()
            if plan.pieces:
                self._fill(plan)
                self.metrics.lap("fill")
                began = perf_counter()
                is_computed = self._decode(plan)
                decode_s = perf_counter() - began
                self.kv.remove_padding(plan.padding)
                if is_computed:
                    sampled = self._sample(plan)
                    self._scheduler.computed(plan, perf_counter() - began, decode_s)
                    self._advance(plan, sampled)
        if self._disk:
            if not plan.pieces:
                self._disk.wait(_DISK_WAIT_S)
            self._disk.after_step()
        if not self._scheduler.has_work:
            self._check_kv()
            if self._trace:
                self._trace.flush()

    def idle(self) -> float:
        """Does what can wait until there is no work, in between two steps: writes a cached prefix to disk.

        Returns the seconds after which to call it again at the latest, if there is no work until then.
        """
        return self._disk.idle() if self._disk else _IDLE_S

    def _fill(self, plan: StepPlan) -> None:
        """Writes the batch of the step's tokens. Pictures are written when their turn comes (`_decode_media`)."""
        if plan.chunks:
            self._batch.refill(plan.batch, n_rows=plan.n_rows)
            self._sampler.prepare(plan)
        else:
            self._batch.clear()

    def _switch_layout(self, policy: LayoutPolicy, switch: LayoutSwitch) -> None:
        """Makes the context again in the other layout. Sequences that ran resume in the step that follows, with their
        states as far as `swap_space` holds them."""
        began = perf_counter()
        self._scheduler.preempt_all()
        self.kv.move_all_out()
        self._layout_before = self.kv.layout
        self._make_context(switch.layout)
        now = perf_counter()
        policy.switched(switch.layout, now, now - began)
        self.metrics.layout_switches += 1
        log.info("KV layout: switched to %s in %.0f ms; %s", switch.layout, 1000 * (now - began), switch.reason)

    def _make_context(self, layout: KvLayout) -> None:
        assert self._runtime.layouts
        sharing = self._runtime.layouts.change(layout)
        self.kv.memory_made_again(sharing)
        self._scheduler.layout_changed()
        self._layout_before = None

    def _plan(self) -> StepPlan:
        for sequence in self._scheduler.expired(perf_counter()):
            self._finish(sequence, FinishReason.TIMEOUT)
        plan = self._scheduler.plan()
        if plan.admitted:
            self._record_admissions(plan.admitted)
        self.metrics.lap("schedule")
        if self._trace:
            self._follow(self._trace)
        return plan

    def _record_admissions(self, admitted: list[Seq]) -> None:
        now, has_reports = perf_counter(), False
        for sequence in admitted:
            if sequence.admitted_at:  # it was preempted
                continue
            sequence.admitted_at = now
            self.metrics.count_wait(now - sequence.arrived_at)
            if sequence.request.usage_events != "end":
                self.outputs.report(sequence, now)
                has_reports = True
        if has_reports:
            self.on_admitted()

    def _follow(self, trace: Trace) -> None:
        scheduler, now = self._scheduler, perf_counter()
        trace.follow(scheduler.running, now)
        trace.count(now, running=len(scheduler.running), waiting=len(scheduler.waiting), cells=self.kv.n_used)

    def _decode(self, plan: StepPlan) -> bool:
        """Calls `llama_decode`. If that fails, ends the sequences of the batch with an error and returns False."""
        try:
            if self._runtime.threads:
                self._context.use_threads(self._runtime.threads.now())
            self._context.use_adapters(plan.adapters)
            if plan.media:
                self._decode_media(plan.media)
            if plan.chunks:
                self._context.decode(self._batch)
                if self._runtime.head:
                    self._runtime.head.computed(plan.batch)
        except LlamaError as error:
            if not self.survives_failures:
                raise
            log.error("step of %d tokens failed: %s", plan.n_tokens, error)
            for sequence, _ in plan.pieces:
                sequence.error = str(error)
                self._finish(sequence, FinishReason.ERROR)
            return False
        finally:
            self.metrics.lap("decode", rows=plan.n_decode, prompt_tokens=plan.n_tokens - plan.n_decode)
        self.metrics.count_step(decode_rows=plan.n_decode, prompt_tokens=plan.n_tokens - plan.n_decode)
        return True

    def _decode_media(self, media: list[Chunk]) -> None:
        """Computes pictures and sounds: those with a causal mask in one batch, each other one by itself, since all of
        it must be in one ubatch."""
        batch = self._media_batch
        if batch is None:
            first = media[0][0]
            n_embd, n_dimensions = first.media_vectors(1).shape[1], len(first.media_positions(1))
            batch = self._media_batch = EmbeddingBatch(self._context.n_batch, n_embd, n_dimensions)
        runs = {sequence: sequence.next_run for sequence, _ in media}
        causal = [(sequence, n) for sequence, n in media if not (run := runs[sequence]) or not run.is_whole]
        whole = [[(sequence, n)] for sequence, n in media if (run := runs[sequence]) and run.is_whole]
        for pieces in [causal, *whole] if causal else whole:
            batch.refill_vectors(pieces)
            self._context.decode_vectors(batch, causal=pieces is causal)

    @contextmanager
    def _restart_if_interrupted(self) -> Iterator[None]:
        """If the block raises (Ctrl-C, for example): empties the KV cache. All sequences wait, and are computed again.

        The accounting of an interrupted step may be incomplete, so it is rebuilt from nothing. Known tokens and events
        stay as they are, so no text changes.
        """
        try:
            yield
        except BaseException:
            if self._layout_before:
                self._make_context(self._layout_before)
            self.kv.rebuild()
            for request_id in self.outputs.ended():
                self._sequences.pop(request_id, None)  # its last event is queued already
            for sequence in self._sequences.values():
                sequence.restarted()
                if sequence.is_full:
                    self._forget_drafts(sequence)
                    sequence.shift()
            self._scheduler.restart(self._sequences.values())
            for sequence in [s for s in self._sequences.values() if s.max_new and s.n_left <= 0]:
                self._finish(sequence, FinishReason.LENGTH)
            raise

    def _check_kv(self) -> None:
        """Checks the accounting of the KV cache while nothing runs, and rebuilds it if it is wrong."""
        try:
            self.kv.check()
        except AssertionError as error:
            log.error("the KV accounting is inconsistent (%s); rebuilding it. State:\n%s", error, self.kv.dump())
            self.kv.rebuild()

    def _sample(self, plan: StepPlan) -> list[SamplerOutput]:
        sampled = self._sampler.sample(plan, self._batch.n_outputs) if self._batch.n_outputs else []
        self.metrics.lap("sample")
        return sampled

    def _advance(self, plan: StepPlan, sampled: list[SamplerOutput]) -> None:
        """Updates the accounting, appends the new tokens, and ends finished sequences."""
        outputs, work = plan.outputs(), self._scheduler.work(plan)
        n_accepted_before = self.metrics.accepted_tokens
        if plan.n_drafted:
            reasons = self._verify_drafts(plan, outputs, sampled)
        else:
            for sequence, n in plan.pieces:
                self.kv.computed(sequence, n)
            reasons = [self._accept(sequence, output) for sequence, output in zip(outputs, sampled, strict=True)]
        for sequence, reason in zip(outputs, reasons, strict=True):
            if reason:
                self._finish(sequence, reason)
                continue
            self.outputs.emit(sequence)
            if sequence.is_full:
                self._forget_drafts(sequence)
                self.kv.shift(sequence)
                self.metrics.context_shifts += 1
        if plan.n_tokens > plan.n_decode:
            self._report_prefill(plan)
        self.metrics.forced_tokens = self.outputs.n_forced_tokens
        if plan.n_drafted:
            work = work._replace(accepted=self.metrics.accepted_tokens - n_accepted_before)
        self.metrics.end_step(work, self._scheduler.bare_costs())
        if self._trace:
            self._follow(self._trace)

    def _report_prefill(self, plan: StepPlan) -> None:
        now = perf_counter()
        for sequence, _ in plan.pieces:
            if sequence.request.usage_events != "end" and sequence.in_first_prefill:
                self.outputs.report(sequence, now)

    def _accept(self, sequence: Seq, output: SamplerOutput) -> FinishReason | None:
        """Appends a sampled token, and those that a grammar forces."""
        sequence.first_token_at = sequence.first_token_at or perf_counter()
        n_before = sequence.n_tokens
        reason = self.outputs.accept(sequence, output)
        self.metrics.generated_tokens += sequence.n_tokens - n_before + sequence.has_end_token
        return reason

    def _verify_drafts(
        self, plan: StepPlan, outputs: list[Seq], sampled: list[SamplerOutput]
    ) -> list[FinishReason | None]:
        """Appends the sampled tokens. Where one is the next token of the draft, its row of logits is sampled too.

        So each token is sampled from the same logits, with the same random numbers, as without a draft. Returns the
        finish reasons of `outputs`.
        """
        rows, n_outputs = plan.rows(), self._batch.n_outputs
        metrics, in_cache = self.metrics, {}
        metrics.draft_steps += 1
        n_accepted_before = metrics.accepted_tokens
        for sequence, n in plan.chunks:
            in_cache[sequence] = sequence.n_computed + n
            sequence.n_drafted += len(sequence.draft)
            metrics.drafted_tokens += len(sequence.draft)
            self.kv.computed(sequence, min(n, sequence.n_pending))
        reasons: dict[Seq, FinishReason | None] = {}
        going_on, began = outputs, 0.0
        while going_on:
            following: list[Seq] = []
            next_rows: list[int] = []
            for sequence, row, output in zip(going_on, rows, sampled, strict=True):
                reasons[sequence] = self._accept(sequence, output)
                if n := sequence.verify_draft():
                    sequence.n_accepted += n
                    metrics.accepted_tokens += n
                    self.kv.computed(sequence, n)
                    if not (reasons[sequence] or sequence.n_pending):
                        following.append(sequence)
                        next_rows.append(row + n)
            going_on, rows = following, next_rows
            if going_on:
                assert isinstance(self._sampler, Sampler)
                began = began or perf_counter()
                sampled = self._sampler.sample_rows(going_on, rows, n_outputs)
        seconds = perf_counter() - began if began else 0.0
        for sequence, n in in_cache.items():
            if n > sequence.n_computed:
                self.kv.drop_draft(sequence)
        assert self._speculator
        self._speculator.verified(metrics.accepted_tokens - n_accepted_before, seconds)
        return [reasons[sequence] for sequence in outputs]

    def _finish(self, sequence: Seq, reason: FinishReason) -> None:
        """Ends a sequence: frees its cells and seq_id, and queues its last event."""
        self._scheduler.remove(sequence)
        self._forget_drafts(sequence)
        self.kv.release(sequence, keep=reason is not FinishReason.ERROR and not self._closed)
        self.outputs.finish(sequence, reason, perf_counter())
        # Only now: a sequence that is interrupted before its last event is queued must run again.
        sequence.finished()
        if sequence.sampler:
            sequence.sampler.close()
        del self._sequences[sequence.id]
        self.metrics.finished[reason.value] += 1

    def _forget_drafts(self, sequence: Seq) -> None:
        if self._speculator:
            self._speculator.finished(sequence)

    # --- offline inference --------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[PromptOrMessages],
        params: Params | Sequence[SamplingParams] = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        progress: bool = False,
        on_event: Callable[[int, GenerationEvent], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Continues all prompts, batched together. Returns the completions in the order of the prompts.

        `prompts`: texts, token ids, or lists of messages, whose completions are `ChatCompletion`s, as from `chat`.
        `params`: one for all prompts, or a list with one for each. `n`: completions of each prompt, which follow each
        other in the result; `best_of`: generate this many of each prompt, and return the `n` with the highest mean
        log-probability. `progress`: show the speed on stderr. `on_event`: called with the index of a completion and
        each of its events when it is made (completion i is that of prompt i, unless `n` or `best_of` is given).
        `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...) for all prompts.

        Raises `InvalidRequest` naming the prompt at fault, before any of them runs. Ctrl-C cancels all of them.
        """
        return offline.generate(
            self, prompts, params, n=n, best_of=best_of, progress=progress, on_event=on_event, options=options
        )

    @overload
    def chat(  # type: ignore[overload-overlap]  # a text is a sequence of texts, and means one conversation
        self,
        conversations: Conversation,
        params: Params = None,
        *,
        progress: bool = False,
        on_event: Callable[[int, ChatEvent], object] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        conversations: Sequence[Conversation],
        params: Params | Sequence[SamplingParams] = None,
        *,
        progress: bool = False,
        on_event: Callable[[int, ChatEvent], object] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[ChatCompletion]: ...

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params | Sequence[SamplingParams] = None,
        *,
        progress: bool = False,
        on_event: Callable[[int, ChatEvent], object] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion | list[ChatCompletion]:
        """Generates the assistant's next message of a conversation, or of each of several, batched together.

        A conversation is a list of OpenAI's messages, or a text, which is one message of the user. One conversation
        gives one result, a list of them a list in the same order:

            engine.chat("Why is the sky blue?").text
            engine.chat([{"role": "user", "content": "Hello"}], system="Answer in French.").message
            engine.chat([f"Translate: {text}" for text in texts], SamplingParams(max_tokens=50))

        The prompt is the model's own chat template, and the text is parsed as on the server: reasoning, answer, tool
        calls. `params`: one for all, or a list with one for each; its `json_schema` is that of the answer, before which
        the model may reason or call tools. `progress`, `on_event`: as in `generate`, with a `ChatEvent`. `options`:
        `system`, `tools`, `tool_choice` and the others of `ChatOptions`, and fields of `GenerationRequest`.

        Raises `InvalidRequest` naming the field or the conversation at fault, before any of them runs; `ConfigError`
        for an unknown `chat_template`. Ctrl-C cancels all of them.
        """
        return offline_chat.chat(self, conversations, params, progress=progress, on_event=on_event, options=options)

    def chat_stream(
        self, conversation: Conversation, params: Params = None, **options: Unpack[ChatOptions]
    ) -> ChatStream:
        """Generates the assistant's next message and yields its `ChatEvent`s as they are made.

        `with engine.chat_stream(messages) as stream:` cancels the message when the block is left, as `stream.close()`
        does. `stream.message` is the message so far. Arguments: as in `chat`, for one conversation. Raises
        `InvalidRequest`, `ConfigError`, and at the first event `QueueFull`.
        """
        return offline_chat.chat_stream(self, conversation, params, options)

    def chat_format(self, template: str | None = None) -> ChatFormat:
        """The format of the model's chats: its template, tool calls and reasoning, or those of another template.

        Raises `ConfigError` if there is no such template, `InvalidRequest` if the model's own is broken.
        """
        chat = self._chat_formats.get(template)
        if chat.token_ids is None:
            tokens = {marker: self.tokens(marker, add_special=False) for marker in chat.markers}
            self._chat_formats.add_tokens(chat, tokens)
        return chat

    def generate_grid(
        self,
        prompts: Sequence[PromptOrMessages],
        settings: Sequence[SamplingParams],
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[list[Completion]]:
        """Continues every prompt with each of the settings, batched together: `result[prompt][setting]`.

        A prompt is computed once for all its settings, if it has at least 25 tokens. `progress`, `options`, and what it
        raises: as in `generate`.
        """
        return offline.generate_grid(self, prompts, settings, progress=progress, options=options)

    def forward_batch(
        self, token_lists: Sequence[Sequence[int]], **options: Unpack[RequestOptions]
    ) -> npt.NDArray[np.float32]:
        """The logits of the next token after each list of token ids: float32[len(token_lists), n_vocab].

        The lists may have different lengths. Of an idle engine, n_parallel lists with n_ubatch tokens together are
        computed in one pass, and more than that in several. The logits are the model's own, before biases, penalties
        and filters. `options`: as in `generate`, but every token is computed, unless `cache_prompt=True` is given.

        Raises `InvalidRequest` naming the list at fault before any of them runs: an empty one, unknown token ids, or as
        many tokens as the context has; `GenerationFailed`.
        """
        return offline.forward_batch(self, token_lists, options)

    def stream(
        self, prompt: PromptOrMessages, params: Params = None, **options: Unpack[RequestOptions]
    ) -> Generator[GenerationEvent, None, None]:
        """Continues one prompt and yields its events as they are made. Other requests advance in the same steps.

        `prompt`: a text, token ids, or messages; `chat_stream` also tells reasoning and tool calls from the answer.
        `options`: fields of `GenerationRequest`. Closing the iterator cancels the request. Raises `InvalidRequest`, and
        at the first event `QueueFull`.
        """
        return offline.stream(self, prompt, params, options)

    def map(
        self,
        prompts: Iterable[PromptOrMessages | tuple[PromptOrMessages, SamplingParams]],
        params: Params = None,
        *,
        ordered: bool = False,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generator[Mapped, None, None]:
        """Continues prompts of an iterable, which may be endless, and yields each result as soon as it is complete.

        `prompts`: prompts as in `generate`, or pairs of a prompt and its own `SamplingParams`. They are taken from it
        only as fast as the engine computes: at most 2 * n_parallel of them are in the engine. `ordered`: results in the
        order of the prompts; at most 8 * n_parallel prompts are then taken but not returned, so one slow prompt can
        hold up the others. `progress`: show the speed on stderr, and the time left if `prompts` has a length.
        `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...) for all prompts.

        This is a generator: the engine steps while the next result is waited for, and may be used between two results.
        Other requests advance in the same steps; their events are kept for their own callers. Closing the generator, or
        an exception of the iterable, cancels the prompts that run.

        A prompt that cannot run becomes a result with an error, and the others go on. Raises `InvalidRequest` at once
        for what no prompt could run with; `EngineClosed`.
        """
        return offline.map_prompts(self, prompts, params, ordered=ordered, progress=progress, options=options)

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        normalise: bool = True,
        dimensions: int | None = None,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Vector:
        """The vectors of all texts in their order, float32[n, dimensions]; of a reranker, the scores of each `Pair`.

        `normalise`: vectors of length 1 (scores stay as they are). `dimensions`: keep the first numbers of each vector;
        see `cppbatch.engine.embeddings.normalised`. `progress`, `options`: as in `generate`.

        Raises `InvalidRequest` naming the text at fault, before any of them runs; `GenerationFailed` when a text gets
        no vector.
        """
        return offline.embed(
            self, texts, normalise=normalise, dimensions=dimensions, progress=progress, options=options
        )

    # --- state and end ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start, and the state now."""
        return self.turns.run(self._parts.stats)

    @property
    def _parts(self) -> EngineParts:
        return EngineParts(self.metrics, self.kv, self._scheduler, self._runtime.media)

    def live(self) -> LiveEngine:
        """What the engine does now: its sequences, its queue, who holds which KV cells."""
        return self.turns.run(lambda: live_engine(self._parts))

    def clear_prefix_cache(self) -> None:
        """Removes all cached prefixes. Their cells and host memory are free when this returns."""
        self.turns.run(self.kv.clear_cache)

    def close(self) -> None:
        """Cancels all requests and frees the model. Closing again does nothing, nor does closing in a fork."""
        if not self.turns.in_fork:
            self.turns.soon(self._close)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._sequences):
            self.cancel(request_id)
        if self._disk:
            self._disk.write_rest(_LAST_WRITES_S)
            self._disk.close()
        self.outputs.keep()  # threads that wait for events get the last ones
        self.clear_prefix_cache()
        self._inputs.close()
        self._sampler.close()
        if self._speculator:
            self._speculator.close()
        self._runtime.close()
        if self._trace:
            self._trace.close()

    def __enter__(self) -> BatchInferenceEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def generate_batch(  # noqa: PLR0917  # the positional form of the usual scripts
    model: str | Path | EngineConfig | BatchInferenceEngine,
    prompts: Sequence[Prompt],
    params: Params | Sequence[SamplingParams] = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    *,
    max_tokens: int | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    progress: bool = False,
    **settings: Unpack[EngineSettings],
) -> list[Completion]:
    """`BatchInferenceEngine.generate` as one call, of a loaded engine, or of a model that is loaded and freed here.

    `temperature` to `stop`: fields of `SamplingParams` for all prompts, in place of `params` or beside a number of
    tokens (`generate_batch(model, prompts, 50, 0.7, 0.9, 42)`). `settings`: fields of
    `EngineConfig` (n_ctx, n_parallel ...), for a model that is not loaded yet. Raises `ConfigError` if they are given
    with an engine, `InvalidRequest` if fields are given beside `params`, and what loading and `generate` raise.
    """
    fields = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in {**fields, "seed": seed, "stop": stop}.items() if value is not None}
    if isinstance(params, int) and max_tokens is None:
        given, params = {**given, "max_tokens": params}, None
    if given and params is not None:
        raise InvalidRequest("params", f"cannot be combined with {', '.join(given)}; set them in `params`")
    params = SamplingParams(**given) if given else params  # type: ignore[arg-type]  # checked by SamplingParams
    if isinstance(model, BatchInferenceEngine):
        if settings:
            raise ConfigError(
                f"{', '.join(settings)}: the engine is already loaded; pass these settings when creating it"
            )
        return model.generate(prompts, params, progress=progress)
    with BatchInferenceEngine(model, **settings) as engine:
        return engine.generate(prompts, params, progress=progress)
