"""Random numbers: a pure function of seed and position, and as good as random."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from cppbatch.engine.sampling.random_sampling import gumbel_noise, random_bits, unit_interval
from tests.support.distributions import are_far
from tests.support.randomised import randomised

UInt64 = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

N = 200_000
LAST = 2**64 - 1
NUMBERS_64 = st.integers(0, LAST) | st.sampled_from([0, 1, 2**32, 2**63, LAST - 1, LAST])
STEPS = {  # to another pair of seed and position
    "the next token": (0, 1),
    "the next seed": (1, 0),
    "the next seed, a token earlier": (1, -1),
    "the next seed, a token later": (1, 1),
    "a seed that differs in the upper half": (2**32, 0),
    "the token after next": (0, 2),
}


def splitmix64(state: int) -> Iterator[int]:
    """The generator as its authors write it: a counter, and a mix of it."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def number(seed: int, position: int) -> int:
    """The seed's first number starts a separate stream; the position counts within it."""
    return next(itertools.islice(splitmix64(next(splitmix64(seed))), position, None))


def pairs(n: int = N, seed_step: int = 0, position_step: int = 0) -> tuple[UInt64, UInt64]:
    """n seeds and positions as requests have them: small numbers, each seed with a few hundred tokens."""
    seeds, positions = np.divmod(np.arange(n), 400)
    return (seeds + seed_step).astype(np.uint64), (positions + 1 + position_step).astype(np.uint64)


def uniform(seeds: UInt64, positions: UInt64) -> Doubles:
    return np.asarray(unit_interval(random_bits(seeds, positions)))


def one(seed: int, position: int) -> float:
    return float(uniform(np.array([seed], np.uint64), np.array([position], np.uint64))[0])


def is_flat(numbers: Doubles, n_bins: int = 256) -> bool:
    counts = np.bincount((numbers * n_bins).astype(np.int64), minlength=n_bins)
    return not are_far(counts, np.full(n_bins, 1 / n_bins))


def test_the_generator_written_here_is_the_published_one() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert list(itertools.islice(splitmix64(1234567), 4)) == published


@randomised(ring=100, soak=300, seed=NUMBERS_64, position=st.integers(0, 500))
def test_the_numbers_are_those_of_splitmix64(seed: int, position: int) -> None:
    assert random_bits(np.array([seed], np.uint64), np.array([position], np.uint64)).tolist() == [
        number(seed, position)
    ]
    assert one(seed, position) == (number(seed, position) >> 11) / 2**53


def test_a_few_numbers_are_written_down_so_that_texts_of_old_seeds_stay_the_same() -> None:
    seeds, positions = np.array([0, 0, 1, 42, LAST], np.uint64), np.array([0, 1, 0, 1000, 7], np.uint64)
    assert random_bits(seeds, positions).tolist() == [
        12035550249420947055, 12935080325729570654, 6791897765849424158, 12825280330115205273, 13352828336997090855,
    ]  # fmt: skip


@randomised(ring=100, soak=300, asked=st.lists(st.tuples(NUMBERS_64, NUMBERS_64), min_size=1, max_size=20))
def test_a_pair_has_the_same_number_alone_and_in_any_batch(asked: list[tuple[int, int]]) -> None:
    seeds, positions = np.array(asked, np.uint64).reshape(-1, 2).T
    assert uniform(seeds, positions).tolist() == [one(*pair) for pair in asked]


def test_the_largest_seeds_and_positions_wrap_around_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 <= one(LAST, LAST) < 1


def test_every_number_is_at_least_zero_and_below_one() -> None:
    numbers = uniform(*pairs())
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1


@pytest.mark.parametrize(("raw", "expected"), [(0, 0.0), (LAST, 1 - 2**-53), (2**63, 0.5), (2**11 - 1, 0.0)])
def test_the_extreme_bits_stay_within_the_interval(raw: int, expected: float) -> None:
    assert unit_interval(np.uint64(raw)) == expected


@pytest.mark.parametrize("magnify", [1, 2**10, 2**30, 2**40])
def test_the_numbers_are_flat_down_to_their_last_digits(magnify: int) -> None:
    assert is_flat(uniform(*pairs()) * magnify % 1)


def test_the_numbers_of_one_seed_are_flat_and_so_are_the_first_of_many_seeds() -> None:
    many, zeros = np.arange(N, dtype=np.uint64), np.zeros(N, np.uint64)
    assert is_flat(uniform(zeros + np.uint64(7), many))
    assert is_flat(uniform(many, zeros))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_neighbours_are_not_correlated(step: tuple[int, int]) -> None:
    here, there = uniform(*pairs()), uniform(*pairs(N, *step))
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / N**0.5
    assert is_flat((np.floor(here * 16) + there) / 16)  # 16 ranges of one number by 16 of the other


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_neighbours_differ_in_half_of_their_bits(step: tuple[int, int]) -> None:
    differing = random_bits(*pairs(20_000)) ^ random_bits(*pairs(20_000, *step))
    ones = np.unpackbits(differing.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert (abs(ones - 0.5) < 5 * 0.5 / 20_000**0.5).all()


def test_no_two_of_many_pairs_share_a_number() -> None:
    assert len(np.unique(random_bits(*pairs()))) == N


def noise(n_keys: int = 400, n_tokens: int = 500) -> Doubles:
    seeds, positions = pairs(n_keys)
    return gumbel_noise(random_bits(seeds, positions), np.tile(np.arange(n_tokens), (n_keys, 1)))


def test_the_noise_has_the_distribution_of_gumbel() -> None:
    assert is_flat(np.exp(-np.exp(-noise())).ravel())


def test_the_noise_of_neighbouring_tokens_and_of_neighbouring_rows_has_nothing_in_common() -> None:
    values = np.exp(-np.exp(-noise())) - 0.5
    for here, there in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs((here * there).mean() * 12) < 4 / np.sqrt(here.size)


def test_the_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    keys, tokens = random_bits(*pairs(3)), np.array([[7, 90, 4000]] * 3)
    assert np.array_equal(gumbel_noise(keys, tokens)[:, 1], gumbel_noise(keys, tokens[:, 1:2])[:, 0])


def test_the_noise_is_finite_for_any_bits() -> None:
    tokens = np.tile(np.arange(2000), (5, 1))
    assert np.isfinite(gumbel_noise(np.array([0, 1, 2**63, LAST - 1, LAST], np.uint64), tokens)).all()
