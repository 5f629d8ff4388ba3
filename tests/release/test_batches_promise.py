"""The promise: kill -9 at any moment, and each line of a batch has exactly one answer, that of an undisturbed run."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.support.batch_files import Json, client_of, counts, is_same_text, line, make_batch, results, wait_for
from tests.support.server_process import ServerProcess

FLOATS = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]  # with F32 weights: greedy texts are the same in any batch
LONGEST_S = 1.2  # that a server lives, once it is ready
OTHER = os.urandom(400_000)


class Uploads:
    """Sends files, one after the other, until the server has ended."""

    def __init__(self, server: ServerProcess) -> None:
        self.acknowledged: list[str] = []
        self._client = client_of(server)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self.acknowledged.append(self._client.files.create(file=OTHER, purpose="user_data").id)
        except openai.APIConnectionError:
            pass

    def join(self) -> list[str]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.acknowledged


def choices(answers: list[Json]) -> dict[str, Json]:
    """What was generated, by custom_id, which must be there once."""
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0] for answer in answers}
    assert len(found) == len(answers), "a line was answered twice"
    return found


@pytest.mark.parametrize(
    ("n_kills", "n_items", "n_tokens"),
    [pytest.param(2, 60, 50), pytest.param(20, 500, 250, marks=[pytest.mark.soak, pytest.mark.timeout(600)])],
)
def test_a_batch_survives_kill_9_with_the_same_results(
    tiny_llama: Path, tmp_path: Path, n_kills: int, n_items: int, n_tokens: int
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    data, acknowledged, done = tmp_path / "data", [], []
    work = b"\n".join(
        line(f"item-{i}", max_tokens=n_tokens // 2 + 7 * i % n_tokens, ignore_eos=True, logprobs=2)
        for i in range(n_items)
    )
    batch_id = ""
    for _ in range(n_kills):  # paced: the whole batch takes twice as long as these servers live
        server = start(tiny_llama, data, module="tests.support.paced_server")
        batch_id = batch_id or make_batch(client_of(server), work).id
        uploads = Uploads(server)
        time.sleep(rng.uniform(0, LONGEST_S))
        done.append(counts(client_of(server).batches.retrieve(batch_id)).completed)
        server.kill_group()
        acknowledged += uploads.join()
    print(f"seed {seed}: lines done when it was killed: {done}; files uploaded: {len(acknowledged)}")
    assert done[-1] < n_items, "it was over before the last death"
    assert done == sorted(done), "what was done is done"

    with start(tiny_llama, data) as server:
        client = client_of(server)
        batch = wait_for(client, batch_id, "completed", seconds=120)
        assert counts(batch) == (n_items, n_items, 0)
        assert batch.error_file_id is None
        kept = {file.id: file.bytes for file in client.files.list(purpose="user_data")}
        assert set(acknowledged) <= set(kept)
        assert set(kept.values()) <= {len(OTHER)}
        assert all(client.files.content(file_id).content == OTHER for file_id in acknowledged[-3:])
        listed = {file.id for file in client.files.list()}
        assert {path.name for path in (data / "files").iterdir()} == listed
        assert not [*(data / "incoming").iterdir(), *(data / "batches").iterdir()]

        disturbed = choices(results(client, batch.output_file_id))
        whole = wait_for(client, make_batch(client, work).id, "completed", seconds=120)
        undisturbed = choices(results(client, whole.output_file_id))
        assert disturbed.keys() == undisturbed.keys() == {f"item-{i}" for i in range(n_items)}
        different = [name for name in disturbed if not is_same_text(disturbed[name], undisturbed[name])]
        assert not different


def start(model: Path, data: Path, module: str = "cppbatch") -> ServerProcess:
    arguments = ["-m", model, "-np", 8, "-c", 8192, "--data-dir", data, *FLOATS]
    return ServerProcess(*map(str, arguments), in_group=True, module=module).wait_ready()
