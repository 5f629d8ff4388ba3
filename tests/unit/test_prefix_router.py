"""The routing rule: the longest known prefix, unless the queues are unbalanced; else the fewest requests."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import GenerationRequest
from cppbatch.cluster.prefix_router import Prefix, PrefixRouter, prompt_prefixes
from cppbatch.engine.request import Pair, Prompt

WORDS = "All of them begin with these words, which are worth reading only once. " * 40  # 2,880 characters


def prefixes(prompt: Prompt = WORDS, **options: Any) -> list[Prefix]:
    return prompt_prefixes(GenerationRequest(id="r", prompt=prompt, **options))


@pytest.fixture
def router() -> PrefixRouter[str]:
    return PrefixRouter(n_parallel=16)


def test_without_a_known_prefix_the_fewest_requests_decide_and_of_equals_the_first(router: PrefixRouter[str]) -> None:
    assert router.choose(prefixes(), {"a": 2, "b": 1, "c": 1}) == "b"
    assert router.choose((), {"c": 1, "b": 1, "a": 2}) == "c"


def test_a_known_prefix_outweighs_a_request_for_each_64_tokens_at_most_a_quarter_of_the_rows(
    router: PrefixRouter[str],
) -> None:
    router.note(prefixes(), "b")
    assert router.choose(prefixes(), {"a": 0, "b": 4}) == "b"
    assert router.choose(prefixes(), {"a": 0, "b": 5}) == "a"
    router.note(prefixes(list(range(130))), "b")
    assert router.choose(prefixes(list(range(130))), {"a": 0, "b": 2}) == "b"
    assert router.choose(prefixes(list(range(130))), {"a": 0, "b": 3}) == "a"


def test_a_prefix_shorter_than_64_tokens_decides_between_equals_only(router: PrefixRouter[str]) -> None:
    router.note(prefixes(WORDS[:70]), "b")
    assert router.choose(prefixes(WORDS[:70]), {"a": 3, "b": 3}) == "b"
    assert router.choose(prefixes(WORDS[:70]), {"a": 2, "b": 3}) == "a"


def test_of_members_with_equal_queues_the_longest_prefix_decides(router: PrefixRouter[str]) -> None:
    router.note(prefixes(WORDS), "long")
    router.note(prefixes(WORDS[:1500]), "short")
    assert router.choose(prefixes(), {"none": 0, "short": 0, "long": 0}) == "long"
    assert router.choose(prefixes(), {"none": 0, "short": 0}) == "short"


def test_a_prefix_that_several_members_have_goes_to_the_one_with_fewer_requests(router: PrefixRouter[str]) -> None:
    router.note(prefixes(), "a")
    router.note(prefixes(), "b")
    router.note(prefixes(WORDS[:300]), "c")
    assert router.choose(prefixes(), {"a": 3, "b": 2, "c": 2, "d": 1}) == "b"
    assert router.choose(prefixes(), {"a": 2, "b": 3, "c": 2, "d": 1}) == "a"


def test_members_come_and_go(router: PrefixRouter[str]) -> None:
    router.note(prefixes(), "gone")
    assert router.choose(prefixes(), {"a": 1, "new": 0}) == "new"
    router.forget("gone")
    assert not router._holders
    assert router.choose(prefixes(), {"a": 0, "gone": 0}) == "a"
    router.forget("never seen")


@pytest.mark.parametrize(("one", "other"), [({"cache_salt": "x"}, {"cache_salt": "y"}), ({"lora": {"x": 1.0}}, {})])
def test_prompts_without_shared_cells_share_no_prefix(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prefixes(**one) == prefixes(**one)
    assert not set(prefixes(**one)) & set(prefixes(**other))


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(WORDS, {"cache_prompt": False}), (WORDS, {"task": "embed"}), (Pair(WORDS, WORDS), {}), ("hi", {})],
)
def test_some_prompts_have_no_prefix(prompt: Prompt, options: dict[str, Any]) -> None:
    assert prefixes(prompt, **options) == []


def test_prefixes_double_in_length_and_are_equal_as_long_as_the_prompts_are() -> None:
    assert [prefix.n_tokens for prefix in prefixes()] == [16, 32, 64, 128, 256, 512]
    assert [prefix.n_tokens for prefix in prefixes(list(range(70)))] == [16, 32, 64]
    ours, theirs = prefixes(), prefixes(WORDS[:600] + "x" * 600)
    assert ours[:4] == theirs[:4]
    assert not set(ours[4:]) & set(theirs[4:])


def test_the_prefixes_kept_for_a_member_are_bounded() -> None:
    router = PrefixRouter[str](16, max_prefixes=100)
    for i in range(500):
        router.note(prefixes(f"{i} {WORDS}"), "a")
    assert len(router._prefixes["a"]) == len(router._holders) == 100
    assert router.choose(prefixes(f"499 {WORDS}"), {"b": 0, "a": 0}) == "a"
    assert router.choose(prefixes(f"0 {WORDS}"), {"b": 0, "a": 0}) == "b"
