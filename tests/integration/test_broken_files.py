"""A file that cannot be run, or an invalid flag: exit code 2 and one line with the remedy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cppbatch.engine import runtime
from cppbatch.engine.load_check import check_loads
from tests.support import tiny_models


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "models list"),
    "folder": (make_folder, "is a folder, not a GGUF file"),
    "empty": (tiny_models.empty, "Download it again"),
    "truncated": (tiny_models.truncated, "Download it again"),
    "not-gguf": (tiny_models.not_gguf, "Download a .gguf version"),
    "vocab-only": (tiny_models.vocab_only, "Use the GGUF file of the model itself"),
    "diffusion": (tiny_models.diffusion, "Use another model"),
    "encoder-decoder": (tiny_models.encoder_decoder, "Use another model"),
    "pooled-somehow": (lambda path: tiny_models.encoder_only(path, pooling=None), "set pooling (--pooling)"),
    "no-layers": (lambda path: tiny_models.patched(path, "block_count", 0), "from 1 to 512 layers"),
    "many-layers": (lambda path: tiny_models.patched(path, "block_count", 2**31 - 1), "from 1 to 512 layers"),
    "nan-epsilon": (
        lambda path: tiny_models.patched(path, "attention.layer_norm_rms_epsilon", float("nan")),
        "layer_norm_rms_epsilon is nan",
    ),
    "no-context": (lambda path: tiny_models.patched(path, "context_length", 2**32 - 1), "context_length is 4294967295"),
}
WHOLE_FILES = {f"{name}.gguf" for name in list(BROKEN)[6:]}
SERVED = ("missing", "truncated", "nan-epsilon")
"""Refused by their name, by what is read, by what they say. `serve` is tried with all of them under soak."""


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A file and what a message about it must advise."""
    write, advice = BROKEN[request.param]
    return write(tmp_path / f"{request.param}.gguf"), advice


def assert_one_line(code: int, stderr: str) -> str:
    assert code == 2
    assert "Traceback" not in stderr
    assert re.fullmatch(r"error: .+\n", stderr)
    return stderr


SMALL = ("-c", "256", "-np", "1", "-t", "1")


def test_a_file_that_cannot_run_ends_generate_with_one_helpful_line(
    broken: tuple[Path, str], run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "check_loads", partial(check_loads, survives_crash=True))  # reads the header
    path, advice = broken
    code, out, err = run("generate", "-m", path, *SMALL, "-p", "x")
    line = assert_one_line(code, err)
    assert str(path) in line
    assert advice in line
    assert out == ""


@pytest.mark.parametrize(
    ("command", "broken"),
    [
        ("generate", "encoder-decoder"),
        *(pytest.param("serve", kind, marks=[] if kind in SERVED else pytest.mark.soak) for kind in BROKEN),
    ],
    indirect=["broken"],
)
def test_a_file_that_cannot_run_ends_the_program_with_one_helpful_line(broken: tuple[Path, str], command: str) -> None:
    path, advice = broken
    rest = ["-p", "x"] if command == "generate" else ["--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "cppbatch", command, "-m", str(path), *SMALL, *rest],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    line = assert_one_line(done.returncode, done.stderr)
    assert str(path) in line
    assert advice in line


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["-np", "0"], "n_parallel (-np) is 0; it must be from 1"),
        (["-np", "257"], "n_parallel (-np) is 257"),
        (["-b", "4", "-np", "16"], "n_batch (-b) is 4, less than n_parallel (-np), which is 16"),
        (["-c", "2"], "n_ctx (-c) is 2, less than n_parallel (-np)"),
        (["-c", "-1"], "n_ctx (-c) is -1"),
        (["-c", "99999999999"], "-c"),
        (["-ub", "0"], "n_ubatch (-ub) is 0"),
        (["-ngl", "-3"], "n_gpu_layers (-ngl) is -3"),
        (["-n", "0"], "max_tokens"),
        (["--temp", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--temp", "nan"], "temperature"),
    ],
)
def test_flags_that_make_no_sense_end_with_one_line_that_names_them(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path, flags: Any, advice: str
) -> None:
    code, out, err = run("generate", "-m", tiny_llama, "-p", "x", *flags)
    line = assert_one_line(code, err)
    assert advice in line
    assert out == ""


