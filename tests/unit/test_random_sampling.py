"""random_sample: the same distribution as llama.cpp's samplers, for many rows at once, each row for itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from cppbatch.engine.sampling.random_sampling import NO_TOKEN, random_sample
from cppbatch.engine.sampling_plan import Filters
from tests.support.distributions import DEFAULTS, Row, are_far, assert_drawn_from, drawn, exact, keys, logits, tied
from tests.support.randomised import cases, randomised

LARGE: dict[str, tuple[int, float, Filters]] = {  # tokens, how far apart their logits lie, filters
    "defaults": (4096, 2.0, DEFAULTS),
    "blocks that do not fill the row": (2500, 2.0, DEFAULTS),
    "all but one block within the rest": (1023, 2.0, DEFAULTS),
    "a top_k of exactly the blocks": (2000, 1.0, Filters(512, 1.0, 0.0, 0.7)),
    "top_p on a peaked row": (5000, 4.0, Filters(0, 0.9, 0.0, 1.0)),
    "top_p on a flat row": (2000, 0.3, Filters(0, 0.7, 0.0, 1.0)),
    "top_p and min_p on a flat row": (600, 1.0, Filters(0, 0.9, 0.1, 1.0)),
    "a flat row": (2000, 0.3, Filters(0, 1.0, 0.0, 0.8)),
    "min_p on a flat row": (2000, 0.5, Filters(0, 1.0, 0.05, 0.8)),
}

CHOICES = [  # every way through the code
    DEFAULTS, Filters(0, 1.0, 0.0, 1.0), Filters(0, 0.9, 0.0, 1.0), Filters(0, 0.0, 0.0, 1.0),
    Filters(3, 0.5, 0.0, 2.0), Filters(0, 1.0, 0.2, 0.5), Filters(0, 0.99, 0.01, 1.0), Filters(700, 1.0, 0.0, 1.0),
    Filters(700, 0.9, 0.1, 1.0), Filters(512, 1.0, 0.0, 5.0), Filters(1, 1.0, 0.0, 1.0),
    Filters(2**31 - 1, 1.0, 1.0, 100.0),
]  # fmt: skip

KEYS = st.integers(0, 2**64 - 1)


@st.composite
def filters_of(draw: st.DrawFn) -> Filters:
    return Filters(
        top_k=draw(st.sampled_from([0, 1, 2, 40, 511, 512, 513, 10_000])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.95, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0])),
        temperature=draw(st.sampled_from([0.001, 0.8, 1.0, 100.0])),
    )


@st.composite
def rows_of(draw: st.DrawFn, n: int) -> Row:
    """Any spread, some of them with ties, some with tokens that are impossible."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(draw(st.sampled_from([0, -50, 300])), draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 100.0])), n)
    if draw(st.booleans()):
        row = np.round(row)
    row[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))] = -np.inf
    return row.astype(np.float32)


@cases(ring=2_500, nightly=5_000, soak=20_000)
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_large_vocabularies_are_drawn_from_the_exact_distribution(
    case: tuple[int, float, Filters], n_cases: int
) -> None:
    n, spread, filters = case
    row = logits(n, spread)
    assert_drawn_from(drawn(row, filters, keys(n_cases)), exact(row, filters))


@pytest.mark.parametrize("filters", [DEFAULTS, Filters(0, 1.0, 0.05, 1.0)])
def test_a_vocabulary_as_large_as_real_ones_is_drawn_from_the_exact_distribution(filters: Filters) -> None:
    row = logits(49_152)
    assert_drawn_from(drawn(row, filters, keys(), at_once=50), exact(row, filters))


@pytest.mark.parametrize("filters", [DEFAULTS, Filters(3, 1.0, 0.0, 1.0), Filters(0, 0.9, 0.0, 1.0)])
def test_the_most_likely_tokens_may_be_the_last_ones_of_the_vocabulary(filters: Filters) -> None:
    row = logits(2500, 4.0)
    row[-5:] = row.max() + np.arange(5, dtype=np.float32) / 2
    assert_drawn_from(drawn(row, filters, keys()), exact(row, filters))


