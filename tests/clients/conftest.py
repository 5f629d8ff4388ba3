"""One `cppbatch serve` with the default model for all clients, and a few special servers.

These tests run in environments without cppbatch (scripts/clients_environment.py), so the servers run in .venv.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.serving import KEY, REASONING_TEMPLATE, Serving
from tests.support.server_process import ServerProcess

PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"


@pytest.fixture(scope="session", autouse=True)
def only_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients that report or download something by themselves do not; the user's settings have no effect."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("OPENAI_", "ANTHROPIC_", "HF_")):
                patch.delenv(name)
        for name in ("CPPBATCH_CONFIG", "XDG_DATA_HOME", "LLM_USER_PATH", "HF_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # HF_HUB_OFFLINE would refuse InferenceClient's requests too
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
        patch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        yield


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model as a user gets it: on most CPUs a requantised copy."""
    code = "from cppbatch import pull_default; print(pull_default())"
    return Path(subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def serve(*args: str | Path, key: str | None = KEY) -> Iterator[Serving]:
    # One data folder each: a folder serves one server.
    keys = ["--api-key", key] if key else []
    with (
        tempfile.TemporaryDirectory() as data,
        ServerProcess(*keys, "--data-dir", data, *args, python=PYTHON) as process,
    ):
        yield Serving(process.wait_ready())


TOOL_FORMS = ["", "tags", "typed_tags", "numbered", "nemo"]
"""Names in tests.support.chat_families with templates that show the form of calls; "": the default model's."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of tools run once for each form of calls."""
    if "server" in metafunc.fixturenames and "tool" in metafunc.function.__name__:
        names = [name or "no form" for name in TOOL_FORMS]
        metafunc.parametrize("server", TOOL_FORMS, ids=names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(default_model: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    """The default model. `--deterministic`: a text at temperature 0 is the same alone and beside 15 others."""
    template: list[str] = []
    if name := getattr(request, "param", ""):
        code = f"from tests.support.chat_families import TEMPLATES; print(TEMPLATES[{name!r}], end='')"
        root = Path(__file__).parents[2]
        written = subprocess.run([PYTHON, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
        template = ["--chat-template", written]
    yield from serve("-m", default_model, "--deterministic", *template)


@pytest.fixture(scope="session")
def embedding_server(default_model: Path) -> Iterator[Serving]:
    """Vectors instead of text."""
    yield from serve("-m", default_model, "--pooling", "mean")


@pytest.fixture(scope="session")
def reasoning_server(default_model: Path) -> Iterator[Serving]:
    """A chat template as of models that reason. The default model does not: requests have REASONS_THEN_ANSWERS."""
    yield from serve("-m", default_model, "-np", "2", "-c", "2048", "--chat-template", REASONING_TEMPLATE)


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.gguf and random projectors for it, eyes.gguf and ears.gguf; in Qwen2-VL's shape qwen.gguf and
    qwen-eyes.gguf."""
    folder = tmp_path_factory.mktemp("tiny")
    code = (
        "import sys; from pathlib import Path; "
        "from tests.support import tiny_models as models, tiny_projectors as projectors; "
        "folder = Path(sys.argv[1]); models.llama(folder / 'tiny.gguf'); projectors.vision(folder / 'eyes.gguf'); "
        "projectors.audio(folder / 'ears.gguf'); models.two_dimensional(folder / 'qwen.gguf'); "
        "projectors.qwen_vision(folder / 'qwen-eyes.gguf')"
    )
    subprocess.run([PYTHON, "-c", code, folder], cwd=Path(__file__).parents[2], check=True)
    return folder


@pytest.fixture(scope="session")
def seeing_server(tiny_files: Path) -> Iterator[Serving]:
    """A tiny model with random weights that accepts images."""
    yield from serve("-m", tiny_files / "tiny.gguf", "--mmproj", tiny_files / "eyes.gguf", "-np", "16", "-c", "8192")


@pytest.fixture(scope="session")
def qwen_server(tiny_files: Path) -> Iterator[Serving]:
    """A tiny Qwen2-VL, in which images have rows and columns."""
    exact = "-ctk", "f32", "-ctv", "f32", "-fa", "off"
    files = "-m", tiny_files / "qwen.gguf", "--mmproj", tiny_files / "qwen-eyes.gguf"
    yield from serve(*files, *exact, "-np", "8", "-c", "8192")


@pytest.fixture(scope="session")
def hearing_server(tiny_files: Path) -> Iterator[Serving]:
    """The same with audio."""
    yield from serve("-m", tiny_files / "tiny.gguf", "--mmproj", tiny_files / "ears.gguf", "-np", "2", "-c", "2048")


@pytest.fixture(scope="session")
def one_at_a_time(default_model: Path) -> Iterator[Serving]:
    """Answers one request, lets another one wait, and refuses a third with 429."""
    yield from serve("-m", default_model, "-np", "1", "-c", "2048", "--max-queue", "1")
