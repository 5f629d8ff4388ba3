"""What the agents are told to do, by the names of their own tools."""

from __future__ import annotations

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from clients_environment import environment, node_commands

from tests.clients.agents.scripted_model import Move

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "agents.md").read_text()
_BLOCK = r"^## ([^\n]+)\n(?:(?!^## ).)*?```bash agents\n(# (?:npm install -g|pip install) \S+\n.*?)```"
BLOCKS: dict[str, str] = dict(re.findall(_BLOCK, PAGE, re.DOTALL | re.MULTILINE))
"""{heading: the commands below it in docs/agents.md}."""
REQUIREMENTS = [HERE / "requirements.txt", HERE / "mini_swe_agent" / "requirements.txt"]
NODE = HERE / "package.json"
DONE = "The bug is fixed, and the test passes."
TEST = "python3 test_maths.py"


@dataclass(frozen=True)
class Agent:
    """An agent and what the model makes it do. In the arguments, {folder} is the task's folder."""

    name: str
    """As in the table and the headings of docs/agents.md."""
    package: str
    moves: tuple[Move, ...]

    def moves_in(self, folder: Path) -> list[Move]:
        return [_in_folder(move, folder) for move in self.moves]


def _in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{folder}", str(folder))
    if isinstance(value, dict):
        return {key: _in_folder(each, folder) for key, each in value.items()}
    return type(value)(_in_folder(each, folder) for each in value) if isinstance(value, (list, tuple)) else value


_PATCH = """apply_patch <<'END'
*** Begin Patch
*** Update File: maths.py
@@
 def add(a, b):
-    return a - b
+    return a + b
*** End Patch
END"""
_EDIT_BLOCK = """The sum is a difference.

maths.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```"""
_CODEX: tuple[Move, ...] = (
    [("exec_command", {"cmd": "cat maths.py"}), ("exec_command", {"cmd": "cat test_maths.py"})],
    [("view_image", {"path": "{folder}/plot.png"})],
    [("exec_command", {"cmd": _PATCH})],
    [("exec_command", {"cmd": TEST})],
    DONE,
)
_CONTINUE: tuple[Move, ...] = (
    [("Read", {"filepath": "maths.py"}), ("Read", {"filepath": "test_maths.py"})],
    [("MultiEdit", {"file_path": "{folder}/maths.py", "edits": [{"old_string": "a - b", "new_string": "a + b"}]})],
    [("Bash", {"command": TEST})],
    DONE,
)
_OPENCODE: tuple[Move, ...] = (
    [("read", {"filePath": "{folder}/maths.py"}), ("read", {"filePath": "{folder}/test_maths.py"})],
    [("edit", {"filePath": "{folder}/maths.py", "oldString": "a - b", "newString": "a + b"})],
    [("bash", {"command": TEST, "description": "Run the test"})],
    DONE,
)

AGENTS = [
    Agent("Codex", "@openai/codex", _CODEX),
    Agent("Codex --oss", "@openai/codex", _CODEX),
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        (
            [("ToolSearch", {"query": "select:WebFetch"})],
            [("Read", {"file_path": "{folder}/maths.py"}), ("Read", {"file_path": "{folder}/test_maths.py"})],
            [("Read", {"file_path": "{folder}/plot.png"})],
            [("Edit", {"file_path": "{folder}/maths.py", "old_string": "a - b", "new_string": "a + b"})],
            [("Bash", {"command": TEST, "description": "Run the test"})],
            DONE,
        ),
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        (
            [("read_file", {"file_path": "{folder}/maths.py"}), ("read_file", {"file_path": "{folder}/test_maths.py"})],
            [("edit", {"file_path": "{folder}/maths.py", "old_string": "a - b", "new_string": "a + b"})],
            [("run_shell_command", {"command": TEST, "is_background": False})],
            DONE,
        ),
    ),
    Agent("opencode", "opencode-ai", _OPENCODE),
    Agent("Kilo", "@kilocode/cli", _OPENCODE),
    Agent(
        "Cline",
        "cline",
        (
            [("read_files", {"files": [{"path": "maths.py"}]}), ("run_commands", {"commands": ["cat test_maths.py"]})],
            [("editor", {"path": "{folder}/maths.py", "old_text": "a - b", "new_text": "a + b"})],
            [("run_commands", {"commands": [TEST]})],
            DONE,
        ),
    ),
    Agent("Continue", "@continuedev/cli", _CONTINUE),
    Agent("Continue, provider ollama", "@continuedev/cli", _CONTINUE),
    Agent(
        "pi",
        "@earendil-works/pi-coding-agent",
        (
            [("read", {"path": "maths.py"}), ("read", {"path": "test_maths.py"})],
            [("edit", {"path": "maths.py", "edits": [{"oldText": "a - b", "newText": "a + b"}]})],
            [("bash", {"command": TEST})],
            DONE,
        ),
    ),
    Agent("aider", "aider-chat", (_EDIT_BLOCK,)),
    Agent(
        "mini-swe-agent",
        "mini-swe-agent",
        (
            [("bash", {"command": "cat maths.py"}), ("bash", {"command": "cat test_maths.py"})],
            [("bash", {"command": "sed -i 's/a - b/a + b/' maths.py"})],
            [("bash", {"command": TEST})],
            [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})],
        ),
    ),
]


def versions() -> dict[str, str]:
    """{package: its pinned version}."""
    pinned = re.findall(r'"([@\w/.-]+)": "([\d.]+)"', NODE.read_text())
    for path in REQUIREMENTS:
        pinned += re.findall(r"^([\w-]+)==([\d.]+)", path.read_text(), re.MULTILINE)
    return dict(pinned)


def commands() -> str:
    """The folders with the agents' commands, as in PATH. `./scripts/test clients agents` has installed them."""
    return ":".join(map(str, [node_commands(NODE), *(environment(path).parent for path in REQUIREMENTS)]))


def run(agent: Agent, url: str, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Runs the commands of docs/agents.md in this folder, with a home of its own, without a way to other machines."""
    nowhere = "http://127.0.0.1:9"
    proxies = {name: nowhere for each in ("http_proxy", "https_proxy", "all_proxy") for name in (each, each.upper())}
    env = {
        "HOME": str(folder.parent),
        "PATH": f"{path}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **proxies,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    try:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", BLOCKS[agent.name].replace("http://127.0.0.1:8080", url)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        _end_processes_of(folder.parent)


def _end_processes_of(home: Path) -> None:
    """Ends what an agent leaves running, such as Cline's daemon, and what a timeout leaves."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()
