"""What types of the KV cache change in a model's texts, as far as that was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cppbatch.config import CacheType
from cppbatch.findings import finding_path, read_finding, write_finding
from cppbatch.models.find import file_identity

Types = tuple[CacheType, CacheType]
"""Those of keys and of values."""
TYPES: tuple[Types, ...] = (
    ("f16", "bf16"), ("bf16", "f16"), ("bf16", "bf16"), ("f16", "q8_0"), ("q8_0", "f16"), ("q8_0", "bf16"),
    ("bf16", "q8_0"), ("q8_0", "q8_0"),
)  # fmt: skip
"""Those that may be chosen in place of f16 without being given."""


class CacheQuality(msgspec.Struct, frozen=True):
    """What was measured of a model's file."""

    excess: dict[str, float]
    """{types of keys and values ("q8_0 bf16"): KL divergence from the f16 cache, in nats, less that of the f16 cache
    without flash attention, which adds in another order}."""


def known_excess(model: Path) -> Mapping[str, float]:
    """The KL divergences that were measured of this file, beyond those of another order of additions; empty if none
    were."""
    known = read_finding(_path(model), CacheQuality)
    return known.excess if known else {}


def keep_excess(model: Path, excess: Mapping[str, float]) -> None:
    """Keeps what was measured, beside what was before."""
    write_finding(_path(model), CacheQuality({**known_excess(model), **excess}))


def _path(model: Path) -> Path:
    return finding_path("cache-types", hashlib.sha256(repr(file_identity(model)).encode()).hexdigest()[:16])
