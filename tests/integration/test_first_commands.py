"""What a new user types first: `generate`, `batch`, `models list`, and what these say."""

from __future__ import annotations

import csv
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, SamplingParams
from cppbatch.bench.profile import TunedSettings, save_profile
from cppbatch.llama import Backend

SMALL = ["-c", "1024", "-np", "2", "-t", "1", "--temp", "0"]
Run = Callable[..., tuple[int, str, str]]


# --- generate ---------------------------------------------------------------------------------------------------------


def test_texts_are_printed_in_the_order_of_the_prompts(run: Run, tiny_llama: Path) -> None:
    prompts = ["abc", "xyz", "123"]
    with BatchInferenceEngine(tiny_llama, n_ctx=1024, n_parallel=2, n_threads=1) as engine:
        texts = [r.text for r in engine.generate(prompts, SamplingParams(max_tokens=9, temperature=0))]
    given = [word for prompt in prompts for word in ("-p", prompt)]
    code, out, err = run("generate", "-m", tiny_llama, *SMALL, "-n", "9", *given)
    assert (code, err) == (0, "")
    assert out == "\n".join(
        f"--- {i + 1}: {prompt}\n{text}\n" for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    )


def test_without_n_a_text_has_512_tokens_at_most_and_that_is_said(run: Run, tiny_llama: Path) -> None:
    generate = ["generate", "-m", tiny_llama, *SMALL, "-p", "abc", "--json", "--grammar", "root ::= [a-z]*"]
    _, out, err = run(*generate)
    assert len(msgspec.json.decode(out)["tokens"]) == 512
    assert err == (
        "1 of 1 texts were cut off after 512 tokens or at the end of the context: -n sets another limit, -n -1 none\n"
    )
    _, out, err = run(*generate, "-n", "-1")
    assert len(msgspec.json.decode(out)["tokens"]) > 512
    assert err == ""


def test_an_empty_text_is_explained(run: Run, tiny_llama: Path) -> None:
    code, out, err = run("generate", "-m", tiny_llama, *SMALL, "-p", "abc", "--grammar", 'root ::= ""')
    assert (code, out) == (0, "--- 1: abc\n\n")
    assert err == "1: no text, because the model's first token ends it\n"


def test_after_ctrl_c_the_text_so_far_is_printed(tiny_llama: Path) -> None:
    arguments = ["-m", str(tiny_llama), "-c", "65536", "-np", "1", "-t", "1", "-n", "-1"]
    endless = ["-p", "abc", "-p", "xyz", "--grammar", "root ::= [a-z]*"]
    with subprocess.Popen(
        [sys.executable, "-m", "cppbatch", "generate", *arguments, *endless],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            first = process.stdout.readline() + process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            out = first + process.stdout.read()
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert re.fullmatch(r"--- 1: abc\n[a-z]{20,}\n", out)


def test_layers_for_a_gpu_are_refused_aloud_where_the_build_has_none(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), BatchInferenceEngine(tiny_llama, n_ctx=256, n_gpu_layers=99):
        warned = "n_gpu_layers (-ngl) is 99, and this build of llama.cpp computes on the CPU only" in caplog.text
    assert warned is not Backend.get().supports_gpu


def test_the_description_has_the_number_of_weights(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=256) as engine:
        assert engine.info.n_params == 139_584
        assert engine.info.description.startswith("llama 140K ")


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_name_that_the_list_shows_is_a_model_to_run(
    run: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tiny_llama.parent))
    _, out, _ = run("models", "list")
    name = next(line.split()[0] for line in out.splitlines() if str(tiny_llama) in line)
    for given in (name, tiny_llama.name, str(tiny_llama)):
        code, out, err = run("generate", "-m", given, *SMALL, "-p", "abc", "-n", "1")
        assert (code, err) == (0, "")


# --- batch ------------------------------------------------------------------------------------------------------------


