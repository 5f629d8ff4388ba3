"""Limits: their ranges, and the slots of clients."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch.errors import ConfigError
from cppbatch.server.auth.keys import Slots
from cppbatch.server.http.api_errors import TooManyRequests
from cppbatch.server.http.limits import Limits


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_body_mb", 0), ("max_n", 129), ("max_tokens", 0), ("request_timeout", float("nan")), ("idle_timeout", 0)],
)
def test_limits_out_of_range_are_refused_by_their_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        Limits(**{name: value})


def test_slots_forget_clients_that_are_gone() -> None:
    slots = Slots(Limits(max_concurrent_per_key=1))
    for i in range(3):
        with slots.one(f"10.0.0.{i}"), pytest.raises(TooManyRequests), slots.one(f"10.0.0.{i}"):
            pass
    assert not slots._of
