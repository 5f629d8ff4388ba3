"""The promise: kill -9 and copies made at any moment; acknowledged data exists, or the start names what is missing."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support import tiny_models
from tests.support.batch_files import client_of, line, make_batch, results
from tests.support.server_process import ServerProcess

LONGEST_S = 1.5  # that a server lives, once it is ready
N_LINES = 40
SAID = ("not committed", "nothing was deleted", "are damaged", "starts over", "starting over", "cannot be read")
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Acknowledged:
    """What a server has acknowledged."""

    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by ID."""
    batches: dict[str, set[str]] = field(default_factory=dict)
    """The lines with results that were read, by batch."""

    def copy(self) -> Acknowledged:
        return Acknowledged(dict(self.files), {each: set(lines) for each, lines in list(self.batches.items())})


class Load:
    """Uploads files, deletes some, runs batches and reads their results, until the server has ended."""

    def __init__(self, server: ServerProcess, known: Acknowledged, rng: random.Random) -> None:
        self._known, self._rng = known, rng
        self._client = client_of(server)
        self._made: list[str] = []
        self._threads = [threading.Thread(target=self._until_gone, args=[each]) for each in (self._upload, self._batch)]
        for thread in self._threads:
            thread.start()

    def _until_gone(self, step: object) -> None:
        try:
            while True:
                step()  # type: ignore[operator]
        except openai.APIConnectionError:
            pass

    def _upload(self) -> None:
        data = self._rng.randbytes(self._rng.choice([10, 1000, 300_000]))
        file_id = self._client.files.create(file=data, purpose="user_data").id
        self._known.files[file_id] = hashlib.sha256(data).hexdigest()
        if len(self._known.files) > 30:
            oldest = next(iter(self._known.files))
            del self._known.files[oldest]  # first: its deletion may not be acknowledged any more
            self._client.files.delete(oldest)

    def _batch(self) -> None:
        ids = (
            self._made
        )  # not those of earlier lives: a copy can have batches that wait for their results to be restored
        if sum(self._client.batches.retrieve(each).status not in ENDED for each in ids) < 2:
            work = b"\n".join(line(f"item-{i}", max_tokens=8 + i, ignore_eos=True) for i in range(N_LINES))
            batch_id = make_batch(self._client, work).id
            self._made.append(batch_id)
            self._known.batches[batch_id] = set()
        for batch_id in list(self._known.batches)[-3:]:
            self._known.batches[batch_id] |= answered(self._client, batch_id)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def output_id(client: OpenAI, batch_id: str) -> str | None:
    """The file of a batch's results, also those so far."""
    try:
        batch = client.batches.retrieve(batch_id)
    except openai.NotFoundError:
        return None
    so_far: Any = batch.to_dict().get("results_so_far") or {}
    return batch.output_file_id or (so_far["output_file_id"] if so_far.get("output_bytes") else None)


def answered(client: OpenAI, batch_id: str) -> set[str]:
    """The lines of a batch with readable results."""
    found = [each["custom_id"] for each in results(client, output_id(client, batch_id))]
    assert len(found) == len(set(found)), "a line was answered twice"
    return set(found)


def readable(client: OpenAI, batch_id: str) -> set[str]:
    """The same; none if the results are missing from a copy."""
    try:
        return answered(client, batch_id)
    except openai.NotFoundError:
        return set()


def start(model: Path, data: Path) -> ServerProcess:
    arguments = ["-m", model, "-np", 8, "-c", 4096, "-t", 1, "--in-process", "--no-memory-check", "--data-dir", data]
    return ServerProcess(*map(str, arguments), in_group=True)


def is_ready(server: ServerProcess) -> bool:
    """False if the server has refused to start."""
    assert server._ready.wait(60)
    return bool(server.url)


