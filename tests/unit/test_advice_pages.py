"""The pages that help to choose, to migrate and to find a cause name messages and flags that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import cppbatch
from cppbatch.cli.main import cli

DOCS = Path(__file__).parents[2] / "docs"
OF_OTHERS = {
    "--pipeline-parallel-size", "--data-parallel-size", "--tensor-parallel-size", "--served-model-name",
    "--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype",
    "--quantization", "--dtype", "--enable-prefix-caching", "--enable-chunked-prefill", "--scheduling-policy",
    "--speculative-config", "--enable-lora", "--lora-modules", "--enable-auto-tool-choice", "--tool-call-parser",
    "--reasoning-parser", "--generation-config", "--modelfile", "--signal", "-fno-dse",
    "-fno-semantic-interposition",
    "--limit-mm-per-prompt", "--seed", "--embedding", "--cache", "--numa", "--verbose",
}  # fmt: skip
"""Flags of other programs on these pages. Those with underscores are llama-cpp-python's."""


def tables(page: str) -> Iterator[list[str]]:
    """The cells of each line of each table, without the heads."""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| you see "):
            yield line.strip("| ").split(" | ")


def messages() -> list[str]:
    return [
        text for cells in tables("troubleshooting.md") for text in re.findall(r"`([^`]*)`", cells[0]) if " " in text
    ]


@functools.cache
def texts_of_the_program() -> tuple[str, ...]:
    """Every text in the package's source, with `{}` for the values in it."""
    found = []
    for file in Path(cppbatch.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def commands(group: click.Group = cli) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_the_page_quotes_messages() -> None:
    assert len(messages()) > 30


@pytest.mark.parametrize("message", messages())
def test_the_program_has_each_message_of_the_page(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...")]
    assert any(re.search(".*".join(parts), text, re.DOTALL) for text in texts_of_the_program())


@pytest.mark.parametrize("page", ["troubleshooting.md", "migration.md", "choosing.md"])
def test_each_flag_of_the_page_is_a_flag_of_a_command(page: str) -> None:
    options = [option for command in commands() for option in command.params]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    code = re.findall(r"`([^`\n]*)`", (DOCS / page).read_text())
    named = {flag for text in code for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)}
    assert {flag for flag in named if "_" not in flag} - known - OF_OTHERS == set()


def test_the_gpu_page_has_the_names_that_the_programs_use() -> None:
    """Other pages link to it. The variables, flags and places are those of the installer and of the commands."""
    page, root = (DOCS / "gpu.md").read_text(), DOCS.parent
    installer = (root / "scripts/install.py").read_text()
    for name in ("CPPBATCH_BACKEND", "CUDA_HOME", "CUDA_PATH", "/usr/local/cuda", "nvcc", "glslc"):
        assert name in page, name
        assert name in installer, name
    known = {option for command in commands() for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"(?<=[`\s|])(--?[a-z][a-z-]*)(?=[ `])", page)) - {"--gpus", "--version"}  # others' flags
    assert {"-ngl", "-np", "-c", "--devices", "--sampling", "-ts", "--rpc"} <= named <= known
    doctor = Path(cppbatch.__file__).with_name("cli").joinpath("doctor_command.py").read_text()
    assert all(f'Finding("{line}"' in doctor and f"`{line}`" in page for line in ("device", "build"))
    others = [root / "README.md", *(each for each in DOCS.glob("*.md") if each.name != "gpu.md")]
    once = ("PrivateDevices", "nvidia-ml-py", "CUDA_VISIBLE_DEVICES")
    assert not [(each.name, fact) for each in others for fact in once if fact in each.read_text()]
    assert {"README.md", "deployment.md", "operations.md", "troubleshooting.md", "choosing.md"} <= {
        each.name for each in others if "gpu.md" in each.read_text()
    }


def test_choosing_has_a_decision_tree_a_comparison_with_pagedattention_and_the_bound_of_its_formula() -> None:
    page = (DOCS / "choosing.md").read_text()
    assert "```mermaid\nflowchart" in page
    assert "### The KV cache beside PagedAttention" in page
    assert "tokens/s <= B x bandwidth / (weights + B x tokens of a sequence x bytes of a cell)" in page
    facts: dict[str, tuple[float, float]] = {}  # of a model: GB of weights, GB of the cells of 1,024 tokens
    rows = 0
    for cells in tables("choosing.md"):
        if len(cells) != 5 or " GiB" not in cells[0] or not (model := re.match(r"(\S+ in \S+)", cells[1])):
            continue
        if given := re.search(r"\(([\d.]+) GB(?:, (\d+) KB a cell)?\)", cells[1]):
            cell = float(given[2] or 128) * 1024  # an 8B in F16 has the cells of one in Q4_0
            facts[model[1]] = float(given[1]), 1024 * cell / 1e9
        weights, sequence = facts[model[1]]
        bound, at = re.fullmatch(r"([\d,]+) at (\d+)", cells[4].strip()).groups()  # type: ignore[union-attr]
        for n, written in ((1, cells[3]), (int(at), bound)):
            expected = n * float(cells[2].replace(",", "")) / (weights + n * sequence)
            assert float(written.replace(",", "")) == pytest.approx(expected, rel=0.06), (cells, n)
        rows += 1
    assert rows == 5
