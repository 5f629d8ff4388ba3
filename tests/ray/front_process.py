"""A front in a separate process: `python -m tests.ray.front_process ADDRESS MODEL`. Runs eight endless requests, and
prints a line when each has a token."""

from __future__ import annotations

import asyncio
import sys

import cppbatch.ray  # noqa: F401  # before Ray: its settings

import ray  # isort: skip

from cppbatch import EngineConfig, GenerationRequest, SamplingParams
from cppbatch.ray.engine import RayEngine
from cppbatch.ray.replica.serve_replicas import ServeReplicas


async def main(address: str, model: str) -> None:
    ray.init(address, log_to_driver=False, namespace="cppbatch-tests")
    async with RayEngine(EngineConfig(model_path=model), ServeReplicas("cppbatch")) as engine:
        params = SamplingParams(max_tokens=100_000, ignore_eos=True)
        streams = [
            engine.submit(GenerationRequest(id=str(i), prompt="On and on", params=params, clamp_max_tokens=True))
            for i in range(8)
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        print("running", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
