"""Coding agents, unchanged, on a server whose model's text is a script: each repairs a file and runs its test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents.agents import AGENTS, BLOCKS, PAGE, Agent, commands, run, versions
from tests.clients.agents.conftest import RESULTS, Result
from tests.clients.agents.scripted_model import ScriptedModel
from tests.support.llama_cpp_source import chat_templates
from tests.support.media_samples import RED

TEMPLATES = ["Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct", "openai-gpt-oss-120b"]
WITH_EACH = ["Codex", "Claude Code", "opencode", "pi"]
"""Agents that run with each template, at least one for each API; the others run with the first."""
ROWS = {
    name: ((version, refused, finished), int(requests), int(first.replace(",", "")))
    for name, version, requests, refused, finished, first in re.findall(
        r"^\| (.+?) \| ([\d.]+) \| .+? \| (\d+) \| (\d+) \| (\w+) \| ([\d,]+) \|$", PAGE, re.MULTILINE
    )
}
"""The table of docs/agents.md: what `Result.row` is, the requests, the tokens of the first prompt with TEMPLATES[0]."""


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedModel]:
    server = ScriptedModel(tmp_path_factory.mktemp("model"), default_model, chat_templates()[request.param])
    yield server
    server.stop()


@pytest.fixture(scope="module")
def path() -> str:
    return commands()


def test_the_page_has_the_commands_and_the_version_of_each_agent() -> None:
    assert list(BLOCKS) == [agent.name for agent in AGENTS]
    assert {name: row[0] for name, (row, _, _) in ROWS.items()} == {
        each.name: versions()[each.package] for each in AGENTS
    }


@pytest.mark.parametrize(
    ("model", "agent"),
    [(name, each) for name in TEMPLATES for each in AGENTS if name == TEMPLATES[0] or each.name in WITH_EACH],
    ids=lambda value: getattr(value, "name", value),
    indirect=["model"],
)
def test_an_agent_repairs_a_file_and_runs_its_test(
    agent: Agent, model: ScriptedModel, path: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    template = str(request.node.callspec.params["model"])
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "maths.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_maths.py").write_text("from maths import add\n\nassert add(2, 3) == 5\nprint('1 test passed')\n")
    (folder / "plot.png").write_bytes(RED)
    recording = model.record(agent.moves_in(folder))
    done = run(agent, model.url, folder, path)

    tested = subprocess.run([sys.executable, "test_maths.py"], cwd=folder, capture_output=True, check=False)
    refused = [each for each in recording.requests if each.refused]
    finished = done.returncode == 0 and tested.returncode == 0
    with_tools = [turn for turn in recording.turns if turn.tools]  # not a title
    n_first = next((turn.n_prompt_tokens for turn in with_tools or recording.turns), 0)
    result = Result(agent.name, versions()[agent.package], len(recording.requests), len(refused), finished, n_first)
    request.config.stash[RESULTS].append((template, result))

    said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert recording.errors == []
    assert done.returncode == 0, said
    assert tested.returncode == 0, said
    assert [turn.said for turn in recording.turns if turn.said in recording.moves] == recording.moves
    for turn in recording.turns:
        assert turn.n_written == turn.n_tokens, f"the grammar forbids {turn.text!r} after {turn.n_written} tokens"
    row, n_requests, first = ROWS[agent.name]
    assert row == result.row
    assert abs(n_requests - result.n_requests) <= 1  # Kilo may end before it asks for a title
    if template == TEMPLATES[0]:
        assert n_first == pytest.approx(first, rel=0.05)