def losses(server: ServerProcess, known: Acknowledged, data: Path, *, is_copy: bool) -> list[str]:
    """What was acknowledged and is not there, and of a copy also not said to be missing or set aside: its ID is in the
    log, or in a name below `unknown-DATE`. Forgets what was said."""
    client = client_of(server)
    listed = {file.id for file in client.files.list()}
    batches = {batch.id for batch in client.batches.list()}
    aside = " ".join(str(path) for path in data.glob("unknown-*/*/*"))
    said = "".join(server.errors) + aside if is_copy else ""
    lost = []
    for file_id, digest in list(known.files.items()):
        try:
            found = file_id in listed and hashlib.sha256(client.files.content(file_id).content).hexdigest() == digest
        except openai.NotFoundError:
            found = False
        if not found:
            del known.files[file_id]
            if file_id not in said:
                lost.append(f"file {file_id}")
    for batch_id, lines in list(known.batches.items()):
        found = batch_id in batches and lines <= readable(client, batch_id)
        if not found:
            del known.batches[batch_id]
            if batch_id not in said and (output_id(client, batch_id) or batch_id) not in said:
                lost.append(f"{len(lines)} lines of {batch_id}")
    return lost


def torn_copy(data: Path, copy: Path) -> None:
    """`cp -r` of a folder in use, which continues if a file has just been renamed or deleted."""
    for folder, _, names in os.walk(data):
        target = copy / Path(folder).relative_to(data)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            try:
                shutil.copy2(Path(folder, name), target / name)
            except FileNotFoundError:
                continue


def databases_first(data: Path, copy: Path) -> None:
    """The copy of docs/operations.md."""
    # Not `rglob`, which raises where a folder has just been deleted.
    paths = [Path(folder, name) for folder, _, names in os.walk(data) for name in names]
    for each in [path for path in paths if ".sqlite3" in path.name and not path.name.endswith("-shm")]:
        target = copy / each.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(each, target)
        except FileNotFoundError:
            continue
    for folder, _, names in os.walk(data):
        target = copy / Path(folder).relative_to(data)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if ".sqlite3" not in name:
                try:
                    shutil.copy2(Path(folder, name), target / name)
                except FileNotFoundError:
                    continue


@pytest.mark.parametrize("n_kills", [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_acknowledged_data_survives_kills_and_copies_made_meanwhile(tmp_path: Path, n_kills: int) -> None:
    """Every third life ends with the folder replaced by a copy that was made while the server ran."""
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    rng = random.Random(seed)
    model = tiny_models.llama(tmp_path / "tiny.gguf")
    data, known = tmp_path / "data", Acknowledged()
    refused: list[str] = []
    copied: Path | None = None
    n_copies = {torn_copy: 0, databases_first: 0}
    n_said, n_files, n_lines = 0, 0, 0
    for kill in range(1, n_kills + 1):
        server = start(model, data)
        if not is_ready(server):  # only a copy may be refused, and with a reason
            assert server.wait() == 2
            assert copied
            refused.append(server.stop())
            assert str(data) in refused[-1]
            shutil.rmtree(data)
            known, copied = Acknowledged(), None
            continue
        lost = losses(server, known, data, is_copy=copied is not None)
        assert not lost, f"seed {seed}, kill {kill}: {lost}\n{''.join(server.errors)}"
        n_said += any(word in each for each in server.errors for word in SAID)
        n_files, n_lines = n_files + len(known.files), n_lines + sum(map(len, known.batches.values()))
        load, copied = Load(server, known, rng), None
        time.sleep(rng.uniform(0, LONGEST_S))
        if kill % 3 == 0:
            at_copy, copied, make = known.copy(), tmp_path / f"copy-{kill}", rng.choice(list(n_copies))
            make(data, copied)
            n_copies[make] += 1
            time.sleep(rng.uniform(0, 0.3))
        server.kill_group()
        load.join()
        if copied:
            # Those that were being deleted during the copy may be missing from it.
            at_copy.files = {each: at_copy.files[each] for each in at_copy.files.keys() & known.files.keys()}
            known = at_copy
            shutil.rmtree(data)
            copied.rename(data)
    print(
        f"seed {seed}: {n_kills} kills, {n_files} files and {n_lines} lines looked for; copies put back: "
        f"{n_copies[torn_copy]} torn, {n_copies[databases_first]} databases first; starts refused: {len(refused)}; "
        f"starts with something to say: {n_said}"
    )
    print("".join(refused))
