"""What a saved state belongs to besides its tokens: the model, its LoRA adapters, the types of the cache, settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.slot_file import file_digest
from cppbatch.models.find import model_parts

AdapterDigests = tuple[tuple[str, float], ...]
"""The digests of LoRA adapter files with their scales: `AdapterSet` in a form that outlives the engine."""


class StateKey:
    """The key of one engine's states. Files are read when a digest is first asked for. Thread-safe."""

    def __init__(self, info: ModelInfo, config: EngineConfig, settings: Mapping[str, str]) -> None:
        """`settings`: see `Runtime.state_settings`."""
        self.model = info.name
        self.cache_types = (config.cache_type_k, config.cache_type_v)
        self.settings = dict(settings)
        self._info = info

    @cached_property
    def digest(self) -> str:
        """`file_digest` of the model; of a split model, a digest of those of all parts."""
        digests = [file_digest(part) for part in model_parts(Path(self._info.path))]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    @cached_property
    def _adapter_digests(self) -> list[str]:
        return [file_digest(adapter.path) for adapter in self._info.adapters]

    def adapter_digests(self, adapters: AdapterSet) -> AdapterDigests:
        """The digests of loaded adapters."""
        return tuple(sorted((self._adapter_digests[number], scale) for number, scale in adapters))

    def adapter_set(self, adapters: Sequence[tuple[str, float]]) -> AdapterSet | None:
        """The loaded adapters with these digests; None if one of them is not loaded."""
        digests = self._adapter_digests
        if any(digest not in digests for digest, _ in adapters):
            return None
        return tuple(sorted((digests.index(digest), scale) for digest, scale in adapters))

    @cached_property
    def short(self) -> str:
        """A name of the model, the types of the cache and the settings, for names of files."""
        parts = (self.digest, self.cache_types, sorted(self.settings.items()))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
