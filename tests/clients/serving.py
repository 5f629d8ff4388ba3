"""The server for tests of clients, and the requests that they send to it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tests.support.server_process import ServerProcess

KEY = "sk-clients"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Name the capital of France."
CITIES = ("Paris", "Oslo", "Lima", "Rome")
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

T = TypeVar("T")
R = TypeVar("R")


class Serving:
    """A running server. `url` has no path; OpenAI's clients take `v1`."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.url = process.url
        self.v1 = f"{process.url}/v1"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON answer, without a client library."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stats(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/stats", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            stats: dict[str, Any] = json.load(answer)
            return stats

    def wait(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 20) -> dict[str, Any]:
        """The counters, once this holds for them."""
        end = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < end, stats
            time.sleep(0.02)
        return stats

    def wait_idle(self) -> dict[str, Any]:
        return self.wait(lambda stats: stats["running"] == stats["waiting"] == 0)

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """While this is open, a server for one request at a time has one running and one waiting."""
        self.wait_idle()
        stop = threading.Event()
        body = {
            "prompt": "Once upon a time",
            "max_tokens": 1900,
            "ignore_eos": True,
            "speculate": False,
            "stream": True,
        }

        def read() -> None:
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{self.v1}/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                for _ in answer:
                    if stop.is_set():
                        break

        readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
        readers[0].start()
        self.wait(lambda stats: stats["running"] == 1)
        readers[1].start()
        self.wait(lambda stats: stats["waiting"] == 1)
        try:
            yield
        finally:
            stop.set()


def at_once(function: Callable[[T], R], arguments: list[T]) -> list[R]:
    """The results of 16 threads, each in its place."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, arguments))


def check_weather(arguments: Any) -> None:
    """What WEATHER_SCHEMA demands."""
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in CITIES
    assert isinstance(arguments["days"], int)
    assert 1 <= arguments["days"] <= 5


# What a model that reasons would write after the prompt of the fixture `reasoning_server`, as a grammar.
THOUGHT, CONCLUSION = "France is in Europe.", "It is Paris."
REASONS_THEN_ANSWERS = f'root ::= "{THOUGHT}\\n</think>\\n\\n{CONCLUSION}"'
REASONING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
