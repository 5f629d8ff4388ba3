"""The ring over all architectures: a run reports unknown failures, and its page has a row for each."""

from __future__ import annotations

from tests.archs.page import PAGE, reasons, surprises, table
from tests.archs.ring import Found


def test_a_run_reports_unknown_failures() -> None:
    words = {"load": "yes", "batch": "crash", "drafts": "none", "shift": "again"}
    found = Found(memory="window 32", words=words, details={"batch": "GGML_ASSERT(x)"})
    assert list(surprises("gemma3-dense", found)) == ["batch: crash: GGML_ASSERT(x)", "drafts: none: "]
    assert not list(surprises("mamba-dense", Found(memory="states", words={"drafts": "none"})))


def test_a_row_has_one_word_where_forms_and_layouts_agree() -> None:
    held = {"alone": "yes", "batch": "yes", "swap": "yes", "full": "yes", "prefix": "yes", "turns": "some"}
    details = {"prefix": "cached 120, 120 of 120", "turns": "cached 0, 104, 149; 8 of 8"}
    found = Found(memory="cells", words=held, details=details)
    crashed = Found(memory="cells", words=held | {"swap": "crash"}, details=details)
    (row,) = table({"llama-dense": {"unified": found, "per-sequence": crashed}}).splitlines()[2:]
    assert row.startswith("| llama | cells | yes / crash | 120 | 0, 104, 149 |")
    assert "| text | crash | ? | llama |" in reasons({"llama-dense": {"unified": crashed}})


def test_the_page_has_all_architectures_and_a_reason_for_each_word_other_than_yes() -> None:
    parts = PAGE.read_text("utf-8").partition("<!-- written")[2].split("## What does not hold")
    tables = [[line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")] for part in parts]
    (head, *rows), (_, *limits) = tables
    assert len(rows) > 100
    known = {(column, word): reason for column, word, reason, _ in limits}
    assert all(reason.strip(" ?") for reason in known.values())
    assert all(word in {"yes", "again", "none", "refused"} for _, word in known)
    for name, memory, *words in rows:
        if memory.startswith("refused: "):
            assert memory.removeprefix("refused: ") == known["load", "refused"], name
            continue
        for column, cell in zip(head[2:], words, strict=True):
            for word in cell.split(" / "):
                assert word == "yes" or word[0].isdigit() or (column, word) in known, (name, column, word)
