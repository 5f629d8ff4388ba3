"""What is blamed if a text cannot continue: a field of the request, or the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cppbatch import FinishReason, GenerationRequest, SamplingParams
from cppbatch.engine.sampling.sampler import field_at_fault
from tests.support.fakes import N_VOCAB, context_of, drain, fake_engine, spell

EVERYTHING = tuple(range(N_VOCAB))


def fail(_tokens: Any, _logits: Any) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"suppress_tokens": EVERYTHING}, "suppress_tokens"),
        ({"stop_token_ids": EVERYTHING, "min_tokens": 3}, "stop_token_ids"),
        ({"guided_regex": "d[ef]", "suppress_tokens": tuple(spell("ef"))}, "suppress_tokens"),
        ({"logits_processor": fail}, "logits_processor"),
        ({"logits_processor": lambda _, logits: logits * np.nan}, "logits_processor"),
    ],
)
def test_a_field_that_leaves_no_token_is_named(fields: dict[str, Any], blamed: str, temperature: float) -> None:
    with fake_engine() as engine:
        engine.add_request("abc", SamplingParams(max_tokens=8, temperature=temperature, seed=1, **fields))
        last = drain(engine)[-1]
    assert (last.finish_reason, last.error_field) == (FinishReason.ERROR, blamed)
    assert last.error


def test_nan_logits_are_not_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine() as engine:
        monkeypatch.setattr(context_of(engine), "logits", lambda n: np.full((n, N_VOCAB), np.nan, np.float32))
        engine.add_request("abc", SamplingParams(max_tokens=8, suppress_tokens=(3,)))
        last = drain(engine)[-1]
    assert (last.finish_reason, last.error_field) == (FinishReason.ERROR, None)


def test_a_step_that_fails_is_not_the_requests_fault() -> None:
    from cppbatch.errors import LlamaError

    with fake_engine() as engine:
        context_of(engine).fail_at = {1: LlamaError("no")}
        engine.add_request("abc", SamplingParams(max_tokens=8, suppress_tokens=EVERYTHING))
        last = drain(engine)[-1]
    assert (last.finish_reason, last.error, last.error_field) == (FinishReason.ERROR, "no", None)


def test_where_tokens_are_left_no_field_is_blamed() -> None:
    with fake_engine() as engine:
        sequence = engine.prepare(
            GenerationRequest(id="a", prompt="abc", params=SamplingParams(suppress_tokens=EVERYTHING))
        )
    assert field_at_fault(sequence, np.zeros(N_VOCAB, np.float32)) is None
