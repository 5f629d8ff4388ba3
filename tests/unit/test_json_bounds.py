"""JSON is measured on its bytes: its width and depth are found without decoding it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cppbatch import json_bounds
from cppbatch.json_bounds import JsonShape, excess, json_shape
from tests.support.randomised import randomised

LETTERS = st.text(alphabet='a"\\[]{},:\n é', max_size=8)

VALUES = st.recursive(
    st.one_of(st.integers(), st.none(), LETTERS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(LETTERS, inner, max_size=4)),
    max_leaves=40,
)


def walked(value: Any) -> JsonShape:
    if not isinstance(value, (dict, list)):
        return JsonShape(0, 0, 0, 0)
    inner = [walked(each) for each in (value.values() if isinstance(value, dict) else value)]
    return JsonShape(
        1 + max((each.depth for each in inner), default=0),
        1 + sum(each.containers for each in inner),
        sum(each.members for each in inner) + (len(value) if isinstance(value, dict) else 0),
        sum(each.values for each in inner) + max(1, len(value)),
    )


@pytest.mark.parametrize("chunk", [3, 7, 1 << 20])
@randomised(ring=50, nightly=200, soak=2000, value=VALUES, ascii_only=st.booleans())
def test_json_shape_of_the_bytes_is_that_of_the_value(chunk: int, value: Any, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "_MEASURED_BYTES", chunk)
        assert json_shape(json.dumps(value, ensure_ascii=ascii_only).encode()) == walked(value)


@given(data=st.binary(max_size=200))
def test_invalid_json_is_measured_too(data: bytes) -> None:
    assert min(json_shape(data)) >= 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * 128 + b"]" * 128, None),
        (b"[" * 129 + b"]" * 129, "nested too deeply; the limit is 128 levels"),
        (b'{"a":' * 5000, "nested too deeply; the limit is 128 levels"),
        (b'"' + b"[" * 5000 + b'"', None),
        (b'"' + b",:{" * 1_000_000 + b'"', None),
        (json.dumps({str(i): i for i in range(100_000)}).encode(), None),
        (json.dumps({str(i): i for i in range(100_001)}).encode(), "100,001 object members; the limit is 100,000"),
        (json.dumps([[]] * 99_999).encode(), None),
        (json.dumps([{}] * 100_000).encode(), "100,001 lists and objects; the limit is 100,000"),
        (json.dumps([1] * 500_000).encode(), None),
        (json.dumps([1] * 500_001).encode(), "500,001 values; the limit is 500,000"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_an_excess_is_named(text: bytes, says: str | None) -> None:
    found = excess(text)
    assert found is None if says is None else says in (found or "")