def test_generate_with_an_embedding_model_names_its_kind(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path
) -> None:
    code, _, err = run("generate", "-m", tiny_llama, "-np", "1", "-t", "1", "--pooling", "mean", "-p", "x")
    assert "runs as an embedding model (pooling (--pooling) is 'mean') and does not generate text" in assert_one_line(
        code, err
    )


def test_generate_without_a_prompt_shows_how_to_give_one(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path
) -> None:
    code, _, err = run("generate", "-m", tiny_llama, "-np", "1")
    assert code == 2
    assert "no prompt given; give it in quotes" in err
    code, _, err = run("generate", "-m", tiny_llama, "-np", "1", "-p", "a", "-p", "")
    assert (code, err.splitlines()[-1]) == (2, "Error: prompt 2 is empty; give it a text")


def test_inspect_refuses_a_file_that_is_not_a_model_with_one_helpful_line(
    broken: tuple[Path, str], run: Callable[..., tuple[int, str, str]]
) -> None:
    path, advice = broken
    if path.name in WHOLE_FILES:
        return  # only that they cannot run
    code, out, err = run("models", "inspect", path)
    line = assert_one_line(code, err)
    assert str(path) in line
    assert advice in line
    assert out == ""


@pytest.mark.parametrize("n_bytes", [1, 4, 23, 24, 100, 5000, 20_000, 100_000])
def test_inspect_refuses_a_file_cut_anywhere(
    tiny_llama: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]], n_bytes: int
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_llama.read_bytes()[:n_bytes])
    code, _, err = run("models", "inspect", path)
    assert str(path) in assert_one_line(code, err)


@pytest.mark.usefixtures("untimed_kernels")
def test_inspect_shows_what_a_model_says_about_itself(
    tiny_llama: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("models", "inspect", tiny_llama)
    rows = dict(
        line.strip().split(maxsplit=1) for line in out.replace("n ", "n_").splitlines() if len(line.split()) > 1
    )
    assert (code, err) == (0, "")
    assert rows["architecture"] == "llama"
    assert rows["n_params"] == "139,584"
    assert "139584" not in out
    assert tiny_llama.name in out


def test_inspect_gives_json(tiny_llama: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("models", "inspect", "--json", tiny_llama)
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["path"] == str(tiny_llama)
    assert (facts["architecture"], facts["n_params"], facts["n_ctx_train"]) == ("llama", 139_584, 4096)
    assert facts["tensor_types"] == {"F32": 21}
    assert facts["size_bytes"] == tiny_llama.stat().st_size
    assert facts["has_chat_template"] is False


@pytest.mark.parametrize("kind", ["mamba", "swa", "hybrid", "encoder"])
def test_inspect_reads_every_kind_of_model(
    kind: str, request: pytest.FixtureRequest, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run("models", "inspect", "--json", request.getfixturevalue(f"tiny_{kind}"))
    assert code == 0
    assert json.loads(out)["n_layer"] == 2
    assert json.loads(out)["pooling"] == {"encoder": "mean"}.get(kind)


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "closes [/nothing]"])
def test_inspect_shows_brackets_as_they_are(
    name: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    init = gguf.GGUFWriter.__init__

    def named(self: gguf.GGUFWriter, *arguments: Any) -> None:
        init(self, *arguments)
        self.add_name(name)

    monkeypatch.setattr(gguf.GGUFWriter, "__init__", named)
    code, out, _ = run("models", "inspect", tiny_models.llama(tmp_path / "m.gguf"))
    assert code == 0
    assert name in out


def test_list_shows_each_model_with_its_whole_path_and_size(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a-folder-with-a-long-name-" * 4)
    folder.mkdir()
    monkeypatch.setenv("CPPBATCH_MODELS", str(folder))
    path = tiny_models.llama(folder / "tiny.gguf")
    (folder / "notes.txt").touch()
    code, out, err = run("models", "list")
    assert (code, err) == (0, "")
    assert str(path) in out
    assert "0.6 MB" in out
    assert "notes.txt" not in out


def test_list_of_an_empty_folder_shows_how_to_get_a_model(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "not-there-yet"))
    code, out, _ = run("models", "list")
    assert code == 0
    assert "cppbatch models pull" in out
