"""examples/: each program runs from the root of the repository and prints what its docstring states."""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny_projectors
from tests.support.media_samples import BLUE, RED

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORT = sorted((ROOT / "examples" / "short").glob("*.py"))
ENV = {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}

Run = Callable[..., str]


def start(name: str, *args: str | Path, stdin: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "examples" / f"{name}.py", *args]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **ENV},
        text=True,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(name: str, *args: str | Path) -> str:
    """What it prints, in this process: to import the package again would take longer than most of them."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(ROOT)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.fixture
def models(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --model, the programs find a stand-in for the default model."""
    monkeypatch.setenv("CPPBATCH_MODELS", str(stand_in.parent))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_short_and_in_the_list_of_the_readme(example: Path) -> None:
    source = example.read_text()
    assert len(source.splitlines()) < 60
    assert "args.model or pull_default()" in source
    assert f"[{example.name}]({example.name})" in (ROOT / "examples" / "README.md").read_text()


def code_lines(source: str) -> list[str]:
    """The lines of a program without its docstring and blank lines."""
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    return [line for line in source.replace(f'"""{docstring}"""', "").splitlines() if line.strip()]


@pytest.mark.parametrize("example", SHORT, ids=lambda path: path.stem)
def test_a_short_program_has_twelve_lines_and_no_template_written_by_hand(example: Path) -> None:
    source = example.read_text()
    assert len(code_lines(source)) <= 12
    assert "<|" not in source
    assert f"[short/{example.name}](short/{example.name})" in (ROOT / "examples" / "README.md").read_text()


def test_the_short_program_for_labels_classifies_each_row(default_model: Path) -> None:
    reviews = ROOT / "examples/data/reviews.csv"
    rows = list(csv.DictReader(run("short/classify", reviews).splitlines()))
    with reviews.open(newline="") as file:
        assert [{"id": row["id"], "review": row["review"]} for row in rows] == list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["positive", "negative"] * 3


@pytest.mark.usefixtures("models")
def test_the_short_programs_summarise_and_embed(tmp_path: Path) -> None:
    lines = run("short/summaries", ROOT / "examples/data/notes").splitlines()
    assert {name for name in ("bakery.txt", "ferry.txt", "library.txt") if any(name in line for line in lines)} == {
        "bakery.txt", "ferry.txt", "library.txt",
    }  # fmt: skip

    shown = run("short/embeddings", ROOT / "examples/data/questions.txt", tmp_path / "vectors.npy")
    assert re.fullmatch(r"(\d+) vectors of (\d+) numbers\n", shown)
    assert np.allclose(np.linalg.norm(np.load(tmp_path / "vectors.npy"), axis=1), 1, atol=1e-5)

    temperatures = [line.split()[0] for line in run("short/temperatures", "Tell me about the sea.").splitlines()]
    assert temperatures == [f"{i / 10:.1f}" for i in range(16)]


@pytest.mark.usefixtures("models")
def test_the_short_programs_run_without_arguments() -> None:
    assert len(run("short/classify").splitlines()) == 7
    process = start("short/chat", stdin=subprocess.DEVNULL)
    assert (process.communicate(timeout=120)[1], process.returncode) == ("", 0)


