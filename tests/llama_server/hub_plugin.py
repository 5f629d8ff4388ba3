"""A pytest plugin: gives llama-server's tests the made models instead of those of a hub, and reports their outcomes.

`ring.py` loads it into the pytest of those tests. It replaces a few names of their module `utils`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.llama_server.made_models import made_model

MODELS = Path(os.environ["RING_MODELS"])
REPORTS = Path(os.environ["RING_REPORTS"])

ASKED_FOR = ['"42"', '"foooooo"', "a{5,5}", r"(\{|John)+"]
"""The patterns of texts that a constraint asks for. All others are words that a trained model would write."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before any test file is imported."""
    sys.modules["wget"] = types.ModuleType("wget")  # not installed: its only user is replaced below
    sys.path.insert(0, str(early_config.rootpath))
    utils: Any = importlib.import_module("utils")

    utils.download_file = lambda url, output_file_path=None: str(MODELS / url.rpartition("/")[2])
    utils.match_regex = _match_regex
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    start = utils.ServerProcess.start

    def start_with_made_model(server: Any, *args: Any, **kwargs: Any) -> None:
        server.server_port = _free_port()
        server.n_threads = server.n_threads or 1  # such models are faster so, and their tests run beside each other
        if server.model_hf_repo and (name := made_model(server.model_hf_repo, server.model_hf_file)):
            server.model_file = str(MODELS / name)
            server.model_hf_repo = server.model_hf_file = None
        start(server, *args, **kwargs)

    utils.ServerProcess.start = start_with_made_model


def pytest_runtest_logreport(report: Any) -> None:
    """Each test's outcome, once; a worker of xdist leaves it to the process that started it."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    _, _, test = report.nodeid.partition("::")
    text = report.longreprtext.splitlines()
    why = next((line for line in reversed(text) if line.startswith("E ")), text[-1] if text else "")
    with REPORTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "result": report.outcome, "why": why}) + "\n")


def _match_regex(regex: str, text: str) -> bool:
    if regex in ASKED_FOR:
        return re.search(regex, text, re.IGNORECASE | re.MULTILINE | re.DOTALL) is not None
    return bool(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
