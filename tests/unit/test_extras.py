"""Without the packages of an extra: each use of them says what to install, and the rest works."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest

from cppbatch import InvalidRequest, Media
from cppbatch.cli.main import main
from cppbatch.engine.media import files
from cppbatch.engine.request import Modality
from cppbatch.errors import ConfigError
from cppbatch.extras import _PACKAGES, require
from tests.support.fake_encoder import fake_media
from tests.support.media_files import picture, tone, wav

ROOT = Path(__file__).parents[2]
PROJECT = msgspec.toml.decode((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every import of a package of an extra fails."""
    for module in _PACKAGES:
        monkeypatch.setitem(sys.modules, module, None)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["cppbatch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_each_package_is_in_its_extra_and_no_dependency() -> None:
    for package, extra in _PACKAGES.values():
        assert any(each.startswith(f"{package}>=") for each in PROJECT["optional-dependencies"][extra]), package
        assert not any(each.startswith(package) for each in PROJECT["dependencies"]), package


@pytest.mark.parametrize("module", _PACKAGES)
def test_the_sentence_names_the_package_and_the_extra(no_extras: None, module: str) -> None:
    package, extra = _PACKAGES[module]
    with pytest.raises(ConfigError) as refused:
        require(module, "this")
    assert str(refused.value) == f'this requires {package}: pip install "cppbatch[{extra}]"'


@pytest.mark.parametrize(
    ("kind", "data", "package"), [("image", picture(1), "pillow"), ("audio", wav(tone(0.1)), "soundfile")]
)
def test_media_without_its_decoder_is_an_invalid_request(
    no_extras: None, kind: Modality, data: bytes, package: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fake_media().encode(Media(kind, data), lambda n: None, lambda: False)
    assert refused.value.field == "prompt"
    assert refused.value.message == (
        f'contains {kind} data, but {kind} input requires {package}: pip install "cppbatch[media]"'
    )


def test_the_other_kind_of_media_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    assert files.decode_image(picture(1)).size
    with pytest.raises(InvalidRequest, match="audio input requires soxr"):
        files.decode_audio(wav(tone(0.1)), 16_000)


def test_chat_in_a_terminal_names_the_missing_package_before_a_model_is_loaded(
    no_extras: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cppbatch.cli.chat.terminal.is_terminal", lambda: True)
    assert run(monkeypatch, "chat", "-m", "missing.gguf") == 2
    sentence = 'error: `cppbatch chat` in a terminal requires prompt-toolkit: pip install "cppbatch[chat]"\n'
    assert capsys.readouterr().err == sentence


def test_chat_with_a_pipe_needs_no_package_of_an_extra(
    no_extras: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(monkeypatch, "chat", "-m", "missing.gguf") == 2
    assert "missing.gguf" in capsys.readouterr().err


def test_pull_names_the_package_to_install(
    no_extras: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    assert run(monkeypatch, "models", "pull", "owner/Tiny-GGUF") == 2
    sentence = 'downloading owner/Tiny-GGUF from the hub requires huggingface-hub: pip install "cppbatch[hub]"'
    assert capsys.readouterr().err == f"error: {sentence}\n"
