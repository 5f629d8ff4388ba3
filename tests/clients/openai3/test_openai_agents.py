"""OpenAI Agents SDK: agents over responses and chat completions; tools, handoffs, structured output, streams."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from pydantic import BaseModel

from tests.clients.serving import CONCLUSION, KEY, MODEL, QUESTION, REASONS_THEN_ANSWERS, THOUGHT, Serving

MODELS: Any = {"chat completions": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Forecast(BaseModel):
    """The weather of some days."""

    city: Literal["Paris", "Oslo", "Lima", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(params=MODELS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def agent_of(server: Serving, api: str, key: str = KEY, n: int = 200, settings: Any = None, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=key, max_retries=0, timeout=60)
    return Agent(
        name="assistant",
        model=MODELS[api](model=MODEL, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=n, include_usage=True, **settings or {}),
        **fields,
    )


async def test_16_at_once_are_the_same_as_alone_and_as_streams(api: str, server: Serving) -> None:
    agent = agent_of(server, api)
    questions = [f"{QUESTION} Answer in {n} words." for n in (2, 3, 4, 5)]
    alone = [await Runner.run(agent, question) for question in questions]
    together = await asyncio.gather(*(Runner.run(agent, question) for question in questions * 4))
    assert [run.final_output for run in together] == [run.final_output for run in alone] * 4
    assert "Paris" in alone[0].final_output
    streamed = Runner.run_streamed(agent, questions[0])
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == streamed.final_output == alone[0].final_output
    for usage in (alone[0].context_wrapper.usage, streamed.context_wrapper.usage):
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 6
    assert streamed.context_wrapper.usage.output_tokens == alone[0].context_wrapper.usage.output_tokens


async def test_a_forced_tool_is_called_and_the_agent_continues(api: str, server: Serving) -> None:
    asked: list[Forecast] = []

    @function_tool(is_enabled=lambda _context, _agent: not asked)  # or this small model calls it repeatedly
    def get_weather(forecast: Forecast) -> str:
        """The weather in a city."""
        asked.append(forecast)
        return "snow"

    settings = {"tool_choice": "get_weather", "parallel_tool_calls": False}
    run = await Runner.run(agent_of(server, api, n=128, settings=settings, tools=[get_weather]), QUESTION, max_turns=4)
    assert asked
    assert isinstance(asked[0], Forecast)
    assert run.final_output
    items = [item.type for item in run.new_items]
    assert items.index("tool_call_item") < items.index("tool_call_output_item") < items.index("message_output_item")


async def test_a_pydantic_class_is_filled(api: str, server: Serving) -> None:
    agent = agent_of(server, api, n=96, output_type=Forecast)
    runs = await asyncio.gather(*(Runner.run(agent, f"The weather in {city}?") for city in ("Oslo", "Lima") * 8))
    assert all(isinstance(run.final_output, Forecast) for run in runs)


async def test_a_handoff_goes_to_the_other_agent(api: str, server: Serving) -> None:
    guide = agent_of(server, api, instructions="Be brief.")
    guide.name = "guide"
    desk = agent_of(server, api, n=64, settings={"tool_choice": "transfer_to_guide"}, handoffs=[guide])
    run = await Runner.run(desk, QUESTION)
    assert run.last_agent is guide
    assert run.final_output


async def test_reasoning_is_apart_from_the_answer(api: str, reasoning_server: Serving) -> None:
    agent = agent_of(reasoning_server, api, n=64, settings={"extra_body": {"grammar": REASONS_THEN_ANSWERS}})
    run = await Runner.run(agent, QUESTION)
    assert run.final_output == CONCLUSION
    (reasoning,) = (item for item in run.new_items if item.type == "reasoning_item")
    assert THOUGHT in str(reasoning.raw_item)
    again = await Runner.run(agent, [*run.to_input_list(), {"role": "user", "content": "And of Peru?"}])
    assert again.final_output == CONCLUSION


async def test_errors_are_the_sdks_own(api: str, server: Serving, one_at_a_time: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        await Runner.run(agent_of(server, api, key="wrong"), QUESTION)
    with one_at_a_time.filled(), pytest.raises(openai.RateLimitError):
        await Runner.run(agent_of(one_at_a_time, api), QUESTION)
