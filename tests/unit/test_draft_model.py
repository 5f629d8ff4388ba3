"""The draft model's cells follow the sequences whatever happens to them, and drafts are the text it would write."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pytest

from cppbatch import GenerationRequest
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_model import DraftModel, DraftModelProposer, most_likely
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.errors import DecodeFailed
from cppbatch.llama import Batch
from tests.support.fakes import EOG, LIKELIEST_FIRST, N_VOCAB, FakeContext, mood
from tests.support.randomised import seeds
from tests.support.virtual_time import Clock

PROMPT = list(range(1, 7))


class TimedContext(FakeContext):
    """A decode takes 10 ms, and 1 ms for each token."""

    clock: Clock

    def decode(self, batch: Batch) -> None:
        super().decode(batch)
        self.clock.now += 0.01 + 0.001 * batch.n_tokens


class Drafting:
    """A proposer over a fake context, with sequences of tokens that the test chooses."""

    def __init__(self, *, n_ctx: int = 256, n_batch: int = 64, n_parallel: int = 4, longest: int = 256) -> None:
        self.context = TimedContext(
            n_ctx=n_ctx, n_batch=n_batch, n_seq_max=n_parallel, kv_unified=True, sharing="cells"
        )
        self.clock = self.context.clock = Clock(tick=1e-6)
        self.proposer = DraftModelProposer(DraftModel(self.context, longest), EOG, clock=self.clock)
        self._ids = 0

    def sequence(self, prompt: Sequence[int] = PROMPT, *, salt: str = "", cache_prompt: bool = True) -> Seq:
        self._ids += 1
        request = GenerationRequest(id=str(self._ids), prompt=list(prompt), cache_salt=salt, cache_prompt=cache_prompt)
        return Seq(request, np.asarray(prompt, np.int32), max_new=500, seed=0, now=0.0)

    def propose(self, sequences: Sequence[Seq], most: int | Sequence[int] = 4) -> list[Draft | None]:
        lengths = [most] * len(sequences) if isinstance(most, int) else most
        drafts = self.proposer.propose(sequences, lengths)
        self.check()
        return drafts

    def first_draft(self, sequences: Sequence[Seq], most: int = 4) -> list[Draft | None]:
        """The drafts once all prompts are read."""
        for _ in range(100):
            drafts = self.propose(sequences, most)
            if all(drafts):
                return drafts
        raise AssertionError("the prompts are never read")

    def check(self) -> None:
        """The accounting matches the context."""
        context, cells = self.context, self.proposer.cells
        for draft in cells.all:
            expected = bytes(draft.tokens[: draft.n_known].tolist()) + bytes(draft.guessed)
            assert bytes(context.cells[draft.seq_id]) == expected
            if draft.sequence:
                assert draft.tokens is draft.sequence.tokens
                assert draft.n_known <= draft.sequence.n_tokens
                assert cells.get(draft.sequence) is draft
        assert cells.n_free == context.n_ctx - context.n_used


def likeliest(tokens: Sequence[int], n: int = 1) -> list[int]:
    """What the fake model writes, up to the end of the text."""
    written: list[int] = []
    for _ in range(n):
        written.append(LIKELIEST_FIRST[mood(bytes([*tokens, *written]))][0])
        if written[-1] in EOG:
            break
    return written


def known(sequence: Seq) -> list[int]:
    tokens: list[int] = sequence.tokens[: sequence.n_tokens].tolist()
    return tokens


def add(sequence: Seq, tokens: Sequence[int]) -> None:
    for token in tokens:
        sequence.append(token)


def other_than(token: int) -> int:
    return (token + 1) % min(EOG)


@pytest.fixture
def drafting() -> Drafting:
    return Drafting()


# --- drafts -------------------------------------------------------------------------------------------------------


def test_a_draft_is_what_the_draft_model_would_write(drafting: Drafting) -> None:
    sequences = [drafting.sequence([i, *PROMPT]) for i in range(4)]
    drafts = drafting.propose(sequences)
    for sequence, draft in zip(sequences, drafts, strict=True):
        assert draft
        assert draft.tokens.tolist() == likeliest(known(sequence), 4)
        assert draft.tokens.dtype == np.int32


def test_all_sequences_are_drafted_for_together(drafting: Drafting) -> None:
    drafting.propose([drafting.sequence([i, *PROMPT]) for i in range(4)], [1, 2, 3, 3])
    assert [len(step) for step in drafting.context.steps] == [4, 3, 2]


def test_no_draft_is_longer_than_asked_for_and_none_leaves_a_sequence_alone(drafting: Drafting) -> None:
    drafts = drafting.propose([drafting.sequence([i, *PROMPT]) for i in range(3)], [1, 0, 3])
    assert [len(draft.tokens) if draft else 0 for draft in drafts] == [1, 0, 3]
    assert len(drafting.context.steps[0]) == 2


def test_a_draft_ends_with_the_end_of_the_text(drafting: Drafting) -> None:
    ending = next(p for p in ([a, b] for a in range(50) for b in range(50)) if likeliest(p)[0] in EOG)
    (draft,) = drafting.propose([drafting.sequence(ending)])
    assert draft
    assert draft.tokens.tolist() == likeliest(ending)


def test_a_draft_ends_before_a_token_that_is_not_probable(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def less_and_less_certain(n: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        nonlocal computed
        computed += 1
        rows = np.zeros((n, N_VOCAB), np.float32)
        rows[:, 7] = 10.0 if computed < 3 else 0.5
        return rows

    monkeypatch.setattr(drafting.context, "logits", less_and_less_certain)
    (draft,) = drafting.propose([drafting.sequence()], 10)
    assert draft
    assert (draft.tokens.tolist(), computed) == ([7, 7], 3)
    assert draft.probabilities.tolist() == pytest.approx([0.99, 0.99], abs=0.01)


def test_drafting_ends_where_a_decode_takes_longer_than_the_tokens_save(drafting: Drafting) -> None:
    """A decode of the draft model takes 11 to 14 ms: with tokens of 1 ms its first token is all that is drafted."""
    sequences = [drafting.sequence([i, *PROMPT]) for i in range(4)]
    drafting.first_draft(sequences)
    lengths = {}
    for token_s in (0.0, 0.001, 1.0):
        for sequence in sequences:
            add(sequence, likeliest(known(sequence)))
        drafting.proposer.token_s = token_s
        lengths[token_s] = [len(draft.tokens) for draft in drafting.propose(sequences) if draft]
    assert lengths[0.001] == [1] * 4
    assert sum(lengths[0.0]) > 8  # the others end where a text ends
    assert sum(lengths[1.0]) > 8


def test_a_sequence_is_at_most_as_long_as_the_draft_models_context() -> None:
    drafting = Drafting(longest=len(PROMPT) + 2)
    sequence = drafting.sequence()
    (draft,) = drafting.propose([sequence], 10)
    assert draft
    assert len(draft.tokens) == 3  # the last one is in no cell
    add(sequence, draft.tokens.tolist())
    assert drafting.propose([sequence], 10) == [None]


@pytest.mark.parametrize("n_vocab", [50, 49_152, 128_256, 151_937])
def test_the_probability_of_the_most_likely_token_is_nearly_exact(n_vocab: int) -> None:
    chance = np.random.default_rng(0)
    rows = chance.normal(0, 2, (40, n_vocab)).astype(np.float32)
    for i, row in enumerate(rows):  # from nearly certain ones to flat ones
        row[chance.permutation(n_vocab)[:20]] += np.linspace(20 - i / 2, 10 - i / 4, 20)
    tokens, found = most_likely(rows)
    shares = np.exp(rows - rows.max(axis=1, keepdims=True), dtype=np.float64)
    exact = 1 / shares.sum(axis=1)
    assert tokens == rows.argmax(axis=1).tolist()
    for p, q in zip(found, exact.tolist(), strict=True):
        assert p >= q * (1 - 1e-5)
        assert p <= q * (1.3 if q > 0.4 else 4)  # a real text: 1.19 at most, with 49,152 tokens


# --- following ----------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_computed(drafting: Drafting) -> None:
    sequence = drafting.sequence()
    (draft,) = drafting.propose([sequence], 3)
    assert draft
    for n_right in (0, 1, 2, 3, 3, 1):
        drafted = draft.tokens.tolist()
        right = drafted[:n_right]
        wrong = other_than(likeliest([*known(sequence), *right])[0])
        add(sequence, [*right, wrong])
        drafting.context.steps.clear()
        (draft,) = drafting.propose([sequence], 3)
        assert draft
        assert draft.tokens.tolist() == likeliest(known(sequence), 3)
        assert drafting.context.steps[0] == {0: 2 if right == drafted else 1}


def test_a_step_that_used_no_draft_changes_nothing(drafting: Drafting) -> None:
    sequence = drafting.sequence()
    first, second = (drafting.propose([sequence])[0] for _ in range(2))
    assert first
    assert second
    assert first.tokens.tolist() == second.tokens.tolist()


@seeds(ring=20, nightly=60)
def test_the_cells_follow_sequences_that_come_pause_and_end_at_random(seed: int) -> None:
    draw = random.Random(seed)
    drafting = Drafting(n_ctx=draw.choice((48, 96, 256)), n_batch=draw.choice((4, 16, 64)), longest=60)
    stems = [[draw.randrange(50) for _ in range(draw.choice((5, 12, 25)))] for _ in range(2)]
    running: list[Seq] = []
    for _ in range(60):
        drafting.clock.now += draw.choice((0.0, 0.001, 1.0))
        if len(running) < 4 and draw.random() < 0.4:
            prompt = [*draw.choice(stems), *(draw.randrange(50) for _ in range(draw.randrange(1, 4)))]
            running.append(drafting.sequence(prompt, salt=draw.choice("ab"), cache_prompt=draw.random() < 0.8))
        chosen = [sequence for sequence in running if draw.random() < 0.8]
        most = [draw.randrange(6) for _ in chosen]
        drafts = drafting.propose(chosen, most)
        for sequence, draft, k in zip(chosen, drafts, most, strict=True):
            drafted = draft.tokens.tolist() if draft else []
            assert drafted == likeliest(known(sequence), k)[: len(drafted)]
            assert len(drafted) <= k
            n_right = draw.randint(0, len(drafted))
            add(sequence, [*drafted[:n_right], draw.randrange(50)])
        for sequence in [s for s in running if s.n_tokens > 50 or draw.random() < 0.05]:
            running.remove(sequence)
            drafting.proposer.finished(sequence)
            drafting.check()
    for sequence in running:
        drafting.proposer.finished(sequence)
    drafting.check()
    assert all(draft.sequence is None for draft in drafting.proposer.cells.all)
    assert not drafting.proposer._followed


# --- prompts ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_read_in_pieces_and_drafted_for_then() -> None:
    drafting = Drafting()
    sequence, short = drafting.sequence([i % 50 for i in range(100)]), drafting.sequence()
    steps = 0
    while drafting.propose([sequence, short])[0] is None:
        steps += 1
        assert max(drafting.context.steps[-4].values(), default=0) <= 32
    assert 2 <= steps <= 4


def test_other_sequences_are_drafted_for_while_a_prompt_is_read(drafting: Drafting) -> None:
    drafts = drafting.propose([drafting.sequence([i % 50 for i in range(100)]), drafting.sequence()])
    assert [draft is not None for draft in drafts] == [False, True]


def test_more_is_read_the_longer_the_step_of_the_model_took(drafting: Drafting) -> None:
    for n in (32, 64, 128):
        drafting.proposer.cost.observe_prompt(n, 0.001 * n)
    read = []
    for seconds in (0.001, 0.02, 10.0):
        sequence = drafting.sequence([int(1000 * seconds) % 50, *(i % 50 for i in range(100))])
        drafting.context.steps.clear()
        drafting.clock.now += seconds
        drafting.propose([sequence])
        read.append(sum(drafting.context.steps[0].values()))
        drafting.proposer.finished(sequence)
    assert 32 == read[0] < read[1] < read[2] == drafting.context.n_batch


def test_a_common_prefix_is_read_once_and_its_cells_are_shared() -> None:
    drafting = Drafting(n_ctx=128)
    stem = [i % 50 for i in range(60)]
    sequences = [drafting.sequence([*stem, i, i]) for i in range(4)]
    drafts = drafting.first_draft(sequences)
    assert [draft.tokens.tolist() for draft in drafts if draft] == [likeliest(known(s), 4) for s in sequences]
    assert sum(sum(step.values()) for step in drafting.context.steps) < 128
    assert drafting.context.n_used < 128


def test_an_ended_sequence_leaves_its_prefix_to_the_next() -> None:
    drafting = Drafting()
    stem = [i % 50 for i in range(60)]
    ended = drafting.sequence([*stem, 3])
    drafting.first_draft([ended])
    drafting.proposer.finished(ended)
    drafting.context.steps.clear()
    assert drafting.propose([drafting.sequence([*stem, 4])])[0]
    assert drafting.context.steps[0] == {0: 1}


@pytest.mark.parametrize(("salt", "cache_prompt"), [("other", True), ("", False)])
def test_a_prefix_is_not_shared_across_salts_or_against_the_requests_will(salt: str, cache_prompt: bool) -> None:
    drafting = Drafting()
    stem = [i % 50 for i in range(60)]
    drafting.first_draft([drafting.sequence([*stem, 3])])
    assert drafting.propose([drafting.sequence([*stem, 4], salt=salt, cache_prompt=cache_prompt)]) == [None]


# --- too few cells ------------------------------------------------------------------------------------------------


def test_the_cells_of_paused_sequences_are_given_to_those_that_run() -> None:
    drafting = Drafting(n_ctx=64)
    paused = [drafting.sequence([i, *range(10)]) for i in range(4)]
    drafting.first_draft(paused)
    running = [drafting.sequence([20 + i, *range(10)]) for i in range(4)]
    drafting.first_draft(running)
    assert all(drafting.proposer.cells.get(sequence) is None for sequence in paused)
    drafting.first_draft(paused)  # they come back


def test_where_not_all_fit_the_last_ones_get_no_draft() -> None:
    drafting = Drafting(n_ctx=40)
    sequences = [drafting.sequence([i, *range(10)]) for i in range(4)]
    for _ in range(6):
        drafts = drafting.propose(sequences)
    assert [draft is not None for draft in drafts] == [True, True, False, False]


# --- estimates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_accepted", "low", "high"), [(0, 0.0, 0.5), (4, 0.8, 1.0)])
def test_the_acceptance_is_learned_from_what_came_true(
    drafting: Drafting, n_accepted: int, low: float, high: float
) -> None:
    sequence = drafting.sequence()
    (draft,) = drafting.propose([sequence])
    assert draft
    assert draft.probabilities.mean() == pytest.approx(0.632, abs=0.01)  # the fake model's largest probability
    estimates = []
    for _ in range(30):
        (draft,) = drafting.propose([sequence])
        if draft is None:
            break
        estimates.append(float(draft.probabilities.mean()))
        drafted = draft.tokens.tolist()
        right = drafted[:n_accepted]
        add(sequence, [*right, other_than(likeliest([*known(sequence), *right])[0])])
    assert low <= estimates[-1] <= high


def test_a_new_sequence_starts_with_the_acceptance_of_the_others(drafting: Drafting) -> None:
    first = drafting.sequence()
    for _ in range(20):
        (draft,) = drafting.propose([first])
        assert draft
        add(first, [*draft.tokens.tolist(), 3])
    (draft,) = drafting.propose([drafting.sequence([9, 9, 9])])
    assert draft
    assert draft.probabilities.mean() > 0.8


def test_the_time_of_drafts_is_learned_from_the_decodes(drafting: Drafting) -> None:
    proposer = drafting.proposer
    assert proposer.seconds(4, 3) == 0
    long = drafting.sequence([i % 50 for i in range(108)])
    drafting.first_draft([drafting.sequence([i]) for i in range(4)])
    assert proposer.seconds(4, 3) == pytest.approx(3 * 0.014, rel=0.1)
    drafting.first_draft([drafting.sequence([i % 49 for i in range(60)])])
    assert proposer.read_seconds(long) == pytest.approx(100 * 0.042 / 32, rel=0.5)
    drafting.first_draft([long])
    assert proposer.read_seconds(long) == 0


def test_the_first_decodes_of_a_gpu_which_load_its_kernels_are_not_learned(drafting: Drafting) -> None:
    decode, seen = drafting.context.decode, set()

    def slow_at_first(batch: Batch) -> None:
        drafting.clock.now += 0 if batch.n_tokens in seen else 1.0
        seen.add(batch.n_tokens)
        decode(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting.context, "decode", slow_at_first)
        sequence = drafting.sequence()
        for _ in range(20):
            for draft in drafting.propose([sequence]):
                add(sequence, draft.tokens.tolist() if draft else [])
            add(sequence, [1])
            assert drafting.proposer.seconds(1, 4) < 0.1


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_draft_model_that_cannot_compute_stops_drafting(drafting: Drafting, caplog: pytest.LogCaptureFixture) -> None:
    drafting.context.fail_at[1] = DecodeFailed(-2, "out of memory")
    with caplog.at_level(logging.ERROR):
        assert drafting.proposer.propose([drafting.sequence()], [4]) == [None]
    assert "stopped drafting" in caplog.text
    assert drafting.proposer.propose([drafting.sequence()], [4]) == [None]
    assert len(drafting.context.steps) == 1


def test_after_ctrl_c_drafts_are_right_again(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = drafting.sequence()
    drafting.propose([sequence])
    add(sequence, [3])

    def interrupt(_n: int) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drafting.context, "logits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drafting.proposer.propose([sequence], [4])
    drafting.check()
    (draft,) = drafting.propose([sequence])
    assert draft
    assert draft.tokens.tolist() == likeliest(known(sequence), 4)
