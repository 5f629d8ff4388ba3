"""Which attention computes a load fastest: by a table of times, without a model."""

from __future__ import annotations

import pytest

from cppbatch.config import EngineConfig
from cppbatch.models.attention_times import Attention, AttentionTimes, RequestSizes
from cppbatch.sizing.attention_choice import (
    CLEAR_GAIN,
    MAX_EXCESS_KL,
    AttentionChoice,
    Costs,
    Load,
    WeightTimes,
    choose_attention,
    load_of,
    suits_unified,
    usual_load,
)

F16_ON, F16_OFF = Attention("on", "f16", "f16"), Attention("off", "f16", "f16")
BF16_ON, Q8_ON = Attention("on", "bf16", "bf16"), Attention("on", "q8_0", "q8_0")
ALL = (F16_ON, F16_OFF, BF16_ON, Q8_ON)
LOAD = Load(16, 1000)
CLOSE = MAX_EXCESS_KL / 2


def table(rows: dict[Attention, tuple[float, float]]) -> AttentionTimes:
    decode, prefill = ({each.name: {500: ms[i] / 2, 1000: ms[i]} for each, ms in rows.items()} for i in (0, 1))
    return AttentionTimes(decode=decode, prefill=prefill)


def choose(
    rows: dict[Attention, tuple[float, float]],
    *,
    load: Load = LOAD,
    weights: WeightTimes | None = None,
    excess: dict[str, float] | None = None,
    now: Attention = F16_ON,
) -> AttentionChoice:
    return choose_attention(Costs(table(rows), 1, weights), load, now, ALL, excess or {})


def test_the_fastest_attention_with_the_same_cells_is_chosen_without_a_measurement() -> None:
    best, proposal = choose({F16_ON: (2, 1), F16_OFF: (1, 1)})
    assert best
    assert best.attention == F16_OFF
    # A prompt token sees half of the cells, and without flash attention 128 more are read.
    assert best.gain == pytest.approx((2 + 0.5) / (1.128 + 0.628))
    assert proposal is None


def test_an_engine_that_switches_layouts_takes_only_types_that_flash_attention_computes_as_fast() -> None:
    costs = Costs(table({F16_ON: (2, 1), BF16_ON: (2.5, 4), Q8_ON: (1, 2)}), 1, None)
    assert suits_unified(costs, LOAD, Q8_ON)
    assert not suits_unified(costs, LOAD, BF16_ON)
    assert not suits_unified(costs, LOAD, Attention("off", "q8_0", "bf16")), "not timed"


def test_a_type_is_chosen_once_its_divergence_is_known_and_proposed_before() -> None:
    rows = {F16_ON: (2.0, 1.0), Q8_ON: (1.0, 1.0)}
    best, proposal = choose(rows)
    assert best is None
    assert proposal
    assert proposal.attention == Q8_ON
    best, proposal = choose(rows, excess={"q8_0 q8_0": CLOSE})
    assert best
    assert best.attention == Q8_ON
    assert proposal is None


def test_a_type_that_changes_texts_is_neither_chosen_nor_proposed() -> None:
    assert choose({F16_ON: (2, 1), Q8_ON: (1, 1)}, excess={"q8_0 q8_0": MAX_EXCESS_KL}) == (None, None)


def test_a_proposal_is_clearly_faster_than_the_chosen_one() -> None:
    rows = {F16_ON: (2.0, 0.0), BF16_ON: (1.0, 0.0), Q8_ON: (0.95, 0.0)}
    best, proposal = choose(rows, excess={"bf16 bf16": CLOSE})
    assert best
    assert (best.attention, proposal) == (BF16_ON, None)


def test_a_small_gain_changes_nothing() -> None:
    assert choose({F16_ON: (CLEAR_GAIN - 0.01, 0), F16_OFF: (1, 0)}) == (None, None)


def test_the_weights_part_of_a_step_counts() -> None:
    rows = {F16_ON: (1.5, 0.0), F16_OFF: (1.0, 0.0)}
    assert choose(rows).best
    assert choose(rows, weights=WeightTimes(decode_s=5.0, prefill_s=5.0)).best is None


def test_prompts_and_answers_weigh_as_the_load_has_them() -> None:
    rows = {F16_ON: (2.0, 1.0), F16_OFF: (1.0, 4.0)}  # without flash attention rows are fast and prompts slow
    answers = choose(rows, load=Load(16, 1000, prompt_tokens=0.1)).best
    assert answers
    assert answers.attention == F16_OFF
    assert choose(rows, load=Load(16, 1000, prompt_tokens=10)).best is None


def test_long_contexts_weigh_more_than_the_weights() -> None:
    rows, weights = {F16_ON: (1.3, 0.0), F16_OFF: (1.0, 0.0)}, WeightTimes(1.0, 0.0)
    assert choose(rows, load=Load(16, 200), weights=weights).best is None
    assert choose(rows, load=Load(16, 8000), weights=weights).best


def test_without_times_of_both_attentions_nothing_is_chosen() -> None:
    assert choose({F16_ON: (2, 1)}) == (None, None)
    assert choose({F16_OFF: (2, 1)}) == (None, None)


def test_the_usual_load_is_half_of_a_chat_or_of_a_shorter_stream() -> None:
    assert usual_load(EngineConfig("model.gguf", n_ctx=65536, n_parallel=16)) == Load(16, 512)
    assert usual_load(EngineConfig("model.gguf", n_ctx=4096, n_parallel=16)) == Load(16, 128)


def test_the_load_of_known_requests_has_their_contexts_and_computed_prompts() -> None:
    sizes = RequestSizes(requests=10, prompt_tokens=20_000, computed_tokens=5_000, output_tokens=1_000)
    config = EngineConfig("model.gguf", n_ctx=65536, n_parallel=16)
    assert load_of(sizes, config, "as in a.jsonl") == Load(16, 2050, 5, " (as in a.jsonl)")
    assert load_of(sizes, EngineConfig("model.gguf", n_ctx=512, n_parallel=1), "").n_cells == 512


def test_times_beyond_the_longest_context_grow_with_its_cells() -> None:
    found = AttentionTimes(decode={F16_ON.name: {128: 1.0, 512: 2.0, 2048: 6.0}}, prefill={})
    assert found.decode_s(F16_ON, 512) == 2.0
    assert found.decode_s(F16_ON, 1280) == 4.0
    assert found.decode_s(F16_ON, 8192) == 22.0


def test_one_time_is_in_proportion_to_longer_contexts() -> None:
    assert AttentionTimes(decode={F16_ON.name: {128: 1.0}}, prefill={}).decode_s(F16_ON, 512) == 4.0


def test_without_flash_attention_the_cells_up_to_a_multiple_of_256_are_read_too() -> None:
    found = AttentionTimes(decode={F16_OFF.name: {128: 1.0, 512: 4.0}}, prefill={})
    assert found.decode_s(F16_OFF, 384) == 4.0  # half of 256 more on average
