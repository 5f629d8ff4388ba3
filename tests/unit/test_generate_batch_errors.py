"""An item of /generate/batch that fails names the field at fault as the client wrote it."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.server.api.generate.batch_items import BatchItem
from cppbatch.server.api.generate.generate_batch import GenerateBatchBuilder
from cppbatch.server.models.serving import ResolvedRequest


async def _ignore(request_id: str) -> None:
    """Cancels nothing."""


@pytest.mark.parametrize(
    ("field", "shown"),
    [("task", "model"), ("prompt", "prompts[1]"), ("max_tokens", "max_tokens")],
)
def test_an_error_of_the_engine_names_the_field_of_the_body(field: str, shown: str) -> None:
    items = [BatchItem([(f"prompts[{i}]", prompt)], {}) for i, prompt in enumerate("ab")]
    resolved = ResolvedRequest("x", [GenerationRequest(id="x", prompt="b")], {})
    builder = GenerateBatchBuilder(items, {1: resolved}, _ignore, stream=False)
    event = GenerationEvent(request_id="x", finish_reason=FinishReason.ERROR, error="is wrong", error_field=field)
    builder.record(0, event)
    builder.set_error(0, RuntimeError("another one"))
    error = builder.build([[event]]).results[1].error
    assert error is not UNSET
    assert (error.param, error.message) == (shown, f"{shown}: is wrong")