def test_a_wrong_column_leaves_no_job_behind(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text,id\nabc,a\n")
    batch = ["batch", source, "-o", output, "-m", tiny_llama, *SMALL, "--in-process"]
    code, out, err = run(*batch)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: {source}: has no column 'prompt'; there are 'text', 'id' (--column)\n")
    assert "2 sequences at once, 1,024 KV cells (-np 2 -c 1024): 512 tokens each, and up to 1,024 for one" in err
    assert list(tmp_path.iterdir()) == [source]
    code, _, err = run(*batch, "--column", "text")
    assert code == 0, err
    assert "plain prompts get at most 512 tokens; -n sets another limit, -n -1 none" in err
    assert msgspec.json.decode(output.read_bytes())["usage"]["completion_tokens"] <= 512


def test_a_profile_that_is_used_is_named(
    run: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_CONFIG", str(tmp_path / "config"))
    config = EngineConfig(str(tiny_llama), n_ctx=512, n_parallel=3, n_threads=1)
    tuned = TunedSettings(**{name: getattr(config, name) for name in TunedSettings.__struct_fields__})
    path = save_profile(config, tuned, {})
    (tmp_path / "in.txt").write_text("abc\n")
    batch = ["batch", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", "-m", tiny_llama, "-n", "2", "--in-process"]
    code, _, err = run(*batch)
    assert code == 0
    assert re.search(rf"using the profile {re.escape(str(path))} of .*: -np 3 -c 512 -t 1; --no-profile", err)


def test_settings_may_change_until_there_are_results(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("abc\n")
    batch = ["batch", source, "-o", output, *SMALL, "--in-process"]
    code, _, _ = run(*batch, "-m", tmp_path / "none.gguf", "-n", "3")
    assert code == 2
    code, _, err = run(*batch, "-m", tiny_llama, "-n", "4")
    assert code == 0, err
    code, _, err = run(*batch, "-m", tiny_llama, "-n", "5")
    assert code == 2
    assert "was started with max_tokens 4, and now max_tokens is 5" in err


def test_results_are_not_written_as_json_lines_into_another_format(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("abc\n")
    code, _, err = run("batch", source, "-o", tmp_path / "t.xlsx", "-m", tiny_llama)
    assert code == 2
    assert f"JSON lines, CSV or Parquet: name it {tmp_path / 't.jsonl'} or .csv" in err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["t.csv", "t.TSV", "t.parquet"])
def test_a_table_joins_the_columns_of_the_input_with_the_answers(
    run: Run, tiny_llama: Path, tmp_path: Path, name: str
) -> None:
    source, output = tmp_path / "in.csv", tmp_path / name
    source.write_text("key,review,stars\na,good,5\nb,bad,1\na,twice,3\n")
    template = ["--template", "Review: {review}. Label:", "--id-column", "key", "--choice", "yes", "--choice", "no"]
    batch = ["batch", source, "-o", output, "-m", tiny_llama, *template, *SMALL, "--in-process"]
    code, _, err = run(*batch)
    assert code == 1, err  # the name of the third row is taken
    assert "2 done, 1 failed; " in err
    assert f"results: {output}; errors: {tmp_path / 't.errors.jsonl'}" in err
    if name == "t.parquet":
        rows = pq.read_table(output).to_pylist()
    else:
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="," if name == "t.csv" else "\t"))
    assert [(row["key"], row["review"], row["stars"]) for row in rows] == [
        ("a", "good", "5"), ("b", "bad", "1"), ("a", "twice", "3"),
    ]  # fmt: skip
    assert {row["answer"] for row in rows[:2]} <= {"yes", "no"}
    assert "line 2 has the custom_id 'a' too" in rows[2]["error"]
    output.unlink()
    run(*batch)
    assert output.exists(), "the same command writes it again, without a model"


def test_json_of_a_schema_is_compact_in_batch_unless_it_is_not_to_be(
    run: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("abc\n")
    schema = '{"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}'
    texts = {}
    for flags in ((), ("--no-compact-json",)):
        out = tmp_path / f"out{len(flags)}.jsonl"
        code, _, err = run("batch", source, "-o", out, "-m", tiny_llama, "-j", schema, *flags, *SMALL, "--in-process")
        assert code == 0, err
        texts[flags] = json.loads(out.read_text())["text"]
    assert texts[()] == '{"a":1,"b":2}'
    assert json.loads(texts[("--no-compact-json",)]) == {"a": 1, "b": 2}
