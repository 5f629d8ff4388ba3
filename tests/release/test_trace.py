"""`--trace` on the default model: output processing overlaps the next step."""

from __future__ import annotations

from pathlib import Path

from cppbatch import GenerationRequest, LocalEngine, SamplingParams
from cppbatch.engine.observe.trace import TRACKS
from tests.integration.test_trace import spans


async def test_the_text_of_one_step_is_made_while_the_next_one_computes(default_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    async with LocalEngine(default_model, trace=str(path), n_ctx=512, n_parallel=2) as engine:
        request = GenerationRequest(id="a", prompt="Hello", params=SamplingParams(max_tokens=40, ignore_eos=True))
        assert [event async for event in engine.submit(request)][-1].finish_reason
    decodes = [(span["ts"], span["ts"] + span["dur"]) for span in spans(path) if span["tid"] == TRACKS["device"]]
    texts = [span["ts"] for span in spans(path) if span["name"] == "text"]
    meanwhile = [began for began in texts if any(start <= began <= end for start, end in decodes)]
    assert len(meanwhile) > len(texts) / 2
