"""Inputs of batches, and how tests talk about them with the real client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from openai import DefaultHttpxClient, OpenAI
from openai.types import Batch

from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.support.app_thread import AppThread
from tests.support.server_process import ServerProcess

Json = dict[str, Any]
COMPLETIONS = "/v1/completions"

TIE = 0.001


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    """A request in OpenAI's batch format."""
    fields: dict[str, Any] = {"prompt": f"prompt {custom_id}", "max_tokens": 4, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields}).encode()


def lines(n: int, **body: Any) -> bytes:
    return b"\n".join(line(f"item-{i}", **body) for i in range(n)) + b"\n"


def client_of(server: AppThread | ServerProcess, key: str = "none") -> OpenAI:
    plain = DefaultHttpxClient(verify=False)  # reading the certificates of authorities takes longer than most requests
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=plain)


def make_batch(
    client: OpenAI, data: bytes, *, endpoint: str = COMPLETIONS, window: str = "24h", **others: Any
) -> Batch:
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    fields: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": window, **others}
    return client.batches.create(**fields)


class Counts(NamedTuple):
    total: int
    completed: int
    failed: int


def counts(batch: Batch) -> Counts:
    assert batch.request_counts
    return Counts(**batch.request_counts.to_dict())  # type: ignore[arg-type]


def _pauses(first: float) -> Iterator[float]:
    """Seconds, up to a tenth of one: each look costs the server and this process some milliseconds."""
    pause = first
    while True:
        yield pause
        pause = min(1.5 * pause, 0.1)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    pauses = _pauses(0.01)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(next(pauses))


def wait_for(client: OpenAI, batch_id: str, *statuses: str, seconds: float = 30) -> Batch:
    pauses = _pauses(0.02)
    end = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < end, f"it is still {batch.status}: {batch.request_counts}"
        time.sleep(next(pauses))
    return batch


def results(client: OpenAI, file_id: str | None) -> list[Json]:
    """The lines of an output file, each whole."""
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).content.splitlines()]


def is_same_text(one: Json, other: Json) -> bool:
    """Whether two greedy texts are equal, except for a tie of the two most likely tokens, after which they may differ:
    in another batch the last bits of their logits differ."""
    if one["text"] == other["text"]:
        return True
    tokens = zip(one["logprobs"]["tokens"], other["logprobs"]["tokens"], strict=True)
    parting = next(i for i, (ours, theirs) in enumerate(tokens) if ours != theirs)
    best, second = sorted(one["logprobs"]["top_logprobs"][parting].values(), reverse=True)[:2]
    print(f"a tie: token {parting}, {best:.6f} and {second:.6f}")
    return bool(best - second < TIE)


def start_server(model: Path, folder: Path | None, **limits: Any) -> AppThread:
    """A server with batches over that folder."""
    engine = {"model": model, "n_ctx": 2048, "n_parallel": 4, "n_threads": 1}
    settings = ServerSettings(limits=Limits(**limits))
    return AppThread(
        engine, lambda client: create_app(client, settings, open_storage(folder, URLS) if folder else None)
    )
