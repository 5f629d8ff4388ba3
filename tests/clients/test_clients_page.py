"""docs/clients.md: its programs run as printed, and its versions are those of the requirements files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients.serving import KEY, Serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clients.md").read_text()
BLOCKS = re.findall(r"```(python|bash) clients\n(# pip install (.*?)\n.*?)```", PAGE, re.DOTALL)
TABLE = dict(re.findall(r"^\| `([\w-]+)` \| ([\d., ]+) \|", PAGE, re.MULTILINE))
REQUIREMENTS = [ROOT / "tests/clients/requirements.txt", ROOT / "tests/clients/openai3/requirements.txt"]


def normal(name: str) -> str:
    return name.partition("[")[0].lower().replace("_", "-")


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w\[\],.-]+)==([\w.]+)", path.read_text(), re.MULTILINE)
    return {normal(name): pinned for name, pinned in found}


MAIN, OPENAI_3 = map(pins, REQUIREMENTS)
PROGRAMS = {
    name: pins(ROOT / "tests/clients" / folder / "requirements.txt")[name]
    for name, folder in (("open-webui", "open_webui"), ("homeassistant", "home_assistant"))
}
"""Those with an environment of their own."""
HERE = OPENAI_3 if version("openai") == OPENAI_3["openai"] else MAIN
RUN_HERE = [(language, text) for language, text, names in BLOCKS if {normal(n) for n in names.split()} <= HERE.keys()]


def test_each_program_runs_in_one_of_the_two_environments() -> None:
    assert len(BLOCKS) == PAGE.count("# pip install ") == 13
    for _, _, names in BLOCKS:
        assert any({normal(name) for name in names.split()} <= pinned.keys() for pinned in (MAIN, OPENAI_3)), names
    assert len(RUN_HERE) >= 6


def test_the_versions_are_those_that_are_installed() -> None:
    listed = {normal(name): re.split(", ", versions) for name, versions in TABLE.items()}
    assert len(listed) == 22
    for name, versions in listed.items():
        pinned = {pins[name] for pins in (MAIN, OPENAI_3, PROGRAMS) if name in pins}
        assert set(versions) == pinned, name


@pytest.mark.parametrize(("language", "text"), RUN_HERE)
def test_each_program_prints_something(
    language: str, text: str, server: Serving, embedding_server: Serving, tmp_path: Path
) -> None:
    for port, serving in ((8080, server), (8081, embedding_server)):
        text = text.replace(f"http://127.0.0.1:{port}", serving.url)
    text = re.sub(r"(?<=[\"= ])none(?=[\", ])", KEY, text)
    shell = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}[language]
    folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(
        [*shell, text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
