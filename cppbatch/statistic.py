"""The declaration of a statistic: the annotation of a field, as in `steps: Annotated[int, counter("Computed steps")]`.

`GET /stats` and `GET /live` show the field; its annotation defines how `GET /metrics` shows it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal, NamedTuple, get_type_hints

StatisticKind = Literal["counter", "gauge", "histogram"]


class Statistic(NamedTuple):
    """How a field is read from an engine, and how `GET /metrics` shows it."""

    help: str = ""
    source: str = ""
    """The part of an engine and the path in it, as in `kv.n_used`; empty: the attribute of `metrics` with the field's
    name. A collection counts as its length."""
    kind: StatisticKind | None = None
    """None: not in `GET /metrics`."""
    name: str = ""
    """The name in `GET /metrics`, without the prefix; empty: the field's name."""
    label: str = ""
    """The label for the key of each dict entry, or for a text value."""
    shown: str = ""
    """The property with the value to show; empty: the field itself."""


def value(source: str) -> Statistic:
    """A statistic that is not in `GET /metrics`."""
    return Statistic(source=source)


counter = partial(Statistic, kind="counter")
gauge = partial(Statistic, kind="gauge")
histogram = partial(Statistic, kind="histogram")


@lru_cache
def statistics_of(kind: type) -> dict[str, Statistic]:
    """The statistics among the fields of a class, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    found = ((field, getattr(hint, "__metadata__", (None,))[0]) for field, hint in hints.items())
    return {field: statistic for field, statistic in found if isinstance(statistic, Statistic)}