@pytest.mark.parametrize("filters", [Filters(0, 0.9, 0.0, 1.6), Filters(0, 1.0, 0.05, 1.6)])
def test_the_comparison_would_notice_a_temperature_that_comes_first(filters: Filters) -> None:
    row = logits(250)
    temperature_first = exact(row / np.float32(filters.temperature), filters._replace(temperature=1.0))
    assert are_far(drawn(row, filters, keys()), temperature_first)


@pytest.mark.parametrize(
    ("asked", "little_off"),
    [
        (DEFAULTS, DEFAULTS._replace(temperature=0.88)),
        (Filters(40, 1.0, 0.0, 1.0), Filters(34, 1.0, 0.0, 1.0)),
        (Filters(0, 0.95, 0.0, 1.0), Filters(0, 0.92, 0.0, 1.0)),
        (Filters(0, 1.0, 0.05, 1.0), Filters(0, 1.0, 0.08, 1.0)),
    ],
)
def test_the_comparison_would_notice_settings_that_are_a_little_off(asked: Filters, little_off: Filters) -> None:
    row = logits(250)
    assert are_far(drawn(row, asked, keys()), exact(row, little_off))


@cases(ring=1, soak=3)
@pytest.mark.parametrize("n", [512, 1100])
@pytest.mark.parametrize("k", [1, 2, 40, 512, 600])
def test_top_k_keeps_k_tokens_wherever_they_stand(n: int, k: int, n_cases: int) -> None:
    """`n_cases`: orders; where few tokens are kept, always all."""
    orders = (np.random.default_rng(3).permutation(n), np.arange(n), np.arange(n)[::-1])
    for likeliest_first in orders[: n_cases if k > 40 else 3]:
        row = np.empty(n, np.float32)
        row[likeliest_first] = -np.arange(n, dtype=np.float32) / 1000
        counts = drawn(row, Filters(k, 1.0, 0.0, 100.0), keys(12 * k))
        assert set(np.flatnonzero(counts)) == set(likeliest_first[:k])


@randomised(ring=50, soak=150, data=st.data())
def test_no_row_gives_a_token_that_its_filters_drop(data: st.DataObject) -> None:
    n, filters = data.draw(st.integers(1, 1600)), data.draw(filters_of())
    row = data.draw(rows_of(n))
    tokens = random_sample(np.stack([row] * 3), [filters] * 3, np.array([0, data.draw(KEYS), 2**64 - 1], np.uint64))
    if np.isneginf(row).all():
        assert tokens.tolist() == [NO_TOKEN] * 3
        return
    a_little_more = filters._replace(top_p=filters.top_p + 1e-5, min_p=filters.min_p * (1 - 1e-5), temperature=1.0)
    order = np.argsort(-row, kind="stable")
    least = row[order[np.count_nonzero(exact(row.astype(np.float64), a_little_more)) - 1]]
    assert (row[tokens] >= least).all()  # of equal logits, any
    assert np.isfinite(row[tokens]).all()


@randomised(ring=50, soak=150, data=st.data())
def test_a_row_gives_the_same_token_alone_and_in_any_batch(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 7, 300, 512, 1500]))
    requests = data.draw(st.lists(st.tuples(rows_of(n), filters_of(), KEYS), min_size=1, max_size=8))
    rows, filters, its_keys = zip(*requests, strict=True)
    alone = [int(random_sample(row[None], [its], np.array([key], np.uint64))[0]) for row, its, key in requests]
    assert random_sample(np.stack(rows), filters, np.array(its_keys, np.uint64)).tolist() == alone


