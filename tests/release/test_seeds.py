"""Seeded texts of the default model do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.config import KvLayout
from tests.integration.test_seeds import KINDS, PARAMS, PROMPTS, open_engine

N = len(KINDS)


@pytest.fixture(scope="module")
def alone(f32_model: Path) -> Iterator[list[str]]:
    with open_engine(f32_model) as engine:
        yield [engine.generate([prompt], its)[0].text for prompt, its in zip(PROMPTS[:N], PARAMS, strict=False)]


@pytest.mark.nightly  # of a tiny model in each run: tests/integration/test_seeds.py
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_a_seeded_text_of_each_kind_together_is_that_alone(f32_model: Path, alone: list[str], layout: KvLayout) -> None:
    with open_engine(f32_model, layout) as engine:
        assert [result.text for result in engine.generate(PROMPTS[:N], PARAMS[:N])] == alone
