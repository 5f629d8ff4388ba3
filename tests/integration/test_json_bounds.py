"""JSON is measured on its bytes, by size and depth, and refused before it is decoded if it exceeds the bounds."""

from __future__ import annotations

import asyncio
from time import thread_time
from typing import Any

import msgspec

from tests.support.http_client import Http

USER = {"role": "user", "content": "x"}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def hostile() -> dict[str, tuple[str, dict[str, Any], str]]:
    """The path, the body, and what the error names. Not made when the file is imported: it takes a second."""
    return {
        "biases": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1_000_000)}}, "body"),
        "some biases": (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(50_000)}},
            "logit_bias",
        ),
        "pairs": ("/completion", {"prompt": "a", "logit_bias": [[1, 1]] * 90_000}, "logit_bias"),
        "messages": ("/v1/chat/completions", {"messages": [USER] * 350_000}, "body"),
        "some messages": ("/v1/chat/completions", {"messages": [USER] * 40_000}, "messages"),
        "blocks": ("/v1/messages", {"model": "tiny-llama", "max_tokens": 1, "messages": [USER] * 30_000}, "too long"),
        "items": ("/v1/responses", {"input": [USER] * 30_000}, "input"),
        "tools": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 180_000}, "body"),
        "some tools": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 20_000}, "tools"),
        "ids": ("/v1/completions", {"prompt": [12] * 3_200_000}, "body"),
        "some ids": ("/v1/completions", {"prompt": [12] * 400_000, "n": 128}, "prompt"),
        "anything": ("/v1/completions", {"prompt": "a", "unknown": [[0]] * 2_000_000}, "body"),
        "a number of 5000 digits": ("/completion", {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        "an index of 5000 digits": (
            "/v1/completions",
            {"prompt": "a", "json_schema": {"anyOf": [{"type": "null"}], "$ref": "#/anyOf/" + "1" * 5000}},
            "json_schema",
        ),
        "biases of texts of digits": (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {"\u0663" * i: 1 for i in range(1, 400)}},
            "logit_bias",
        ),
        "adapters": ("/v1/completions", {"prompt": "a", "lora": [{"id": 0, "scale": 1}] * 49_000}, "lora[1].id"),
        "texts to fill in": (
            "/infill",
            {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x"}] * 50_000},
            "input",
        ),
        "a schema for each of 128": (
            "/v1/completions",
            {
                "prompt": "a",
                "n": 128,
                "json_schema": {"properties": {f"p{i}": {"type": "null"} for i in range(20_000)}},
            },
            "json_schema",
        ),
        "a schema as text": (
            "/v1/completions",
            {"prompt": "a", "json_schema": "[" + "1," * 6_000_000 + "1]"},
            "json_schema",
        ),
        "visible tokens": ("/v1/completions", {"prompt": "a", "visible_tokens": ["x " * 1_000_000]}, "visible_tokens"),
        "biases of texts": (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(2000)}},
            "logit_bias",
        ),
        "a salt": ("/v1/completions", {"prompt": "a", "n": 128, "cache_salt": "x" * 14_000_000}, "cache_salt"),
        "an adapter's name": ("/v1/completions", {"prompt": "a", "n": 128, "lora": {"x" * 4_000_000: 1}}, "lora"),
        "stop tokens": ("/v1/completions", {"prompt": "a", "stop_token_ids": list(range(490_000))}, "stop_token_ids"),
        "banned tokens": (
            "/v1/completions",
            {"prompt": "a", "suppress_tokens": list(range(490_000))},
            "suppress_tokens",
        ),
        "fields": ("/completion", {"prompt": "a", "response_fields": ["content"] * 400_000}, "response_fields"),
        "a text for each of 128": ("/v1/completions", {"prompt": "x " * 5_000_000, "n": 128}, "prompt"),
    }


async def test_bodies_of_many_small_values_are_refused_and_delay_no_other_request(http: Http) -> None:
    bodies = {name: (path, msgspec.json.encode(body), field) for name, (path, body, field) in hostile().items()}
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, thread_time() - began)

    for name, (path, body, field) in bodies.items():
        longest = 0.0
        ticking = asyncio.create_task(tick())
        async with http.post(path, data=body) as answer:
            text = await answer.text()
        ticking.cancel()
        print(f"{name}: {len(body) / 1e6:.1f} MB, the event loop was busy for {1000 * longest:.0f} ms at most")
        assert answer.status == 400, f"{name}: {text[:500]}"
        assert field in text[:200], f"{name}: {text[:500]}"
        assert longest < 1, name  # mostly under 0.1 s; it was 2 to 10 s
