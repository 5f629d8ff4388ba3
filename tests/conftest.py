"""Models that the tests share, made or fetched once a run: a tiny GGUF of each kind, and the default model."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cppbatch import findings
from cppbatch.chat.template import ChatTemplate
from cppbatch.llama import Context, Model
from cppbatch.llama.quantize_child import quantize
from cppbatch.models.find import models_folder
from cppbatch.models.pull import DEFAULT, pull_default
from tests.support import tiny_models
from tests.support.conversations import template_of
from tests.support.llama_cpp_source import chat_templates


def pytest_configure() -> None:
    """Gives each process of pytest-xdist its own cores: engines on the same cores wait for each other's threads.

    With CPPBATCH_TEST_UNPINNED they use any core: scripts/test sets it for the rings that mostly wait.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker and count and sys.platform == "linux" and "CPPBATCH_TEST_UNPINNED" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: int(count)] or cores)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test marked `each_value` the rings run a few cases that have every value; the others are nightly."""
    tests: dict[str, dict[pytest.Item, set[tuple[str, int]]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value"):
            values = {(name, id(value)) for name, value in item.callspec.params.items()}
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for cases in tests.values():
        missing = {value for values in cases.values() for value in values}
        chosen: Counter[tuple[str, int]] = Counter()
        while missing:
            case = max(cases, key=lambda case: (len(cases[case] & missing), -sum(chosen[its] for its in cases[case])))
            chosen.update(cases[case])
            missing -= cases.pop(case)
        for case in cases:
            case.add_marker(pytest.mark.nightly)


def pytest_collection_finish() -> None:
    """Excludes the collected tests from garbage collections, which took a sixth of the unit ring's CPU time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tuning profiles of this machine do not affect the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPPBATCH_CONFIG", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers keep is kept elsewhere than in the user's own folder; models stay where they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPPBATCH_MODELS", str(models_folder()))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is learned about this machine, also in child processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return findings.finding_path("kind", "key").parents[1]


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Nothing runs in garbage collections, where Python ignores a KeyboardInterrupt: hypothesis measures them."""
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Path) -> Path:
    return tiny_models.llama(tiny_folder / "tiny-llama.gguf")


@pytest.fixture(scope="session")
def tiny_mamba(tiny_folder: Path) -> Path:
    return tiny_models.mamba(tiny_folder / "tiny-mamba.gguf")


@pytest.fixture(scope="session")
def tiny_swa(tiny_folder: Path) -> Path:
    return tiny_models.sliding_window(tiny_folder / "tiny-swa.gguf")


@pytest.fixture(scope="session")
def tiny_hybrid(tiny_folder: Path) -> Path:
    return tiny_models.hybrid(tiny_folder / "tiny-hybrid.gguf")


@pytest.fixture(scope="session")
def tiny_mrope(tiny_folder: Path) -> Path:
    return tiny_models.two_dimensional(tiny_folder / "tiny-mrope.gguf")


@pytest.fixture(scope="session")
def tiny_encoder(tiny_folder: Path) -> Path:
    return tiny_models.encoder_only(tiny_folder / "tiny-encoder.gguf")


@pytest.fixture(scope="session")
def tiny_reranker(tiny_folder: Path) -> Path:
    return tiny_models.reranker(tiny_folder / "tiny-reranker.gguf")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model as a user gets it: on most CPUs a requantised copy."""
    return pull_default()


@pytest.fixture(scope="session")
def default_source(default_model: Path) -> Path:
    """The default model as it is downloaded."""
    return default_model.with_name(DEFAULT.file_name)


def once_a_run(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """A file that one process of the run makes and all of them use (pytest-xdist has several)."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = folder / name
    with FileLock(folder / f"{name}.lock"):
        if not path.exists():
            make(folder / f"{name}.part").rename(path)
    return path


@pytest.fixture(scope="session")
def f16_model(default_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with float weights: with them, a text is identical in every batch (docs/decisions/0027)."""
    return once_a_run(tmp_path_factory, "default-F16.gguf", lambda path: quantize(default_source, path, "F16"))


@pytest.fixture(scope="session")
def f32_model(default_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with weights that, with a float cache, give practically the same logits in every batch."""
    return once_a_run(tmp_path_factory, "default-F32.gguf", lambda path: quantize(default_source, path, "F32"))


@pytest.fixture(scope="session")
def models_templates() -> dict[str, ChatTemplate]:
    """The chat templates of many models, by name. The first run on a machine fetches them."""
    return {name: template_of(source) for name, source in chat_templates().items()}


@pytest.fixture(scope="session")
def llama_model(tiny_llama: Path) -> Iterator[Model]:
    with Model(tiny_llama) as model:
        yield model


@pytest.fixture
def make_context(llama_model: Model) -> Iterator[Callable[..., Context]]:
    """Creates contexts, of the tiny Llama by default, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def make_context(model: Model = llama_model, **sizes: Any) -> Context:
            settings: dict[str, Any] = {
                "n_ctx": 256,
                "n_batch": 256,
                "n_seq_max": 4,
                "n_threads": 1,
                "flash_attn": "off",
                **sizes,
            }
            return stack.enter_context(Context(model, **settings))

        yield make_context


@pytest.fixture
def unified_context(make_context: Callable[..., Context]) -> Context:
    return make_context()


@pytest.fixture
def streams_context(make_context: Callable[..., Context]) -> Context:
    return make_context(n_ctx=1024, kv_unified=False)


@pytest.fixture(params=["unified", "streams"])
def context(request: pytest.FixtureRequest) -> Context:
    context: Context = request.getfixturevalue(f"{request.param}_context")
    return context
