"""The checks of one model in one layout. Each is a function that takes a `Subject` and returns a `Finding`.

All of them run with F32 weights and cells, without flash attention and on one thread, where texts do not depend on the
batch but for the order of sums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch import BatchInferenceEngine, EngineConfig, FinishReason, SamplingParams
from cppbatch.config import KvLayout
from cppbatch.engine.runtime import load_model, make_context, open_runtime
from cppbatch.errors import CppBatchError
from cppbatch.llama import Backend, Batch, Model
from cppbatch.models.draft_files import TARGETS
from cppbatch.sizing.buffers import Buffer, read_buffers
from cppbatch.sizing.estimate import estimate_memory
from tests.archs.rollback_schedules import run_schedule
from tests.support.fakes import know
from tests.support.replay import Replay

N_NEW = 20
N_SEQUENCES = 8
PREFIX = 120
"""Tokens that prompts have in common."""
_TIE = 1e-4
"""Of the range of the logits: two tokens this close may change places with the order of sums."""
_DIFFERENCE = 1e-3
"""Of the range of the logits: what the order of sums may change."""
_MEMORY_ERROR = 0.1
_SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": N_SEQUENCES, "n_batch": 256, "n_ubatch": 64, "n_threads": 1, "flash_attn": "off",
    "cache_type_k": "f32", "cache_type_v": "f32", "prefix_cache": False, "spec": "off",
}  # fmt: skip
_GREEDY = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)

Tokens = list[int]


class Finding(msgspec.Struct, frozen=True):
    """What a check found."""

    word: str
    """yes, or what fails."""
    detail: str = ""


class Subject:
    """A loaded model and a layout."""

    def __init__(self, path: Path, layout: KvLayout) -> None:
        """Raises `CppBatchError` where the model is refused."""
        self.config = EngineConfig(model_path=str(path), kv_layout=layout, **_SETTINGS)
        with Backend.get().lines() as lines:
            self.model: Model = load_model(self.config)
            with self.engine():
                pass
        self.buffers: list[Buffer] = read_buffers(lines)
        random = np.random.default_rng(7)
        self._random = random
        lengths = [5, 17, 33, 48, 64, 90, 130, 150]
        self.prompts = [self.tokens(n) for n in lengths]

    def tokens(self, n: int) -> Tokens:
        """Random token ids."""
        return [int(token) for token in self._random.integers(1, 100, n)]

    @contextmanager
    def engine(self, *, proposers: Sequence[Any] = (), **settings: Any) -> Iterator[BatchInferenceEngine]:
        """An engine with a separate context for the loaded model.

        `proposers`: in place of those that the settings give, where the model allows drafts.
        """
        config = msgspec.structs.replace(self.config, **settings)
        runtime = open_runtime(config, self.model)
        if proposers and runtime.proposers:
            runtime = msgspec.structs.replace(runtime, proposers=proposers)
        with BatchInferenceEngine(config, runtime=runtime, survives_failures=False) as engine:
            yield engine

    @cached_property
    def alone(self) -> list[Tokens]:
        """The text of each prompt in an engine that computes nothing else."""
        with self.engine() as engine:
            return [said(engine, prompt) for prompt in self.prompts]

    def compare(self, prompts: Sequence[Tokens], expected: Sequence[Tokens], got: Sequence[Tokens]) -> Finding:
        """Whether texts are equal but for near ties."""
        different = [i for i, text in enumerate(got) if text != expected[i]]
        if not different:
            return Finding("yes")
        gaps = []
        with self.engine() as engine:
            for i in different:
                at = next(
                    (k for k, pair in enumerate(zip(expected[i], got[i], strict=False)) if len(set(pair)) > 1), None
                )
                if at is None:
                    return Finding("differs", f"{len(got[i])} tokens in place of {len(expected[i])}")
                row = engine.forward_batch([[*prompts[i], *expected[i][:at]]])[0]
                gaps.append(abs(float(row[expected[i][at]] - row[got[i][at]])) / float(np.ptp(row)))
        detail = f"{len(got) - len(different)} of {len(got)} texts equal; largest gap {max(gaps):.1e} of the range"
        return Finding("yes" if max(gaps) < _TIE else "differs", detail)

    def close(self) -> None:
        self.model.close()


def said(engine: BatchInferenceEngine, prompt: Tokens, params: SamplingParams = _GREEDY) -> Tokens:
    return list(engine.generate([prompt], params)[0].tokens)


def check_alone(subject: Subject) -> Finding:
    """Texts are computed, and again the same."""
    with subject.engine() as engine:
        again = [said(engine, prompt) for prompt in subject.prompts]
        rows = engine.forward_batch(subject.prompts)
    if not np.isfinite(rows).all():
        return Finding("nan", "logits are not numbers")
    return subject.compare(subject.prompts, subject.alone, again)


def check_batch(subject: Subject) -> Finding:
    """Eight texts at once are those of each alone; so are three at a time, which do not share a ubatch equally."""
    got = []
    for n in (N_SEQUENCES, 3):
        with subject.engine(n_parallel=n) as engine:
            got += [list(each.tokens) for each in engine.generate(subject.prompts, _GREEDY)]
    return subject.compare(subject.prompts * 2, subject.alone * 2, got)


def check_swap(subject: Subject) -> Finding:
    """Sequences that are preempted every few steps, and saved to host memory, continue with the same text."""
    with subject.engine() as engine:
        texts: dict[str, Tokens] = {}
        for prompt in subject.prompts:
            texts[engine.add_request(prompt, _GREEDY)] = []
        steps = 0
        while engine.has_work:
            for event in engine.step():
                texts[event.request_id] += event.tokens
            steps += 1
            if steps % 5 == 0:
                engine.core.scheduler.preempt_all()
                engine.core.kv.apply()
        stats = engine.stats()
    if not stats.swaps:
        return Finding("differs", "nothing was swapped")
    return subject.compare(subject.prompts, subject.alone, list(texts.values()))


def check_prefix(subject: Subject) -> Finding:
    """Consecutive requests take their common prefix from the cache."""
    common = subject.tokens(PREFIX)
    prompts = [[*common, *subject.tokens(12)] for _ in range(N_SEQUENCES)]
    with subject.engine() as engine:
        expected = [said(engine, prompt) for prompt in prompts]
    with subject.engine(prefix_cache=True) as engine:
        results = [engine.generate([prompt], _GREEDY)[0] for prompt in prompts]
    return _with_cached(
        subject.compare(prompts, expected, [list(each.tokens) for each in results]),
        [each.usage.cached_tokens for each in results[1:]],
        PREFIX,
    )


def check_turns(subject: Subject) -> Finding:
    """Each turn of a conversation takes the last one from the cache; the first answer is left out of the history."""
    added = [subject.tokens(n) for n in (60, 25, 25, 25)]
    cached, found, history = [], [], list[int]()
    with subject.engine() as plain, subject.engine(prefix_cache=True) as engine:
        for i, tokens in enumerate(added):
            history += tokens
            expected = said(plain, history)
            result = engine.generate([history], _GREEDY)[0]
            found.append(subject.compare([history], [expected], [list(result.tokens)]))
            cached.append(result.usage.cached_tokens)
            if i:
                history += expected
    worst = next((each for each in found if each.word != "yes"), found[0])
    return _with_cached(worst, cached[1:], None)


def _with_cached(finding: Finding, cached: Sequence[int], most: int | None) -> Finding:
    """The finding of texts, with the tokens that were taken from the cache."""
    taken = f"cached {', '.join(map(str, cached))}" + (f" of {most}" if most else "")
    detail = f"{taken}; {finding.detail}" if finding.detail else taken
    if finding.word != "yes":
        return Finding(finding.word, detail)
    return Finding("yes" if min(cached) else "some" if max(cached) else "none", detail)


def check_samples(subject: Subject) -> Finding:
    """Eight samples of a prompt compute it once."""
    prompt, params = subject.tokens(100), SamplingParams(temperature=0.8, max_tokens=N_NEW, ignore_eos=True, seed=5)
    with subject.engine() as engine:
        expected = [list(each.tokens) for each in engine.generate([prompt], params, n=N_SEQUENCES)]
    with subject.engine(prefix_cache=True) as engine:
        got = [list(each.tokens) for each in engine.generate([prompt], params, n=N_SEQUENCES)]
        computed = engine.stats().prompt_tokens
    if computed > len(prompt) + 2 * N_SEQUENCES:
        return Finding("none", f"{computed} prompt tokens computed for a prompt of {len(prompt)}")
    n = sum(a == b for a, b in zip(expected, got, strict=True))
    detail = f"{computed} prompt tokens computed for a prompt of {len(prompt)}"
    return Finding("yes" if n == N_SEQUENCES else "differs", f"{detail}; {n} of {N_SEQUENCES} texts equal")


def check_drafts(subject: Subject) -> Finding:
    """Texts with drafts, of which some tokens are wrong, are those without."""
    with subject.engine(spec="auto", proposers=[Replay()]) as engine:
        if not engine.core.runtime.proposers:
            return Finding("none", "the state cannot be set back")
        know(engine, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
        for _ in range(2):
            results = engine.generate(subject.prompts, _GREEDY)
        first = [list(each.tokens) for each in results]
        stats = engine.stats()
    finding = subject.compare(subject.prompts, subject.alone, first)
    detail = f"{stats.accepted_tokens} of {stats.drafted_tokens} draft tokens accepted; {finding.detail}"
    if finding.word == "yes" and not 0 < stats.accepted_tokens < stats.drafted_tokens:
        return Finding("none", detail)
    return Finding(finding.word, detail)


def check_suffix_drafts(subject: Subject) -> Finding:
    """The same with drafts of text that occurred before, for prompts that repeat themselves, with cached prefixes."""
    with subject.engine(spec="auto", prefix_cache=True) as engine:
        if not engine.core.runtime.proposers:
            return Finding("none", "the state cannot be set back")
        know(engine, {1: 0.010, 256: 0.011})
        prompts = [subject.tokens(9) * 4 for _ in range(N_SEQUENCES)]
        got = [list(each.tokens) for _ in range(2) for each in engine.generate(prompts, _GREEDY)]
        drafted = engine.stats().drafted_tokens
    with subject.engine() as engine:
        expected = [said(engine, prompt) for prompt in prompts] * 2
    finding = subject.compare(prompts * 2, expected, got)
    return Finding(finding.word, f"{drafted} draft tokens; {finding.detail}")


def check_rollback(subject: Subject) -> Finding:
    """Logits after random drafts are those without, regardless of which are removed and in which order."""
    outcome = run_schedule(subject.model, unified=subject.config.kv_layout == "unified", seed=0)
    if outcome is None:
        return Finding("yes", "nothing is removed: cells alone, or no drafts")
    detail = f"{outcome.removed} tokens removed, {outcome.refused} times refused, difference {outcome.difference:.1e}"
    return Finding("yes" if outcome.difference < _DIFFERENCE else "differs", detail)


def check_layer_rows(subject: Subject) -> Finding:
    """The rows of a batch that EAGLE-3 and DFlash read are those of each sequence alone, where there are any."""
    model, prompts = subject.model, subject.prompts[:3]
    if model.architecture not in TARGETS:
        return Finding("yes", "not exported")
    last = model.n_layers - 1
    with make_context(subject.config, model) as context:
        context.give_hidden_rows((0, last // 2, last))

        def rows_of(seq_ids: Sequence[int]) -> npt.NDArray[np.float32]:
            context.clear()
            batch = Batch(context.n_batch)
            for seq_id in seq_ids:
                batch.add_run(np.array(prompts[seq_id], np.int32), 0, seq_id, n_logits=1)
            context.decode(batch)
            return np.array(context.hidden_rows(batch.n_tokens))

        together, alone = rows_of(range(len(prompts))), np.concatenate([rows_of([i]) for i in range(len(prompts))])
    difference = float(np.abs(together - alone).max() / np.abs(alone).max())
    return Finding("yes" if difference < _DIFFERENCE else "differs", f"difference {difference:.1e}")


def check_full_cache(subject: Subject) -> Finding:
    """More work than there are cells: every request ends, and with the same text."""
    small = 512 if subject.config.kv_layout == "unified" else subject.config.n_ctx
    prompts = [*subject.prompts] * 3
    with subject.engine(n_ctx=small, prefix_cache=True) as engine:
        results = engine.generate(prompts, _GREEDY)
        engine.core.kv.check()
    ended = sum(each.finish_reason == FinishReason.LENGTH for each in results)
    if ended < len(prompts):
        return Finding("lost", f"{ended} of {len(prompts)} requests ended")
    return subject.compare(prompts, subject.alone * 3, [list(each.tokens) for each in results])


def check_shift(subject: Subject) -> Finding:
    """A text that is longer than its context continues without its oldest tokens."""
    with subject.engine(n_ctx=256, n_parallel=1, context_shift=True) as engine:
        result = engine.generate([subject.tokens(100)], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        shifts, moves = engine.stats().context_shifts, engine.core.runtime.context.can_shift
    n = len(result[0].tokens)
    if n < 300 or not shifts:
        return Finding("none", f"ended after {n} of 300 tokens, {shifts} shifts")
    return Finding("yes" if moves else "again", f"{shifts} shifts, {'cells moved' if moves else 'computed again'}")


def check_slots(subject: Subject) -> Finding:
    """A cached prefix that was saved to a file is one of another engine, and so is a prefix on disk."""
    prompt, more = subject.tokens(100), subject.tokens(10)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slot.bin"
        disk: dict[str, Any] = {"prefix_cache": True, "prefix_cache_disk": f"{folder}/disk"}
        with subject.engine(**disk) as engine:
            assert engine.core._disk
            engine.core._disk._min_tokens = 20  # these models have 256 tokens, fewer than a file has
            engine.generate([prompt], _GREEDY, id_slot=0)
            answer = said(engine, prompt)
            engine.core.slots.write(file, engine.core.slots.take(0))
        longer = [*prompt, *answer, *more]
        with subject.engine() as engine:
            expected = said(engine, longer)
        slots_only: dict[str, Any] = {"prefix_cache": True}
        for settings in (slots_only, disk):
            with subject.engine(**settings) as engine:
                if engine.core._disk:
                    engine.core._disk._min_tokens = 20
                if settings is not disk:
                    engine.core.slots.put(0, engine.core.slots.read(file))
                result = engine.generate([longer], _GREEDY)[0]
            taken.append(result.usage.cached_tokens)
            finding = subject.compare([longer], [expected], [list(result.tokens)])
            if finding.word != "yes":
                return Finding(finding.word, finding.detail)
    return Finding("yes" if min(taken) > 0 else "none", f"cached {taken[0]} from the file, {taken[1]} from the disk")


def check_memory(subject: Subject) -> Finding:
    """The estimate of cells, states and buffers is what llama.cpp allocates."""
    (footprint,) = estimate_memory([subject.config]).footprints
    if footprint.error:
        return Finding("none", footprint.error)
    words = []
    for kind in ("cells", "states", "compute"):
        predicted, actual = (
            sum(b.n_bytes for b in buffers if b.kind == kind) for buffers in (footprint.buffers, subject.buffers)
        )
        if abs(predicted - actual) > max(_MEMORY_ERROR * actual, 20_000):  # the log rounds to 0.01 MiB
            return Finding("differs", f"{kind}: {predicted:,} bytes in place of {actual:,}")
        if actual:
            words.append(f"{kind} {actual:,}")
    return Finding("yes", ", ".join(words))


def check_vectors(subject: Subject) -> Finding:
    """With a pooling, vectors of texts are the same alone and among others."""
    try:
        with subject.engine(pooling="mean") as engine:
            together = engine.embed(subject.prompts)
            alone = np.concatenate([engine.embed([prompt]) for prompt in subject.prompts])
    except CppBatchError as error:
        return Finding("none", str(error))
    if not np.isfinite(together).all():
        return Finding("nan", "vectors are not numbers")
    cosine = float((together * alone).sum(axis=1).min())
    return Finding("yes" if cosine > 0.9999 else "differs", f"least cosine {cosine:.6f}")


CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "alone": check_alone,
    "batch": check_batch,
    "swap": check_swap,
    "prefix": check_prefix,
    "turns": check_turns,
    "samples": check_samples,
    "drafts": check_drafts,
    "suffix": check_suffix_drafts,
    "rollback": check_rollback,
    "rows": check_layer_rows,
    "full": check_full_cache,
    "shift": check_shift,
    "slots": check_slots,
    "memory": check_memory,
    "vectors": check_vectors,
}
