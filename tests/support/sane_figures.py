"""What a server reports after many requests: plausible figures, and no leftovers."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_LARGEST = 2**53  # beyond it, a browser rounds
_MAY_BE_NEGATIVE = ("priority",)


def assert_sane(url: str, seconds: float = 30) -> dict[str, Any]:
    """Reads `/health`, `/stats`, `/metrics` and `/live` of a server, once it has nothing to do. Returns the stats."""
    assert _json(_get(f"{url}/health"))["status"] == "ok"
    end = time.monotonic() + seconds
    while True:
        stats: dict[str, Any] = _json(_get(f"{url}/stats"))
        busy = (stats["running"], stats["waiting"], *(worker["in_flight"] for worker in stats["workers"]))
        if not any(busy):
            break
        assert time.monotonic() < end, f"still busy: {busy}"
        time.sleep(0.05)
    _assert_plausible(stats)
    assert stats["kv_cells_used"] == 0
    assert stats["seq_ids"] - stats["seq_ids_free"] == stats["prefixes_in_cells"]
    assert [worker["restarts"] for worker in stats["workers"]] == [0] * len(stats["workers"])

    for family in text_string_to_metric_families(_get(f"{url}/metrics").decode()):
        for sample in family.samples:
            assert math.isfinite(sample.value), sample
            assert 0 <= sample.value < _LARGEST, sample
            if sample.name == "cppbatch_requests_in_flight":
                assert sample.value == 0, sample

    live = _first_event(f"{url}/live")
    _assert_plausible(live)
    return stats


def _assert_plausible(figures: dict[str, Any]) -> None:
    for place, value in _numbers(figures, ""):
        assert math.isfinite(value), place
        assert value < _LARGEST, f"{place} is {value}"
        assert value >= 0 or place.endswith(_MAY_BE_NEGATIVE), f"{place} is {value}"


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{place}[{i}]")
    elif isinstance(value, (int, float)):
        yield place, value


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:  # raises for a status that is not 200
        data: bytes = answer.read()
        return data


def _first_event(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                return _json(line.removeprefix(b"data: "))
    raise AssertionError(f"no event from {url}")


def _json(data: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    figures: dict[str, Any] = json.loads(data, parse_constant=refuse)
    return figures
