"""Windows of an input have bounded memory, and are sorted so that common prefixes are computed once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.request_order import chunks, estimate_sizes, order_requests

ALIKE = 256


def item(line: int, prompt: object = "a", url: str = "/v1/completions", **fields: Any) -> JobRequest:
    return JobRequest(line=line, custom_id=f"line-{line}", url=url, body={"prompt": prompt, **fields}, content_hash=0)


def chat(line: int, *contents: object) -> JobRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return JobRequest(
        line=line, custom_id=f"{line}", url="/v1/chat/completions", body={"messages": messages}, content_hash=0
    )


def lines(items: list[JobRequest]) -> list[int]:
    return [item.line for item in items]


# --- windows


def test_the_first_window_is_small_and_the_next_ones_grow_up_to_the_most() -> None:
    sizes = [len(window) for window in chunks(map(item, range(1000)), max_requests=300)]
    assert sizes == [64, 128, 256, 300, 252]


def test_no_window_is_read_before_it_is_asked_for() -> None:
    numbers = iter(range(1000))
    assert len(next(chunks(map(item, numbers)))) == 64
    assert next(numbers) == 64


def test_refused_lines_stay_where_they_are() -> None:
    stream = [RejectedLine(line=n, code="x", message="y", content_hash=0) if n % 3 else item(n) for n in range(200)]
    assert [each for window in chunks(stream) for each in window] == stream


@pytest.mark.parametrize("prompt", ["x" * 100_000, {"a": ["b" * 100_000]}, ["c" * 50_000] * 2])
def test_a_window_takes_no_more_memory_than_it_may_and_its_last_item(prompt: object) -> None:
    sizes = [len(window) for window in chunks((item(n, prompt) for n in range(24)), max_bytes=1_000_000)]
    assert sizes == [10, 10, 4]


def test_the_memory_of_token_ids_is_not_that_of_their_digits() -> None:
    ids = list(range(1000, 101_000))
    taken = sys.getsizeof(ids) + sum(map(sys.getsizeof, ids))
    sizes = [len(window) for window in chunks((item(n, list(ids)) for n in range(10)), max_bytes=2 * taken)]
    assert sizes == [2] * 5


@given(st.lists(st.integers(0, 3000), max_size=300), st.integers(1, 100), st.integers(1, 20_000))
@settings(max_examples=60, deadline=None)
def test_windows_lose_nothing_and_keep_the_order(lengths: list[int], most_items: int, most_bytes: int) -> None:
    stream = [item(n, "x" * length) for n, length in enumerate(lengths)]
    cut = list(chunks(stream, max_requests=most_items, max_bytes=most_bytes))
    assert [each for window in cut for each in window] == stream
    assert all(1 <= len(window) <= most_items for window in cut)
    for window in cut:
        assert sum(len(each.body["prompt"]) for each in window[:-1] if isinstance(each, JobRequest)) < most_bytes


# --- arranged


def test_prompts_with_a_common_prefix_are_grouped_in_the_order_of_the_file() -> None:
    document, other = "d" * ALIKE, "o" * ALIKE
    items = [item(1, document + "1"), item(2, other), item(3, "short"), item(4, document + "2"), item(5, other + "5")]
    assert lines(order_requests(items, longest_first=False)) == [1, 4, 2, 5, 3]


def test_short_common_prefixes_move_nothing() -> None:
    common = "c" * (ALIKE - 1)
    items = [item(1, common + "1"), item(2, "b" * 300), item(3, common + "3"), item(4, common), item(5, common)]
    assert lines(order_requests(items, longest_first=False)) == [1, 2, 3, 4, 5]


def test_conversations_with_the_same_first_messages_are_grouped() -> None:
    system = "You are brief. " * 20
    parts = [{"type": "text", "text": system}]
    items = [chat(1, system, "a"), chat(2, parts, "a"), chat(3, "b"), chat(4, system, "c"), chat(5, parts, "c")]
    assert lines(order_requests(items, longest_first=False)) == [1, 4, 2, 5, 3]


def test_the_same_tools_are_a_common_prefix() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "long " * 60}}]
    items = [item(1, "a", tools=tools), item(2, "b"), item(3, "c", tools=tools)]
    assert lines(order_requests(items, longest_first=False)) == [1, 3, 2]


def test_token_ids_are_compared_as_texts_are() -> None:
    ids = list(range(5000, 5100))
    items = [item(1, [*ids, 1]), item(2, [7] * 100), item(3, [*ids, 2]), item(4, ids[:10]), item(5, ids[:10])]
    assert lines(order_requests(items, longest_first=False)) == [1, 3, 2, 4, 5]


def test_the_same_text_for_another_endpoint_is_not_a_common_prefix() -> None:
    text = "t" * 300
    items = [item(1, text), item(2, text, url="/v1/embeddings"), item(3, text)]
    assert lines(order_requests(items, longest_first=False)) == [1, 3, 2]


def test_the_longest_come_first_and_groups_by_their_longest() -> None:
    document = "d" * 400  # about 100 tokens
    items = [
        item(1, "short", max_tokens=150),
        item(2, document, max_tokens=10),
        item(3, "short", max_tokens=500),
        item(4, document, max_tokens=300),
        item(5, "short"),  # 256
        item(6, "x" * 2000, max_completion_tokens=0),  # 500
    ]
    assert lines(order_requests(items, longest_first=True)) == [3, 6, 4, 2, 5, 1]


@pytest.mark.parametrize("most", [None, "many", True, 1.5, 10**400, -(10**400), [], {}])
def test_nonsense_in_a_body_is_arranged_like_anything_else(most: object) -> None:
    items = [item(1, None, max_tokens=most), item(2, {"a": [1.5, None, 10**400]}), item(3, max_tokens=most, tools="t")]
    for longest_first in (True, False):
        assert sorted(lines(order_requests(items, longest_first=longest_first))) == [1, 2, 3]


beginnings = st.sampled_from(["", "a" * ALIKE, "b" * ALIKE, "a" * (ALIKE - 1), "a" * ALIKE + "b" * 50])
somebody = st.tuples(beginnings, st.text(max_size=5), st.none() | st.integers(0, 600))


@given(st.lists(somebody, max_size=40), st.booleans())
def test_arranging_loses_nothing_and_groups_are_whole(
    wanted: list[tuple[str, str, int | None]], longest_first: bool
) -> None:
    items = [item(n, start + end, max_tokens=most) for n, (start, end, most) in enumerate(wanted)]
    result = order_requests(items, longest_first=longest_first)
    assert sorted(lines(result)) == lines(items)
    groups: dict[object, list[JobRequest]] = {}
    runs: list[object] = []
    for each in result:
        prompt = each.body["prompt"]
        key: object = prompt[:ALIKE] if len(prompt) >= ALIKE else each.line
        groups.setdefault(key, []).append(each)
        if not runs or runs[-1] != key:
            runs.append(key)
    assert len(runs) == len(groups), "each group stands in one place"

    def length(each: JobRequest) -> int:
        most = each.body["max_tokens"]
        return len(each.body["prompt"]) // 4 + (256 if most is None else most)

    if longest_first:
        lengths = [[length(each) for each in group] for group in groups.values()]
        assert all(group == sorted(group, reverse=True) for group in lengths)
        assert [group[0] for group in lengths] == sorted((group[0] for group in lengths), reverse=True)
    else:
        assert all(lines(group) == sorted(lines(group)) for group in groups.values())
        firsts = [group[0].line for group in groups.values()]
        assert firsts == sorted(firsts)


# --- sizes


def test_the_expected_sizes_of_a_job_are_those_of_its_prompts_and_limits() -> None:
    rejected = RejectedLine(line=3, code="x", message="y", content_hash=0)
    sizes = estimate_sizes([item(1, "x" * 4000, max_tokens=100), chat(2, "x" * 796), rejected], {"max_tokens": 300})
    assert sizes == (2, 1200, 1200, 400)
    assert sizes
    assert sizes.context == 600 + 100  # half of the answers


def test_without_a_limit_answers_have_an_assumed_length_and_nonsense_harms_nothing() -> None:
    sizes = estimate_sizes([item(1, "", max_tokens="many"), item(2, "", max_tokens=10**400)], {})
    assert sizes
    assert sizes.output_tokens == 256 + (1 << 20)
    assert estimate_sizes([], {}) is None