@pytest.mark.parametrize("filters", CHOICES)
@pytest.mark.parametrize("n", [3, 300, 1500])
def test_extreme_keys_stay_within_what_is_possible(filters: Filters, n: int) -> None:
    row = logits(n, 0.1)
    row[[0, -1]] = -np.inf  # the first and the last place are not tokens
    extreme = np.array([0, 1, 2**63, 2**64 - 2**11, 2**64 - 1], np.uint64)
    tokens = random_sample(np.stack([row] * 5), [filters] * 5, extreme)
    assert np.isfinite(row[tokens]).all()
    assert (tokens >= 0).all()


@pytest.mark.parametrize("n", [300, 2500])
@pytest.mark.parametrize("others", [(0, 1.0, 0.0), (40, 0.95, 0.05)])
def test_a_temperature_near_zero_takes_the_most_likely_token(n: int, others: tuple[int, float, float]) -> None:
    rows = np.random.default_rng(3).permuted(np.tile(np.arange(n, dtype=np.float32), (50, 1)), axis=1)
    tokens = random_sample(rows, [Filters(*others, 0.001)] * 50, keys(50))
    assert tokens.tolist() == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize("n", [300, 2500])
@pytest.mark.parametrize("filters", [DEFAULTS, Filters(0, 1.0, 0.0, 5.0)])
def test_a_top_p_of_zero_takes_the_most_likely_token(n: int, filters: Filters) -> None:
    rows = np.stack([logits(n, seed=seed) for seed in range(50)])
    tokens = random_sample(rows, [filters._replace(top_p=0.0)] * 50, keys(50))
    assert tokens.tolist() == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize("filters", CHOICES)
@pytest.mark.parametrize("n", [1, 300, 2500])
def test_a_row_with_one_possible_token_gives_it(filters: Filters, n: int) -> None:
    rows = np.full((20, n), -np.inf, np.float32)
    places = np.random.default_rng(5).integers(n, size=20)
    rows[np.arange(20), places] = np.linspace(-900, 900, 20)
    assert random_sample(rows, [filters] * 20, keys(20)).tolist() == places.tolist()


@pytest.mark.parametrize("filters", CHOICES)
@pytest.mark.parametrize("n", [300, 2500])
@pytest.mark.parametrize("spoil", ["all -inf", "a NaN", "a NaN among -inf", "a last NaN", "+inf"])
def test_a_row_without_a_token_to_draw_says_so_and_leaves_the_others_alone(
    filters: Filters, n: int, spoil: str
) -> None:
    rows = np.stack([logits(n, seed=seed) for seed in range(5)])
    expected = random_sample(rows, [filters] * 5, keys(5))
    if spoil in ("all -inf", "a NaN among -inf"):
        rows[2] = -np.inf
    place, value = {"a NaN": (n // 2, np.nan), "a NaN among -inf": (1, np.nan), "a last NaN": (-1, np.nan)}.get(
        spoil, (3, np.inf if spoil == "+inf" else -np.inf)
    )
    rows[2, place] = value
    expected[2] = NO_TOKEN
    assert random_sample(rows, [filters] * 5, keys(5)).tolist() == expected.tolist()


def test_the_rows_are_not_changed() -> None:
    rows = np.stack([logits(1500, 0.3), logits(1500, 5)] * 6)
    before = rows.copy()
    random_sample(rows, CHOICES, keys(12))
    assert np.array_equal(rows, before)


@pytest.mark.parametrize("n", [250, 2500])
@pytest.mark.parametrize(
    "filters", [Filters(0, 1.0, 0.0, 0.001), Filters(4, 1.0, 0.0, 1.0), Filters(40, 0.95, 1.0, 1.0)]
)
def test_equally_likely_tokens_come_equally_often(n: int, filters: Filters) -> None:
    row = tied(n)
    assert_drawn_from(drawn(row, filters, keys()), (row == row.max()) / 4)


def test_a_row_of_equal_logits_is_drawn_evenly_over_the_whole_vocabulary() -> None:
    row = np.zeros(1000, np.float32)
    assert_drawn_from(drawn(row, Filters(0, 1.0, 0.0, 1.0), keys()), np.full(1000, 1e-3))
