"""Requests to an asyncio engine, and all of their events."""

from __future__ import annotations

import asyncio

from cppbatch import GenerationEvent, GenerationRequest
from cppbatch.cluster.engines.client import EngineClient


async def run(engine: EngineClient, its: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.submit(its)]


async def together(engine: EngineClient, requests: list[GenerationRequest]) -> list[list[GenerationEvent]]:
    return await asyncio.wait_for(asyncio.gather(*(run(engine, its) for its in requests)), 120)
