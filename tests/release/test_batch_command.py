"""`cppbatch batch`: a separate process may be killed at any moment and continues; what it says, in this process."""

from __future__ import annotations

import csv
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from cppbatch.cli import main
from cppbatch.jobs.ledger import Ledger
from tests.support import preloaded
from tests.support.batch_files import is_same_text
from tests.support.job_results import ids_of, lines_of
from tests.support.preloaded import PreloadedProcess
from tests.support.server_process import COMMAND

FAST = ("-np", "8", "-c", "2048", "-t", "1", "-fa", "off", "--no-memory-check")
FLOATS = ("-ctk", "f32", "-ctv", "f32")
"""With these, -fa off and float weights, a text does not depend on what else is in the batch."""


def command(model: Path, source: Path, out: Path, *args: str) -> list[str]:
    return [*COMMAND, "batch", str(source), "-o", str(out), "-m", str(model), *FAST, *args]


def batch(model: Path, source: Path, out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """In this process, with its engine."""
    return run_here(*command(model, source, out, *args)[len(COMMAND) :], "--in-process")


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in this process: a new interpreter would take longer to import the package than most of these run."""
    code, printed, said = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(said):
        patch.setattr(sys, "argv", ["cppbatch", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), said.getvalue())


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def job_of(path: Path, n: int) -> Path:
    """Requests of different lengths, greedy."""
    rng = random.Random(n)
    words = "alpha beta gamma delta epsilon zeta".split()
    return write_lines(
        path,
        (
            request(
                f"item-{i}",
                prompt=f"{i} " + " ".join(rng.choices(words, k=rng.randrange(1, 12))),
                max_tokens=rng.randrange(2, 24),
                temperature=0,
                ignore_eos=True,
                logprobs=2,
            )
            for i in range(n)
        ),
    )


def choices_of(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0] for line in lines_of(path)}


# --- it continues ---------------------------------------------------------------------------------------------------


def started(command: list[str], **options: Any) -> subprocess.Popen[str] | PreloadedProcess:
    """The command in a separate process."""
    if preloaded.is_used:
        return PreloadedProcess(command[len(COMMAND) :], **options)
    return subprocess.Popen(command, text=True, **options)


def kill(process: subprocess.Popen[str] | PreloadedProcess) -> None:
    """As a power loss would: the command and its worker, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in family:
        each.kill()
    process.wait(30)
    psutil.wait_procs(family, timeout=30)


def dies_and_goes_on(model: Path, tmp_path: Path, *, n_items: int, n_kills: int, args: tuple[str, ...] = ()) -> None:
    """Kills a job repeatedly, at random moments; its final output is that of an undisturbed one."""
    source, out, alone = job_of(tmp_path / "in.jsonl", n_items), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert batch(model, source, alone, *FLOATS, *args).returncode == 0
    rng = random.Random(n_items)
    n_done = 0
    for moment in sorted(rng.sample(range(1, n_items * 2 // 3), n_kills)):  # by results, so that it is never the end
        process = started(command(model, source, out, *FLOATS, *args), stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(ids_of_whole(out)) < max(moment, n_done + 1) and process.poll() is None:
            assert time.monotonic() < deadline, "nothing comes"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.02))
        assert process.poll() is None, f"it was done with {moment} of {n_items} results just before"
        kill(process)
        n_done = len(ids_of_whole(out))
    ended = batch(model, source, out, *FLOATS, *args)
    assert ended.returncode == 0, ended.stderr
    found = ids_of(out)
    assert len(found) == n_items
    disturbed, undisturbed = choices_of(out), choices_of(alone)
    assert disturbed.keys() == undisturbed.keys()
    assert [name for name in disturbed if not is_same_text(disturbed[name], undisturbed[name])] == []
    if "--ordered" in args:
        assert found == [f"item-{i}" for i in range(n_items)]


def ids_of_whole(path: Path) -> list[str]:
    """For a file that another program is writing to."""
    if not path.exists():
        return []
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]


@pytest.mark.parametrize(("n_kills", "args"), [(2, ()), (1, ("--ordered",))], ids=["as they come", "ordered"])
def test_killed_at_random_moments_every_item_is_written_once_with_the_same_text(
    tiny_llama: Path, tmp_path: Path, n_kills: int, args: tuple[str, ...]
) -> None:
    dies_and_goes_on(tiny_llama, tmp_path, n_items=100, n_kills=n_kills, args=args)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("args", [(), ("--ordered",)], ids=["as they come", "ordered"])
def test_killed_20_times_in_a_job_of_500_items(tiny_llama: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    dies_and_goes_on(tiny_llama, tmp_path, n_items=500, n_kills=20, args=args)


def test_ctrl_c_shows_how_to_continue(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    process = subprocess.Popen(command(tiny_llama, source, out), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not ids_of_whole(out) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "run the same command to resume" in said
    n = len(ids_of(out))
    assert 0 < n < 400
    assert f"{n} done, 0 failed" in said
    again = batch(tiny_llama, source, out)
    assert f"resuming: {n} lines are done" in again.stderr
    assert sorted(ids_of(out)) == sorted(f"item-{i}" for i in range(400))


def test_a_job_that_is_done_loads_no_model(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    model = tmp_path / "gone.gguf"
    model.write_bytes(tiny_llama.read_bytes())
    assert batch(model, source, out).returncode == 0
    model.write_bytes(tiny_llama.read_bytes().replace(b"llama", b"nosuc"))  # an architecture that cannot be loaded
    again = batch(model, source, out, "--no-profile")
    assert (again.returncode, len(ids_of(out))) == (0, 3), again.stderr
    assert "finished already: 3 lines" in again.stderr


def test_two_at_once_on_one_output_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with closing(Ledger(tmp_path / "out.jsonl.job")):  # as a job has it
        second = batch(tiny_llama, source, out, "--overwrite")
    assert second.returncode == 2
    assert "out.jsonl.job is in use by another cppbatch" in second.stderr
    assert batch(tiny_llama, source, out).returncode == 0


# --- lines that are wrong -------------------------------------------------------------------------------------------


def test_a_bad_line_is_reported_with_its_number_and_the_others_finish(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        request("good-1", prompt="a", max_tokens=2),
        "{not json",
        request("good-1", prompt="b", max_tokens=2),
        {**request("x", prompt="b"), "url": "/v1/nowhere"},
        request("long", prompt="word " * 5000, max_tokens=2),
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
        request("hot", prompt="a", temperature=1e6),
        request("streams", prompt="a", stream=True),
        {"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"prompt": "plain", "max_tokens": 3},
        request("good-2", prompt="a", max_tokens=2),
    ]
    write_lines(source, lines)
    with source.open("ab") as file:
        file.write(bytes(range(128, 256)) + b"\n")
    ended = batch(tiny_llama, source, tmp_path / "out.jsonl")
    assert ended.returncode == 1
    assert sorted(ids_of(tmp_path / "out.jsonl")) == ["good-1", "good-2", "line-10"]
    errors = {error["line"]: error for error in lines_of(tmp_path / "out.errors.jsonl")}
    told = {line: error["error"] or error["response"]["body"]["error"] for line, error in errors.items()}
    assert {line: error["code"] for line, error in told.items() if error["code"]} == {
        2: "invalid_json", 3: "duplicate_id", 4: "invalid_url", 5: "context_length_exceeded", 6: "missing_custom_id",
        12: "invalid_json",
    }  # fmt: skip
    assert "line 1 has the same custom_id" in told[3]["message"]
    assert "/v1/nowhere" in told[4]["message"]
    assert "prompt" in told[5]["message"]
    assert "temperature: is 1000000.0" in told[7]["message"]
    assert "stream: is true" in told[8]["message"]
    assert "--pooling" in told[9]["message"]
    assert "3 done, 9 failed" in ended.stderr


def test_failed_lines_are_retried_on_request(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [request("a", prompt="a", max_tokens=2), request("b", prompt="b", max_tokens=-2)])
    assert batch(tiny_llama, source, out).returncode == 1
    assert batch(tiny_llama, source, out).returncode == 1  # as it is, not again
    write_lines(source, [request("a", prompt="a", max_tokens=2), request("b", prompt="b", max_tokens=2)])
    ended = batch(tiny_llama, source, out, "--retry-failed")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ids_of(out)) == ["a", "b"]
    assert ids_of(tmp_path / "out.errors.jsonl") == []


def test_a_finished_job_says_so_without_a_plan(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    first = batch(tiny_llama, source, out)
    assert "KV cells" in first.stderr
    again = batch(tiny_llama, source, out)
    assert (again.returncode, again.stderr) == (0, f"finished already: 2 lines\nresults: {out}\n")
    with source.open("a") as file:
        file.write('"one more"\n')
    assert "3 done, 0 failed" in batch(tiny_llama, source, out).stderr


def test_a_finished_job_with_failed_lines_says_how_to_run_them_again(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text('prompt\na\n \n""\n')
    args = ("-n", "2")
    assert batch(tiny_llama, source, out, *args).returncode == 1
    out.unlink()
    again = batch(tiny_llama, source, out, *args)
    assert again.returncode == 1
    assert again.stderr.startswith("finished already: 2 lines, of which 1 failed (--retry-failed runs them again)\n")
    assert len(out.read_text().splitlines()) == 3, "the table is written again"


# --- plain prompts --------------------------------------------------------------------------------------------------


def test_text_and_tables_have_a_prompt_a_line(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = ["one", "two, too", 'three "quoted"']
    text, table = tmp_path / "in.txt", tmp_path / "in.csv"
    text.write_text("\n".join(prompts))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["question", "id"], *([prompt, f"q{i}"] for i, prompt in enumerate(prompts))])
    args = ("-n", "4", "--temp", "0", "--ordered", *FLOATS)
    assert batch(tiny_llama, text, tmp_path / "text.jsonl", *args).returncode == 0
    assert batch(tiny_llama, table, tmp_path / "table.jsonl", "--column", "question", *args).returncode == 0
    from_text, from_table = lines_of(tmp_path / "text.jsonl"), lines_of(tmp_path / "table.jsonl")
    assert [line["custom_id"] for line in from_text] == ["line-1", "line-2", "line-3"]
    assert [line["custom_id"] for line in from_table] == ["q0", "q1", "q2"]
    assert [line["text"] for line in from_text] == [line["text"] for line in from_table]
    assert {line["usage"]["completion_tokens"] for line in from_text} <= {1, 2, 3, 4}


def test_a_folder_of_texts_becomes_a_table_or_a_folder_of_answers_and_continues_when_it_has_grown(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo")
    (folder / "sub" / "b.md").write_text("three")
    (folder / "logo.png").write_bytes(b"\x89PNG\0")
    args = ("-n", "4", "--temp", "0", "--template", "Say: {text}")
    ended = batch(tiny_llama, folder, tmp_path / "out.csv", *args)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("skipped 1 file: logo.png (not text)\n")
    (folder / "a.md").write_text("four")
    assert "3 done, 0 failed" in batch(tiny_llama, folder, tmp_path / "out.csv", *args).stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        answers = {row["file"]: row["answer"] for row in csv.DictReader(file)}
    assert [*answers] == ["a.txt", "sub/b.md", "a.md"]
    assert batch(tiny_llama, folder, tmp_path / "answers", *args).returncode == 0
    assert {name: (tmp_path / "answers" / name).read_text() for name in answers} == answers
    assert "finished already: 3 files" in batch(tiny_llama, folder, tmp_path / "answers", *args).stderr


def test_an_items_own_fields_win_over_the_flags(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat: dict[str, Any] = {"custom_id": "own", "url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5, "ignore_eos": True}
    write_lines(source, [{"prompt": "a", "ignore_eos": True}, chat])
    assert batch(tiny_llama, source, out, "-n", "3").returncode == 0
    used = {line["custom_id"]: line.get("usage") or line["response"]["body"]["usage"] for line in lines_of(out)}
    assert {name: usage["completion_tokens"] for name, usage in used.items()} == {"line-1": 3, "own": 5}


def test_prompts_become_vectors_with_an_embedding_model(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n")
    ended = batch(tiny_llama, source, tmp_path / "out.jsonl", "--pooling", "mean", "--endpoint", "embeddings")
    assert ended.returncode == 0, ended.stderr
    assert all(sum(x * x for x in line["embedding"]) == pytest.approx(1) for line in lines_of(tmp_path / "out.jsonl"))


# --- refusals before anything runs ------------------------------------------------------------------------------------


def test_a_foreign_output_is_not_touched(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    out.write_text("somebody's work\n")
    ended = batch(tiny_llama, source, out)
    assert (ended.returncode, out.read_text()) == (2, "somebody's work\n")
    assert "already exists" in ended.stderr
    assert "--overwrite" in ended.stderr
    assert batch(tiny_llama, source, out, "--overwrite").returncode == 0
    assert len(ids_of(out)) == 2


def test_other_settings_do_not_mix_into_one_output(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    assert batch(tiny_llama, source, out, "--temp", "0").returncode == 0
    ended = batch(tiny_llama, source, out, "--temp", "0.5")
    assert ended.returncode == 2
    assert "was started with temperature 0.0, but temperature is now 0.5" in ended.stderr


def test_a_removed_output_is_started_over(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = job_of(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    assert batch(tiny_llama, source, out).returncode == 0
    out.unlink()
    ended = batch(tiny_llama, source, out)
    assert ended.returncode == 0
    assert "starting over" in ended.stderr
    assert len(ids_of(out)) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.jsonl", "-o", "out.jsonl"], "missing.jsonl"),
        (["in.jsonl", "-o", "in.jsonl"], "the input and -o are the same file"),
        (["in.jsonl", "-o", "nowhere/out.jsonl"], "nowhere"),
        (["in.jsonl", "-o", "out.jsonl", "--temp", "-3"], "temperature: is -3"),
        (["in.jsonl", "-o", "out.jsonl", "--column", "a"], "column"),
        (["in.xyz", "-o", "out.jsonl"], ".jsonl"),
    ],
)
def test_impossible_jobs_are_refused_before_a_model_is_loaded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    job_of(tmp_path / "in.jsonl", 2)
    (tmp_path / "in.xyz").touch()
    monkeypatch.chdir(tmp_path)
    ended = run_here("batch", *args, "-m", str(tiny_llama))
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
