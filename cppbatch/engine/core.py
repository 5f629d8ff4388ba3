"""The step loop of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Sized
from time import perf_counter, thread_time

from cppbatch.config import EngineConfig, KvLayout, disk_folder
from cppbatch.engine.access import OwnProcess
from cppbatch.engine.disk.folder import PrefixFolder
from cppbatch.engine.disk.prefixes import DiskPrefixes
from cppbatch.engine.disk.slots import Slots, StateKey, weight_files
from cppbatch.engine.input_processor import InputProcessor
from cppbatch.engine.kv.checkpoints import CheckpointPlaces
from cppbatch.engine.kv.layout_policy import LayoutPolicy, LayoutSwitch
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.kv.sharing import SHARING
from cppbatch.engine.observe.live_state import LiveEngine, live_engine
from cppbatch.engine.observe.metrics import EngineParts, EngineStats, Metrics
from cppbatch.engine.observe.trace import Trace
from cppbatch.engine.output_processor import OutputProcessor
from cppbatch.engine.request import FinishReason, GenerationRequest, ResumeState
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.engine.sampling import Sampler, SamplerOutput
from cppbatch.engine.sampling.sampler import Pooler
from cppbatch.engine.scheduler import PoolingScheduler, Scheduler
from cppbatch.engine.sequence import Seq, StepOutput
from cppbatch.engine.speculation.speculator import Speculator, max_draft_rows
from cppbatch.engine.step_budget import StepBudgets
from cppbatch.engine.step_plan import Scheduled, StepPlan
from cppbatch.engine.step_shape import step_shape
from cppbatch.engine.vocabulary import IsCancelled, never_cancelled
from cppbatch.errors import EngineClosed, InvalidRequest, LlamaError, QueueFull
from cppbatch.llama import Batch, EmbeddingBatch

log = logging.getLogger("cppbatch.engine")

_IDLE_S = 1.0


class EngineCore:
    """One model, one context, one batch that sequences join and leave at any step.

    A step: `Scheduler.plan` > `KVPool.apply` > `Batch.refill` > `llama_decode` > `Sampler.sample` >
    `OutputProcessor.accept`. Only one thread at a time may use it, except for `make_sequence` and `inputs`, which any
    thread may use until the engine is closed. After a step, another thread may convert the `outputs` to events.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[float], bool] | None = None,
        runtime: Runtime | None = None,
        policy: Callable[..., Scheduler] | None = None,
        on_plan: Callable[[StepPlan], object] | None = None,
        on_admitted: Callable[[list[StepOutput]], object] | None = None,
        survives_failures: bool = True,
        prepares_beside_steps: bool = False,
    ) -> None:
        """Loads a model. `progress` is called with 0.0 to 1.0; returning False aborts. `runtime`: a replacement for
        the model. `policy`: another scheduler.

        `on_plan`: called in every step with its plan, before llama.cpp is called. `on_admitted`: takes the outputs
        before llama.cpp is called, if they report the admission of a request (`usage_events`).
        `survives_failures`: if a batch fails, True ends its sequences with an error, and the others continue; False
        makes `step` raise. `prepares_beside_steps`: `make_sequence` may wait until sequences have ended, because
        another thread steps meanwhile. Raises `ModelError`, `ConfigError`, `LibraryError`, `LlamaError`.
        """
        self.config = config
        self.process = OwnProcess()
        self._on_plan, self._on_admitted, self._survives_failures = on_plan, on_admitted, survives_failures
        self._trace = Trace(config.trace) if config.trace else None
        self._weights = weight_files(config)
        self.runtime = runtime = runtime or load_runtime(config, progress)
        self.is_closed = False
        try:
            self._make_parts(config, runtime, policy, prepares_beside_steps=prepares_beside_steps)
        except BaseException:
            runtime.close()
            if self._trace:
                self._trace.close()
            raise

    def _make_parts(
        self,
        config: EngineConfig,
        runtime: Runtime,
        policy: Callable[..., Scheduler] | None,
        *,
        prepares_beside_steps: bool,
    ) -> None:
        context, info = runtime.context, runtime.info
        self._batch = Batch(context.n_batch)
        self._media_batch: EmbeddingBatch | None = None  # created for the first image
        budgets = StepBudgets(
            context.n_batch,
            config.target_itl_ms / 1000 if config.target_itl_ms else None,
            context.n_ubatch,
            prefer=config.prefer,
            rows_s=[(rows, ms / 1000) for rows, ms in config.step_ms],
            unified=context.kv_unified,
        )
        key = StateKey(info, config, runtime.state_settings, self._weights)
        self._disk = _open_disk(config, runtime, key, budgets)
        self.kv = KVPool(
            context,
            runtime.sharing,
            swap_bytes=config.swap_space << 20,
            cache_bytes=config.prefix_cache_ram << 20,
            cached_share=runtime.cached_share,
            # Moved cells are not exact: whether they are moved depends on the other sequences.
            shifts_cells=config.context_shift and context.can_shift and not config.deterministic,
            on_gpu=info.on_gpu,
            places=_checkpoint_places(config, runtime),
            tier=self._disk,
            reuse_costs=runtime.reuse_costs,
            token_s=budgets.prompt_token_s,
        )
        self.slots = Slots(self.kv, key)
        """Saves the cached prefixes of slots to files, and restores them."""
        layouts = runtime.layouts
        self._layout_policy = LayoutPolicy(layouts.stream_cells, layouts.n_cached) if layouts else None
        self._layout_before: KvLayout | None = None  # set during a switch, when the context may be closed
        self.inputs = InputProcessor(
            runtime.vocab,
            info,
            context_shift=config.context_shift,
            n_keep=config.n_keep,
            media=runtime.media,
            waits_for_room=prepares_beside_steps,
        )
        self._speculator = _speculator(config, runtime)
        shape = step_shape(
            self.kv,
            on_gpu=info.on_gpu,
            min_rows=runtime.min_rows,
            may_pad=runtime.may_pad,
            step_tokens=context.n_batch,
            ubatch_tokens=context.n_ubatch,
            max_draft_rows=max_draft_rows(info.n_vocab),
        )
        new_scheduler = policy or (PoolingScheduler if info.pooling else Scheduler)
        self.scheduler = new_scheduler(
            self.kv, budgets=budgets, shape=shape, n_parallel=config.n_parallel, speculator=self._speculator
        )
        self._sampler = (
            Pooler(context, each_token=info.pooling == "none") if info.pooling else Sampler(runtime.vocab, context)
        )
        self.metrics = Metrics(budgets.bare_costs, self._trace)
        self.outputs = OutputProcessor(runtime.vocab, self.metrics)
        self.sequences: dict[str, Seq] = {}
        """The waiting and running requests, by id."""

    # --- requests -----------------------------------------------------------------------------------------------

    def make_sequence(
        self,
        request: GenerationRequest,
        resume: ResumeState | None = None,
        *,
        cancelled: IsCancelled = never_cancelled,
        arrived_at: float | None = None,
        patient: bool = True,
    ) -> Seq:
        """Tokenises and validates a request.

        `resume`: the tokens that the request got from a crashed engine. With the same seed, the request continues with
        the same text, except that mirostat and adaptive-p restart their adaptation. `cancelled`: polled while a long
        text is tokenised; if it returns True, `RequestCancelled` is raised. `arrived_at`, `patient`: as in
        `InputProcessor.process`.

        Raises `InvalidRequest` for a request that can never run (an empty prompt, unknown token ids, too many tokens,
        an invalid grammar); `RequestCancelled`; `EngineClosed`.
        """
        if self.is_closed:
            raise EngineClosed("the engine is closed")
        sequence = self.inputs.process(request, cancelled, arrived_at=arrived_at, patient=patient)
        if resume:
            self.inputs.check_resumed(sequence, len(resume.tokens))
            sequence.resume(resume)
            self.outputs.resume(sequence)
        if self._disk:
            self._disk.refresh()
        return sequence

    def add(self, sequence: Seq, *, limited: bool = True) -> None:
        """Queues a prepared sequence. `limited`: raise `QueueFull` if `max_queue` sequences wait beside `n_parallel`
        that run or will be admitted by the next step.

        Raises `InvalidRequest` if its id is in use, `QueueFull`, `EngineClosed`.
        """
        limit = self.config.max_queue
        if limited and len(self.sequences) >= self.config.n_parallel + limit:
            raise QueueFull(limit, self.metrics.seconds_per_request())
        if self.is_closed:
            raise EngineClosed("the engine is closed")
        if sequence.id in self.sequences:
            raise InvalidRequest("id", f"{sequence.id!r} is already the id of a running request; choose another")
        if not self.scheduler.has_work:
            self.metrics.ends_idleness(sequence.arrived_at)
        self.sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its cells. Returns False if the request is neither waiting nor running."""
        sequence = self.sequences.get(request_id)
        if sequence is None or self._is_garbage:
            return False
        try:
            self._finish(sequence, FinishReason.CANCELLED)
        except BaseException:
            self.restart()
            raise
        return True

    def update(self, request_id: str, tokens: Sequence[int]) -> bool:
        """See `BatchInferenceEngine.update_request`."""
        if isinstance(tokens, str) or not isinstance(tokens, Sized):
            raise InvalidRequest("tokens", f"is {tokens!r:.80}; give a list of token ids")
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.request.task != "generate":
            raise InvalidRequest("id", f"{request_id!r} is an embedding request; only text can be continued")
        if sequence.is_scored:
            raise InvalidRequest(
                "id", f"{request_id!r} requests log-probabilities of its prompt; update it after its first token"
            )
        given = [piece.id for piece in self.inputs.tokens(list(tokens))]
        if len(given) > sequence.n_room:
            raise InvalidRequest("tokens", f"has {len(given)} ids, but there is room for only {sequence.n_room} more")
        try:
            if reason := self.outputs.extend(sequence, given):
                self._finish(sequence, reason)
        except BaseException:
            self.restart()
            raise
        return True

    def limit_threads(self, n: int) -> None:
        """Limits steps to `n` compute threads. No effect on a GPU, or if `n_threads` is given."""
        if self.runtime.threads and not self.config.n_threads:
            self.runtime.threads.limit(n)

    # --- the step loop ------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything or return events."""
        return self.scheduler.has_work or self.outputs.has_events

    def collecting_s(self) -> float:
        """Seconds for which a step loop should wait for more requests (`max_wait_ms`) before the next step.

        0 while any sequence runs, if n_parallel of them wait, and once the first has waited long enough.
        """
        most, scheduler = self.config.max_wait_ms / 1000, self.scheduler
        if not most or scheduler.running or not 0 < len(scheduler.waiting) < self.config.n_parallel:
            return 0.0
        first = min(sequence.arrived_at for sequence in scheduler.waiting)
        return max(0.0, first + most - perf_counter())

    def step(self) -> None:
        """Computes one batch. The results are in `outputs`. If this raises, all sequences wait (`restart`)."""
        scheduler, kv, metrics, disk = self.scheduler, self.kv, self.metrics, self._disk
        metrics.begin_step()
        if disk:
            disk.collect(kv.add_cached)
        try:
            if policy := self._layout_policy:
                switch = policy.choose_switch(
                    perf_counter(), kv.layout, scheduler.running, scheduler.waiting, scheduler.blocked
                )
                if switch:
                    self._switch_layout(policy, switch)
            plan = self._plan()
            if self._on_plan:
                self._on_plan(plan)
            kv.apply()
            if plan.all_scheduled:
                self._fill(plan)
                metrics.lap("fill")
                began = perf_counter()
                is_computed = self._decode(plan)
                decode_s = perf_counter() - began
                kv.remove_padding(plan.padding)
                if is_computed:
                    n_rows = self._batch.n_outputs
                    sampled = self._sampler.sample(plan, n_rows) if n_rows else []
                    metrics.lap("sample")
                    scheduler.computed(plan, perf_counter() - began, decode_s)
                    self._advance(plan, sampled)
        except BaseException:
            self.restart()
            raise
        if disk:
            if not plan.all_scheduled:
                disk.wait(0.02)  # seconds: commands wait meanwhile
            disk.after_step(kv.state_of)
        if not scheduler.has_work:
            self._check_kv()
            if self._trace:
                self._trace.flush()

    def restart(self) -> None:
        """Empties the KV cache after an exception (such as Ctrl-C). All sequences wait, and are recomputed.

        The accounting of an interrupted step may be incomplete, so it is rebuilt from scratch. Known tokens and events
        are kept, so texts do not change.
        """
        if self._layout_before:
            self._make_context(self._layout_before)
        self.kv.rebuild()
        for request_id in self.outputs.finished_ids():
            self.sequences.pop(request_id, None)  # its last event is queued already
        for sequence in self.sequences.values():
            sequence.restarted()
            if sequence.is_full:
                self._forget_drafts(sequence)
                sequence.shift()
        self.scheduler.restart(self.sequences.values())
        for sequence in [s for s in self.sequences.values() if s.max_new and s.n_left <= 0]:
            self._finish(sequence, FinishReason.LENGTH)

    def idle(self) -> float:
        """Runs deferred work while the engine is idle: writes a cached prefix to disk.

        Returns the maximum seconds until the next call, if there is no work until then.
        """
        if not self._disk:
            return _IDLE_S
        self._disk.collect(self.kv.add_cached)
        return self._disk.idle(self.kv.state_of)

    def _fill(self, plan: StepPlan) -> None:
        """Fills the batch with the step's tokens. Images are added when their turn comes (`_decode_media`)."""
        if plan.scheduled:
            self._batch.refill(plan.batch, n_rows=plan.n_rows)
            self._sampler.before_decode(plan)
        else:
            self._batch.clear()

    def _switch_layout(self, policy: LayoutPolicy, switch: LayoutSwitch) -> None:
        """Recreates the context in the other layout. Running sequences resume in the next step, with their states as
        far as `swap_space` holds them."""
        began = perf_counter()
        self.scheduler.preempt_all()
        self.kv.move_all_out()
        self._layout_before = self.kv.layout
        self._make_context(switch.layout)
        now = perf_counter()
        policy.switched(switch.layout, now, now - began)
        self.metrics.layout_switches += 1
        log.info("KV layout: switched to %s in %.0f ms; %s", switch.layout, 1000 * (now - began), switch.reason)

    def _make_context(self, layout: KvLayout) -> None:
        assert self.runtime.layouts
        sharing = self.runtime.layouts.change(layout)
        self.kv.memory_recreated(sharing)
        self.scheduler.layout_changed()
        self._layout_before = None

    def _plan(self) -> StepPlan:
        for sequence in self.scheduler.pop_expired(perf_counter()):
            self._finish(sequence, FinishReason.TIMEOUT)
        plan = self.scheduler.plan()
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
        if has_reports and self._on_admitted:
            self._on_admitted(self.outputs.take_outputs())

    def _follow(self, trace: Trace) -> None:
        scheduler, now = self.scheduler, perf_counter()
        trace.follow(scheduler.running, now)
        trace.count(now, running=len(scheduler.running), waiting=len(scheduler.waiting), cells=self.kv.n_used)

    def _decode(self, plan: StepPlan) -> bool:
        """Calls `llama_decode`. If that fails, ends the sequences of the batch with an error and returns False."""
        runtime, context = self.runtime, self.runtime.context
        try:
            if runtime.threads:
                context.use_threads(runtime.threads.now())
            context.use_adapters(plan.adapters)
            if plan.media:
                self._decode_media(plan.media)
            if plan.scheduled:
                context.decode(self._batch)
                if runtime.head:
                    runtime.head.computed(plan.batch)
        except LlamaError as error:
            if not self._survives_failures:
                raise
            log.error("step of %d tokens failed: %s", plan.n_tokens, error)
            for sequence, _ in plan.all_scheduled:
                sequence.error = str(error)
                self._finish(sequence, FinishReason.ERROR)
            return False
        finally:
            self.metrics.lap("decode", rows=plan.n_decode, prompt_tokens=plan.n_tokens - plan.n_decode)
        self.metrics.count_step(decode_rows=plan.n_decode, prompt_tokens=plan.n_tokens - plan.n_decode)
        return True

    def _decode_media(self, media: list[Scheduled]) -> None:
        """Computes images and audio: those with a causal mask in one batch, the others one at a time, since each must
        be in a single ubatch."""
        batch = self._media_batch
        if batch is None:
            first = media[0][0]
            n_embd, n_dimensions = first.media_vectors(1).shape[1], len(first.media_positions(1))
            batch = self._media_batch = EmbeddingBatch(self.runtime.context.n_batch, n_embd, n_dimensions)
        runs = {sequence: sequence.next_run for sequence, _ in media}
        causal = [(sequence, n) for sequence, n in media if not (run := runs[sequence]) or not run.is_whole]
        whole = [[(sequence, n)] for sequence, n in media if (run := runs[sequence]) and run.is_whole]
        for pieces in [causal, *whole] if causal else whole:
            batch.refill_vectors(pieces)
            self.runtime.context.decode_vectors(batch, causal=pieces is causal)

    def _check_kv(self) -> None:
        """Checks the accounting of the KV cache while the engine is idle, and rebuilds it if it is wrong."""
        try:
            self.kv.check()
        except AssertionError as error:
            log.error("the KV accounting is inconsistent (%s); rebuilding it. State:\n%s", error, self.kv.dump())
            self.kv.rebuild()

    def _advance(self, plan: StepPlan, sampled: list[SamplerOutput]) -> None:
        """Updates the accounting, appends the new tokens, and ends finished sequences."""
        outputs, work = plan.outputs(), self.scheduler.work(plan)
        n_accepted_before = self.metrics.accepted_tokens
        if plan.n_drafted:
            reasons = self._verify_drafts(plan, outputs, sampled)
        else:
            for sequence, n in plan.all_scheduled:
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
        self.metrics.end_step(work)
        if self._trace:
            self._follow(self._trace)

    def _report_prefill(self, plan: StepPlan) -> None:
        now = perf_counter()
        for sequence, _ in plan.all_scheduled:
            if sequence.request.usage_events != "end" and sequence.in_first_prefill:
                self.outputs.report(sequence, now)

    def _accept(self, sequence: Seq, output: SamplerOutput) -> FinishReason | None:
        """Appends a sampled token, and tokens forced by a grammar."""
        sequence.first_token_at = sequence.first_token_at or perf_counter()
        n_before = sequence.n_tokens
        reason = self.outputs.accept(sequence, output)
        self.metrics.generated_tokens += sequence.n_tokens - n_before + sequence.has_end_token
        return reason

    def _verify_drafts(
        self, plan: StepPlan, outputs: list[Seq], sampled: list[SamplerOutput]
    ) -> list[FinishReason | None]:
        """Appends the sampled tokens. If one equals the next token of the draft, the row after it is sampled too.

        So each token is sampled from the same logits, with the same random numbers, as without a draft. Returns the
        finish reasons of `outputs`.
        """
        rows, n_outputs = plan.rows(), self._batch.n_outputs
        metrics, in_cache = self.metrics, {}
        metrics.draft_steps += 1
        accepted: dict[Seq, int] = {}
        for sequence, n in plan.scheduled:
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
                    accepted[sequence] = accepted.get(sequence, 0) + n
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
        self._speculator.verified(accepted, seconds)
        return [reasons[sequence] for sequence in outputs]

    def _finish(self, sequence: Seq, reason: FinishReason) -> None:
        """Ends a sequence: frees its cells and seq_id, and queues its last event."""
        self.scheduler.finished(sequence, perf_counter())
        self._forget_drafts(sequence)
        self.kv.release(sequence, keep=reason is not FinishReason.ERROR and not self.is_closed)
        self.outputs.finish(sequence, reason, perf_counter())
        # Only now: a sequence interrupted before its last event is queued must run again.
        sequence.finished()
        if sequence.sampler:
            sequence.sampler.close()
        del self.sequences[sequence.id]
        self.metrics.finished[reason.value] += 1

    def _forget_drafts(self, sequence: Seq) -> None:
        if self._speculator:
            self._speculator.finished(sequence)

    # --- state and end ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start, and the current state."""
        return self._parts.stats()

    def live(self) -> LiveEngine:
        """The live state of the engine: sequences, queue and KV cell ownership."""
        return live_engine(self._parts)

    @property
    def _parts(self) -> EngineParts:
        return EngineParts(self.metrics, self.kv, self.scheduler, self.runtime.media)

    def close(self) -> None:
        """Cancels all requests and frees the model. Repeated calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if not self._is_garbage:
                self._end_requests()
        finally:
            self.free()

    def _end_requests(self) -> None:
        for request_id in list(self.sequences):
            self.cancel(request_id)
        if self._disk:
            self._disk.write_rest(5.0, self.kv.state_of)  # seconds: closing an engine waits for it
            self._disk.close()
        self._weights.close()
        self.outputs.keep()  # waiting threads get their last events
        self.kv.clear_cache()

    @property
    def _is_garbage(self) -> bool:
        """Whether the engine is in a reference cycle that is being collected: its contexts are freed first."""
        return self.runtime.context.is_closed and not self._layout_before

    def free(self) -> None:
        """Frees the model and ends child processes, for an engine that is not in use: requests get no last event, and
        cached prefixes are not written to disk. Any thread may call this, also during garbage collection."""
        self.is_closed = True
        if self.process.is_fork:
            return
        self.sequences.clear()
        if self._disk:
            self._disk.abandon()
        self.inputs.close()
        self._sampler.close()
        if self._speculator:
            self._speculator.close()
        self.runtime.close()
        if self._trace:
            self._trace.close()


def _checkpoint_places(config: EngineConfig, runtime: Runtime) -> CheckpointPlaces | None:
    most, min_step = config.ctx_checkpoints, config.checkpoint_min_step
    return CheckpointPlaces(runtime.vocab.markers, most=most, min_step=min_step) if most else None


def _speculator(config: EngineConfig, runtime: Runtime) -> Speculator | None:
    if not runtime.proposers:
        return None
    n_rollback = runtime.n_rollback
    most = min(config.draft_max, n_rollback or config.draft_max)
    return Speculator(runtime.proposers, most, one_group_only=n_rollback > 0, clock=thread_time, wall=perf_counter)


def _open_disk(config: EngineConfig, runtime: Runtime, key: StateKey, budgets: StepBudgets) -> DiskPrefixes | None:
    """Raises `ConfigError` if the folder is not writable."""
    where = disk_folder(config.prefix_cache_disk)
    if where is None or runtime.info.pooling or not SHARING[runtime.sharing].reuses:
        return None
    return DiskPrefixes(PrefixFolder(*where), key, budgets.prompt_token_s)