@pytest.mark.usefixtures("models")
def test_ctrl_c_in_the_short_chat_stops_an_answer_and_the_conversation_continues() -> None:
    process = start("short/chat", stdin=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write("Tell me a very long story about the sea, with many chapters.\n")
    process.stdin.flush()
    while len(process.stdout.read(1)) and process.stdout.read(40).strip() == "":
        pass  # until it answers
    process.send_signal(signal.SIGINT)
    shown, err = process.communicate("What did I ask you before?\n\n", timeout=120)
    assert process.returncode == 0, err
    assert shown.count("\n> ") == 2, "the next question is asked for, and after its answer another one"


def test_basic_batch_shows_each_prompt_with_its_continuation_and_takes_a_step_per_token(tiny_llama: Path) -> None:
    shown = run("basic_batch", "--model", tiny_llama, "--max-tokens", "8")
    assert re.findall(r"^'(.*?)' -> ['\"].+['\"] \((\d+) tokens, (\w+)\)$", shown, re.MULTILINE)[0] == (
        "The capital of France is",
        "8",
        "length",
    )
    assert shown.count("(8 tokens, length)") == 4
    assert "32 tokens in 8 steps" in shown


def test_speculative_decoding_saves_a_step_for_each_accepted_token(tiny_llama: Path) -> None:
    shown = run("speculative_decoding", "--model", tiny_llama, "--max-tokens", "24")
    plain, drafted = (
        list(map(int, re.findall(r"\d+", line))) for line in shown.splitlines() if "draft tokens accepted" in line
    )
    assert plain[2:] == [0, 0]
    n_tokens, steps, n_accepted, n_drafted = drafted
    assert n_accepted <= n_drafted
    n_ends = steps + n_accepted - n_tokens  # a token that ends a text is not one of its tokens
    assert 0 <= n_ends <= 4
    assert "of 4 texts are the same" in shown


def test_batch_speedup_does_the_same_work_in_fewer_steps_and_says_how_much_faster_that_was(tiny_llama: Path) -> None:
    shown = run("batch_speedup", "--model", tiny_llama, "--max-tokens", "8", "--prompts", "4")
    assert "one by one: 32 tokens, 32 steps" in shown
    assert "one batch : 32 tokens, 8 steps" in shown
    ratio = re.search(r"The batch is ([\d.]+) times as fast", shown)
    assert ratio


def test_mixed_lengths_has_one_line_per_prompt_and_short_prompts_do_not_wait_for_the_long_one(tiny_llama: Path) -> None:
    sizes = ("--max-tokens", "8", "--sentences", "0", "1", "2", "8", "--batch-size", "64")
    shown = run("mixed_lengths", "--model", tiny_llama, *sizes)
    lines = re.findall(r"(\d+) prompt tokens: first token after ([\d.]+) s, last after [\d.]+ s: .", shown)
    assert len(lines) == 4
    n_tokens = [int(n) for n, _ in lines]
    assert n_tokens == sorted(n_tokens)
    assert n_tokens[-1] > 10 * n_tokens[0]
    first_token = [float(seconds) for _, seconds in lines]
    assert first_token[0] < first_token[-1]


def test_full_cache_loses_no_request_although_cells_are_few(tiny_llama: Path) -> None:
    shown = run("full_cache", "--model", tiny_llama, "--requests", "24", "--cells", "128")
    assert "tokens went through 256 cells" in shown  # llama.cpp rounds up
    assert "24 of 24 requests have all their tokens" in shown
    assert re.search(r"^24 finished, 0 running, 0 waiting, 0 of 256 cells, \d+ swaps$", shown, re.MULTILINE)
    preempted = re.search(r"^Preempted: (\d+) times by swapping, (\d+) times by recomputation", shown, re.MULTILINE)
    assert preempted
    assert sum(map(int, preempted.groups())) > 0, "the faster of both depends on the machine"
    total = re.search(r"^([\d,]+) tokens went through 256 cells", shown, re.MULTILINE)
    assert total
    assert int(total[1].replace(",", "")) > 2 * 256


def test_stream_side_by_side_shows_a_panel_for_each_sequence(tiny_llama: Path) -> None:
    shown = run("stream_side_by_side", "--model", tiny_llama, "--max-tokens", "8")
    assert re.findall(r"request-\d", shown) == ["request-1", "request-2", "request-3", "request-4"]
    for prompt in ("Once upon a time", "The first computers were", "On Monday the baker"):
        assert prompt in shown
    assert "4 sequences of 8 tokens took 8 steps." in shown


@pytest.mark.parametrize("model", ["stand_in", pytest.param("default_model", marks=pytest.mark.nightly)])
def test_classify_csv_gives_every_row_one_of_the_labels(model: str, request: pytest.FixtureRequest) -> None:
    rows = list(csv.DictReader(run("classify_csv", "--model", request.getfixturevalue(model)).splitlines()))
    with (ROOT / "examples" / "data" / "reviews.csv").open(newline="") as file:
        assert [{"id": row["id"], "review": row["review"]} for row in rows] == list(csv.DictReader(file))
    labels = [row["label"] for row in rows]
    assert set(labels) <= {"positive", "negative"}
    assert model == "stand_in" or labels == ["positive", "negative"] * 3


def test_describe_images_has_a_line_per_image_with_its_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    for name, data in (("red.png", RED), ("blue.png", BLUE)):
        (tmp_path / name).write_bytes(data)
    projector = tiny_projectors.vision(tmp_path / "mmproj.gguf")
    lines = run("describe_images", tmp_path, "--model", tiny_llama, "--mmproj", projector, "--max-tokens", "4")
    assert [line.split(": ")[0] for line in lines.splitlines()] == ["blue.png (16 tokens)", "red.png (16 tokens)"]


def test_summarise_folder_has_a_line_per_file_and_computes_the_system_prompt_once(stand_in: Path) -> None:
    *lines, last = run("summarise_folder", "--model", stand_in, "--max-tokens", "16").splitlines()
    assert [line.split(": ")[0] for line in lines] == ["bakery.txt", "ferry.txt", "library.txt"]
    cached = re.fullmatch(r"(\d+) of \d+ prompt tokens came from the prefix cache\.", last)
    assert cached
    assert int(cached[1]) >= 2 * 50, "the system prompt has more than 50 tokens, and two files reuse it"


def test_sixteen_temperatures_computes_the_prompt_once(stand_in: Path) -> None:
    *lines, last = run("sixteen_temperatures", "--model", stand_in, "--max-tokens", "8").splitlines()
    assert [line.split()[0] for line in lines] == [f"{i / 10:.1f}" for i in range(16)]
    tokens = re.fullmatch(r"(\d+) of (\d+) prompt tokens were computed\.", last)
    assert tokens
    assert int(tokens[1]) == int(tokens[2]) // 16


@pytest.mark.parametrize("model", ["tiny_encoder", "tiny_llama"])
def test_embedding_search_finds_a_text_that_is_the_query(model: str, request: pytest.FixtureRequest) -> None:
    pooling = ["--pooling", "mean"] if model == "tiny_llama" else []
    shown = run("embedding_search", "How does a compass work?", "--model", request.getfixturevalue(model), *pooling)
    assert len(shown.splitlines()) == 3
    assert shown.startswith("1.000  How does a compass work?")


@pytest.mark.usefixtures("models")
def test_embedding_search_pools_the_default_model() -> None:
    assert len(run("embedding_search", "--top", "2").splitlines()) == 2


def test_resumable_batch_answers_each_line_once_although_it_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("".join(f"Question {i}\n\n" for i in range(200)))
    command = ("resumable_batch", questions, answers, "--model", tiny_llama, "--max-tokens", "16")
    process = start(*command)
    while not (answers.exists() and answers.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    with answers.open("a") as file:
        file.write('{"line": 399, "pro')  # as a kill in the middle of a write leaves it

    shown = run(*command)
    done = re.match(r"(\d+) lines are answered, (\d+) are left", shown)
    assert done
    assert int(done[1]) > 0
    assert int(done[1]) + int(done[2]) == 200
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(line["line"] for line in lines) == list(range(1, 400, 2))
    assert all(line["text"] and line["error"] is None for line in lines)


def test_a_missing_model_is_reported_in_the_last_line(tmp_path: Path) -> None:
    process = start("basic_batch", "--model", tmp_path / "none.gguf")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "none.gguf" in stderr.splitlines()[-1]
