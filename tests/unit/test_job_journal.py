"""A job's results on disk: each line of the input is answered once, wherever the process dies."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch.errors import StorageError
from cppbatch.jobs.database import IN_MEMORY
from cppbatch.jobs.durable_files import DurableFile
from cppbatch.jobs.job_request import JobRequest, JobResponse, RejectedLine
from cppbatch.jobs.journal import Journal, rejection_line, response_line
from cppbatch.jobs.ledger import Ledger
from tests.support.job_results import ids_of, item, lines_of, opened, result
from tests.support.randomised import seeds

# --- continuing -----------------------------------------------------------------------------------------------------


def test_recorded_items_are_not_run_again(tmp_path: Path) -> None:
    items = [item(i) for i in range(1, 6)]
    journal = opened(tmp_path)
    assert journal.register(items) == items
    journal.record([result(items[0]), result(items[3], status=500)])
    journal.close()

    journal = opened(tmp_path)
    assert (journal.n_completed, journal.n_failed) == (1, 1)
    assert journal.register(items) == [items[1], items[2], items[4]]
    assert journal.tokens["completion_tokens"] == 6
    assert ids_of(tmp_path / "out.jsonl") == ["id-1"]
    assert ids_of(tmp_path / "errors.jsonl") == ["id-4"]


def test_a_partial_write_before_a_crash_is_cut_off(tmp_path: Path) -> None:
    items = [item(1), item(2)]
    journal = opened(tmp_path)
    journal.register(items)
    journal.record([result(items[0])])
    journal.close()
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(result(items[1]).data + b'{"custom_id": "ha')

    journal = opened(tmp_path)
    assert ids_of(tmp_path / "out.jsonl") == ["id-1"]
    assert journal.register(items) == [items[1]]


class PowerLoss(Exception):
    pass


@pytest.mark.parametrize("ordered", [False, True])
@seeds(ring=3, nightly=8)
def test_wherever_it_dies_each_line_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, ordered: bool
) -> None:
    """Dies before or after any step to the disk, with random results in random groups, until all are done."""
    rng = random.Random(seed)
    items = [item(i, prompt="x" * rng.randrange(30)) for i in range(1, 61)]

    def mortal(kind: type, name: str) -> None:
        living = getattr(kind, name)

        def step(*arguments: object, **named: Any) -> object:
            if rng.random() < 0.1:
                raise PowerLoss
            done = living(*arguments, **named)
            if rng.random() < 0.1:
                raise PowerLoss
            return done

        monkeypatch.setattr(kind, name, step)

    mortal(Ledger, "record")
    mortal(Ledger, "release")
    mortal(Ledger, "register")
    mortal(DurableFile, "append")

    def live() -> None:
        ledger = Ledger(tmp_path / "job")
        try:
            journal = Journal(ledger, tmp_path / "out.jsonl", tmp_path / "errors.jsonl", ordered=ordered)
            for at in range(0, len(items), 16):
                to_do = journal.register(items[at : at + 16])
                rng.shuffle(to_do)
                while to_do:
                    n = rng.randrange(1, 5)
                    group, to_do = to_do[:n], to_do[n:]
                    journal.record([result(each, status=400 if each.line % 10 == 0 else 200) for each in group])
        except PowerLoss:
            pass
        finally:
            ledger.close()  # as the end of a process would; the files are as they are

    n_lives = 0
    while n_lives < 400:
        n_lives += 1
        live()
        ledger = Ledger(tmp_path / "job")
        n_ended = ledger.n_completed + ledger.n_failed
        ledger.close()
        if n_ended == len(items):
            break
    monkeypatch.undo()
    last = opened(tmp_path, ordered=ordered)
    assert last.register(items) == []
    last.close()
    good = [each.custom_id for each in items if each.line % 10]
    assert n_lives > 3
    found = ids_of(tmp_path / "out.jsonl")
    assert (found if ordered else sorted(found)) == (good if ordered else sorted(good))
    assert Counter(ids_of(tmp_path / "errors.jsonl")) == Counter(f"id-{i}" for i in range(10, 61, 10))


def test_ordered_results_wait_for_earlier_lines_on_the_disk(tmp_path: Path) -> None:
    items = [item(i) for i in range(1, 5)]
    journal = opened(tmp_path, ordered=True)
    journal.register(items)
    journal.record([result(items[2]), result(items[3])])
    assert ids_of(tmp_path / "out.jsonl") == []
    journal.close()

    journal = opened(tmp_path, ordered=True)
    assert journal.register(items) == items[:2]
    journal.record([result(items[0])])
    assert ids_of(tmp_path / "out.jsonl") == ["id-1"]
    journal.record([result(items[1], status=400)])  # refused: nothing waits for it any more
    assert ids_of(tmp_path / "out.jsonl") == ["id-1", "id-3", "id-4"]


def test_failed_lines_can_be_tried_again(tmp_path: Path) -> None:
    items = [item(1), item(2)]
    journal = opened(tmp_path)
    journal.register(items)
    journal.record([result(items[0], status=500), result(items[1])])
    journal.ledger.reopen_failed()
    journal.close()
    journal = opened(tmp_path)
    assert journal.n_failed == 0
    assert journal.register(items) == [items[0]]
    journal.record([result(items[0])])
    assert sorted(ids_of(tmp_path / "out.jsonl")) == ["id-1", "id-2"]
    assert ids_of(tmp_path / "errors.jsonl") == []


def test_removed_errors_are_not_missed(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(1), item(2)])
    journal.record([result(item(1), status=500)])
    journal.close()
    (tmp_path / "errors.jsonl").unlink()
    journal = opened(tmp_path)
    journal.record([result(item(2), status=500)])
    journal.close()
    opened(tmp_path).close()
    assert ids_of(tmp_path / "errors.jsonl") == ["id-2"]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("failing", ["record", "release"])
def test_results_that_the_ledger_could_not_record_are_not_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, ordered: bool
) -> None:
    """Also if the same journal continues after that."""
    items = [item(i) for i in range(1, 5)]
    journal = opened(tmp_path, ordered=ordered)
    journal.register(items)

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    results = [result(items[0]), result(items[1], status=500)]
    with monkeypatch.context() as patched, contextlib.suppress(StorageError):
        patched.setattr(journal.ledger, failing, full)
        journal.record(results)
    if failing == "record":
        journal.record(results)
    journal.record([result(items[2]), result(items[3], status=500)])
    journal.close()
    opened(tmp_path, ordered=ordered).close()
    assert ids_of(tmp_path / "out.jsonl") == ["id-1", "id-3"]
    assert ids_of(tmp_path / "errors.jsonl") == ["id-2", "id-4"]


def test_a_short_result_has_the_requested_log_probabilities() -> None:
    plain = JobRequest(
        line=1, custom_id="a", url="/v1/completions", body={"prompt": "b"}, is_plain=True, content_hash=1
    )
    choice: dict[str, Any] = {"text": "c", "finish_reason": "stop", "logprobs": {"tokens": ["c"]}}
    told = msgspec.json.decode(
        response_line(plain, JobResponse(status=200, body={"choices": [choice], "usage": {}})).data
    )
    assert told == {"custom_id": "a", "line": 1, **choice, "usage": {}}


def test_no_text_ends_a_line_of_the_results() -> None:
    text = "a\x85b\u2028c\u2029d\ne"
    line = response_line(item(1), JobResponse(status=200, body={"text": text}))
    (only,) = line.data.decode().splitlines()
    assert msgspec.json.decode(only)["response"]["body"]["text"] == text


def test_several_texts_on_a_plain_line_have_a_vector_each() -> None:
    plain = JobRequest(
        line=1, custom_id="a", url="/v1/embeddings", body={"input": ["b", "c"]}, is_plain=True, content_hash=1
    )
    body = {"data": [{"embedding": [0.5]}, {"embedding": [0.25]}], "usage": {}}
    assert msgspec.json.decode(response_line(plain, JobResponse(status=200, body=body)).data)["embeddings"] == [
        [0.5],
        [0.25],
    ]
    body["data"] = [{"embedding": [0.5]}]
    assert msgspec.json.decode(response_line(plain, JobResponse(status=200, body=body)).data)["embedding"] == [0.5]


# --- lines that are not as they should be ---------------------------------------------------------------------------


def test_a_second_line_with_the_same_id_is_refused_with_the_first_ones_number(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    items = [item(1, "a"), item(2, "b"), item(3, "a")]
    assert journal.register(items) == items[:2]
    later = [item(4, "b"), item(5, "c")]
    assert journal.register(later) == later[1:]
    errors = lines_of(tmp_path / "errors.jsonl")
    assert [(error["line"], error["error"]["code"]) for error in errors] == [(3, "duplicate_id"), (4, "duplicate_id")]
    assert "line 1 has the same custom_id 'a'" in errors[0]["error"]["message"]
    assert journal.register(items) == items[:2]  # and once is enough
    assert len(lines_of(tmp_path / "errors.jsonl")) == 2


def test_a_refused_line_is_written_once(tmp_path: Path) -> None:
    bad = RejectedLine(line=1, code="invalid_json", message="is no JSON", content_hash=5)
    journal = opened(tmp_path)
    assert journal.register([bad, item(2)]) == [item(2)]
    journal.close()
    journal = opened(tmp_path)
    assert journal.register([bad, item(2)]) == [item(2)]
    assert [line["error"]["message"] for line in lines_of(tmp_path / "errors.jsonl")] == ["is no JSON"]


def test_a_failed_line_that_was_corrected_is_answered(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([RejectedLine(line=1, code="invalid_json", message="is no JSON", content_hash=5), item(2)])
    journal.ledger.reopen_failed()
    assert journal.register([item(1), item(2)]) == [item(1), item(2)]


def test_a_duplicate_that_was_renamed_is_answered(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(1, "a"), item(2, "a")])
    journal.ledger.reopen_failed()
    assert journal.register([item(1, "a"), item(2, "b")]) == [item(1, "a"), item(2, "b")]


def test_a_line_that_changed_after_its_result_was_written_ends_the_job(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(1), item(2)])
    journal.record([result(item(1))])
    with pytest.raises(StorageError, match="line 1 of the input has changed since its result was written"):
        journal.register([item(1, prompt="other"), item(2)])


def test_a_line_that_changed_before_it_was_answered_is_taken_as_it_is_now(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(1)])
    changed = item(1, "new", prompt="other")
    assert journal.register([changed]) == [changed]
    assert journal.register([item(2, "id-1")]) == [item(2, "id-1")]  # its old id is free


@pytest.mark.parametrize(
    "ids_now",
    ["xabcd", "bcd", "badc", "axbcd", "dcba", "ab"],
    ids=["inserted first", "first removed", "swapped", "inserted", "reversed", "shortened"],
)
def test_unanswered_lines_may_be_edited(tmp_path: Path, ids_now: str) -> None:
    journal = opened(tmp_path)
    journal.register([item(line, custom_id) for line, custom_id in enumerate("abcd", 1)])
    journal.close()
    journal = opened(tmp_path)
    now = [item(line, custom_id) for line, custom_id in enumerate(ids_now, 1)]
    assert journal.register(now[:2]) + (journal.register(now[2:]) if now[2:] else []) == now


def test_ordered_results_do_not_wait_for_a_removed_line(tmp_path: Path) -> None:
    journal = opened(tmp_path, ordered=True)
    journal.register([item(1), item(2), item(3)])
    journal.record([result(item(3))])
    journal.close()
    journal = opened(tmp_path, ordered=True)
    assert journal.register([item(1), item(3)]) == [item(1)]  # the second one is blank now
    journal.record([result(item(1))])
    assert ids_of(tmp_path / "out.jsonl") == ["id-1", "id-3"]


# --- files that are not as they should be ---------------------------------------------------------------------------


def test_an_output_that_was_shortened_is_not_written_to(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(1)])
    journal.record([result(item(1))])
    journal.close()
    (tmp_path / "out.jsonl").write_bytes(b"")
    with pytest.raises(StorageError, match=r"has 0 bytes instead of the .* written"):
        opened(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_broken_ledger_says_so(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(StorageError, match="is not a database of cppbatch: move it away"):
        Ledger(tmp_path / "job")


def test_a_ledger_with_a_gap_is_reported(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.register([item(i) for i in range(1, 2000)])
    journal.close()
    data = bytearray((tmp_path / "job").read_bytes())
    data[4096 * 3 : 4096 * 6] = os.urandom(4096 * 3)
    (tmp_path / "job").write_bytes(data)
    with pytest.raises(StorageError, match="is corrupt: restore it from a backup, or move it away"):
        Ledger(tmp_path / "job")


def test_a_ledger_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    Ledger(tmp_path / "job").close()
    with sqlite3.connect(tmp_path / "job") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StorageError, match="written by a newer cppbatch \\(format version 99"):
        Ledger(tmp_path / "job")


def test_a_full_database_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "job")
    ledger.register([item(1)])
    ((pages,),) = ledger._db.execute("PRAGMA page_count")
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="cannot grow because the disk is full"):
        ledger.register([item(i) for i in range(2, 5000)])
    ledger.close()
    ledger = Ledger(tmp_path / "job")
    assert ledger.register([item(1), item(2)]) == ([item(1), item(2)], [])


def test_a_ledger_in_memory_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Ledger(IN_MEMORY).close()
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere/job cannot be opened: its folder must exist"):
        Ledger(tmp_path / "nowhere" / "job")


def test_the_ids_of_results_are_unique_over_jobs(tmp_path: Path) -> None:
    """Two batches may have the same lines, and their results are kept in one table."""
    one = item(1)
    rejected = RejectedLine(line=2, content_hash=0, code="invalid", message="is no JSON", custom_id=None)
    made = [response_line(one, JobResponse(status=200, body={})) for _ in range(2)]
    lines = [*made, *(rejection_line(rejected) for _ in range(2))]
    ids = {msgspec.json.decode(each.data)["id"] for each in lines}
    assert len(ids) == 4
    assert all(each.startswith("batch_req_") for each in ids)


@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl", "out.jsonl.uncommitted"])
@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_file_of_the_job_is_refused_at_once(tmp_path: Path, name: str) -> None:
    journal = opened(tmp_path)
    journal.register([item(1), item(2)])
    journal.record([result(item(1)), result(item(2), status=500)])
    journal.close()
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b"{}\n")  # not committed
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=r"cannot be written \(it is not a regular file\)"):
        opened(tmp_path)
