"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.worker import process
from cppbatch.models.pull import DEFAULT
from cppbatch.models.synthetic import LlamaShape, byte_vocab, write_llama
from cppbatch.retries import Pauses
from tests.support import preloaded
from tests.support.preloaded_worker import PreloadedWorker

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LONGEST = [
    "test_docs",
    "test_engine_process",
    "test_out_of_memory",
    "test_sleep",
    "test_autoscaling",
    "test_examples",
    "test_abuse",
    "test_serve",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process of pytest-xdist runs whole files: none is left alone with a long one at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def runtimes_in_workers() -> Iterator[None]:
    """Workers find the runtimes of the tests, although they import nothing from the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers and workers do not import their packages anew: the imports were most of their processor time. At night
    they start as users start them."""
    with pytest.MonkeyPatch.context() as patch:
        if preloaded.AVAILABLE and request.config.getoption("markexpr") != "nightly":
            patch.setattr(preloaded, "is_used", True)
            patch.setattr(process, "WorkerProcess", PreloadedWorker)
        yield


@pytest.fixture(scope="session")
def stand_in(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the default one's file name, in a folder of models ($CPPBATCH_MODELS).

    Its texts end where a request's limits say; its thousands of tokens have the ids that examples give.
    """
    folder = tmp_path_factory.mktemp("stand-in")
    shape = LlamaShape(n_head=2, n_head_kv=1, n_ctx_train=8192)  # heads of 32, as quantised cells require
    source = write_llama(folder / DEFAULT.file_name, shape, vocab=byte_vocab(4096), chat_template=TEMPLATE)
    copy = folder / default_model.name
    if copy != source:
        copy.symlink_to(source)
    return copy


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait between restarts of a worker."""
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.002, 30.0))
