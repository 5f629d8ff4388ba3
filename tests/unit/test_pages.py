"""Links between the Markdown pages of the repository lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cppbatch.sizing.demand import MARGIN
from tests.support.python_names import defined_in

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "docs/decisions", "examples", "models", "deploy")
    for page in (ROOT / folder).glob("*.md")
)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_script_test_and_example_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # names files of earlier versions
        return
    for path in re.findall(r"\b(?:scripts|tests|examples)/[\w/]+\.py\b", page.read_text()):
        assert (ROOT / path).exists(), path


def test_each_decision_is_in_the_index_once() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \d{4} \[.+\]\((\d{4}-.+\.md)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("0*.md"))


SHOWN_BY = re.findall(r"`(\w+/test_\w+\.py): (test_\w+)`", (ROOT / "SECURITY.md").read_text())


def test_each_line_of_the_threat_model_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .* \| `.*` \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert len(rows) >= 9
    assert len(SHOWN_BY) == sum(row.count("test_") for row in rows) / 2, "each as folder/file.py: test"
    assert [named for named in SHOWN_BY if named[1] not in defined_in(ROOT / "tests" / named[0])] == []


MODELS = {  # GB of the Q4_K_M file; layers, KV heads and their dimension, as in the makers' config.json
    "Llama 3.2 1B": (0.81, 16, 8, 64),
    "Llama 3.2 3B": (2.02, 28, 8, 128),
    "Llama 3.1 8B": (4.92, 32, 8, 128),
    "Qwen 2.5 14B": (8.99, 48, 8, 128),
    "Qwen 2.5 32B": (19.85, 64, 8, 128),
    "Llama 3.3 70B": (42.52, 80, 8, 128),
}
BUFFERS_GB = 0.4
"""Compute buffers, logits and the process, as `cppbatch memory --shape` estimates them for 1B, 8B and 70B."""


def test_the_memory_of_each_model_in_the_readme_is_that_of_its_file_cells_and_buffers() -> None:
    rows = re.findall(
        r"^\| (\d+) GB \| (.+?) \| ([\d.]+) GB \| ([\d.]+) GB \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert [model for _, model, _, _ in rows] == list(MODELS)
    for free, model, file, used in rows:
        file_gb, n_layer, n_head_kv, n_dim = MODELS[model]
        n_bytes_a_cell = 2 * n_layer * n_head_kv * n_dim * 2  # keys and values in f16
        needed = file_gb + 16 * 1024 * n_bytes_a_cell / 1e9 + BUFFERS_GB
        assert (file, used) == (f"{file_gb:.1f}", f"{needed:.1f}"), model
        assert needed <= (1 - MARGIN) * int(free) < needed + 1.5, model
