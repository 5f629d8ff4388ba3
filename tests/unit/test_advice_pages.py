"""The pages that help to choose, to migrate and to find a cause name messages and flags that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
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
    "--limit-mm-per-prompt", "--seed", "--embedding", "--cache", "--verbose",
}  # fmt: skip
"""Flags of other programs on these pages. Those with underscores are llama-cpp-python's."""


def tables(page: str, head: str = "") -> Iterator[list[str]]:
    """The cells of each line of each table, or of those with this head; without their heads."""
    for table in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), re.MULTILINE):
        first, _, *lines = table.splitlines()
        if first.startswith(head):
            yield from (line.strip("| ").split(" | ") for line in lines)


def messages() -> list[str]:
    """The quotes in the tables of messages."""
    heads = {"troubleshooting.md": "| you see |", "ray.md": "| line | meaning |"}
    cells = [row[0] for page, head in heads.items() for row in tables(page, head)]
    return [text for cell in cells for text in re.findall(r"`([^`]*)`", cell) if " " in text]


@functools.cache
def read_source() -> tuple[tuple[str, ...], set[str]]:
    """Every text in the package's source except docstrings, with `{}` for the values in it; the texts that are joined
    with. The trees are not kept: with them, each garbage collection takes a second."""
    found, joins = dict[str, None](), set[str]()
    for file in sorted(Path(cppbatch.__file__).parent.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, READ)]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
                    joins.add(text_of(node.func.value))
            elif id(node) not in docstrings and (text := text_of(node)) != "{}":
                found[text] = None
    return tuple(found), joins


def texts_of_the_program() -> tuple[str, ...]:
    return read_source()[0]


READ = (ast.Expr, ast.Call, ast.Constant, ast.JoinedStr, ast.BinOp)


def text_of(node: ast.AST) -> str:
    """A string, an f-string or a sum of them; `{}` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return "{}" if left == right == "{}" else left + right
    return "{}"


# A quoted line is known if it is a text of the program, with values in its holes: numbers, names, or known texts again.

PROSE = re.compile(r"(?<![\w./-])[a-z]{2,}(?![\w./-]*[\w/-])")
"""A word of a sentence, unlike a number, a name, a path or a flag."""
FLAGS = re.compile(r"--?[a-z][\w-]*( [\w-]+)?(?=,? |$)")
VALUES = {"llama 135M BF16", "Answer in one word.", "cells 85.83 GiB, compute 3.98 GiB, process 70.8 MiB"}
"""Values in the pages that look like texts: the description of a model, what the user types, the parts of a sum."""


@functools.cache
def templates() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The texts that have words, each as the parts around its values, including those of %d and %s, after the longest
    of these parts, which few texts have."""
    split = (tuple(re.split(r"\{\}|%[.\d]*[sdfg]", text)) for text in texts_of_the_program())
    return tuple((max(parts, key=len), parts) for parts in split if any(map(PROSE.search, parts)))


@functools.cache
def separators() -> tuple[str, ...]:
    """What the program joins texts with."""
    return (": ", "; ", ". ", *sorted(text for text in read_source()[1] - {"{}"} if text.strip()))


@functools.cache
def is_known(text: str) -> bool:
    """Whether a text has no words, is one of the program's, or consists of such texts."""
    if text in VALUES or not PROSE.search(FLAGS.sub("", text)):
        return True
    return any(longest in text and fits(parts, text) for longest, parts in templates()) or any(
        separator in text and all(map(is_known, text.split(separator))) for separator in separators()
    )


def fits(parts: Sequence[str], text: str) -> bool:
    """Whether the text is these parts with known texts between them."""
    first, *others = parts
    if not others:
        return text == first
    if not text.startswith(first):
        return False
    rest = text[len(first) :]
    ends = [match.start() for match in re.finditer(re.escape(others[0]), rest)]
    return any(fits(others, rest[end:]) and is_known(rest[:end]) for end in ends)


def quoted_output(page: str) -> list[str]:
    """The lines of a page's blocks without a language, except commands, what the user types and what a model writes."""
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if language in ("", "text") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("$ ", "> ", " "))]


def commands(group: click.Group = cli) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_the_page_quotes_messages() -> None:
    assert len(messages()) > 30


def is_message(quoted: str) -> bool:
    parts = [re.escape(part.strip()) for part in quoted.split("...")]
    return is_known(quoted) or any(re.search(".*".join(parts), text, re.DOTALL) for text in texts_of_the_program())


PAGES_WITH_OUTPUT = ("operations.md", "ray.md", "guide.md", "tuning.md", "strategies.md", "memory.md", "rpc.md")


def test_the_program_has_the_messages_and_lines_of_output_that_the_pages_quote_and_no_other_wording() -> None:
    """In one test: each process of the run that asks for them parses the package's source, which takes seconds."""
    assert [message for message in messages() if not is_message(message)] == []
    for page in PAGES_WITH_OUTPUT:
        assert quoted_output(page), page
        assert [line for line in quoted_output(page) if not is_known(line)] == [], page
    for line in ("worker 1 has ended; running: 1", "workers: 1, up to 2 while requests wait"):
        assert not is_known(line)


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
    parameters = [parameter for command in commands() for parameter in command.params]
    known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
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
    assert "### The KV cache compared with PagedAttention" in page
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
