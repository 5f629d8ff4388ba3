"""Several workers that really run: devices, load, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cppbatch import GenerationRequest, SamplingParams
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError


async def test_a_missing_device_is_an_error(tiny_llama: Path) -> None:
    engine = Deployment(devices=(7,)).start(EngineConfig(model_path=str(tiny_llama), n_ctx=256, n_parallel=2))
    with pytest.raises(ModelError, match="GPU 7 not found"):
        await engine.loaded()
    await engine.close()


async def test_two_real_workers_share_the_work_and_survive_each_others_death(tiny_llama: Path) -> None:
    config = EngineConfig(model_path=str(tiny_llama), n_ctx=2048, n_parallel=4, flash_attn="off")
    group = Deployment(workers=2).start(config)
    assert isinstance(group, EngineGroup)
    await group.loaded()

    async def one(i: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        request = GenerationRequest(id=str(i), prompt=f"{i} times {i}", params=params)
        return "".join([event.text async for event in group.submit(request)])

    try:
        texts = await asyncio.gather(*(one(i) for i in range(8)))
        states = await group.workers()
        assert [state.name for state in states] == ["0", "1"]
        assert len({state.pid for state in states}) == 2
        assert all(state.stats and state.stats.finished == {"length": 4} for state in states)
        assert (await group.stats()).finished == {"length": 8}
        again = asyncio.gather(*(one(i) for i in range(8)))
        await asyncio.sleep(0.05)
        os.kill(states[1].pid or 0, signal.SIGKILL)
        assert await asyncio.wait_for(again, 30) == texts
    finally:
        await group.close()
