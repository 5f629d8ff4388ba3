"""The Jobs tab: files that are one prompt each, and answers that are constrained to some texts or to typed columns."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page_checks import axe_violations, dark, hasten, open_tab, overflow, phone
from tests.browser.test_jobs import choose, content, drop, evaluated, limit_tokens, save, start, wait_status
from tests.support.pdf_files import pdf, scanned_pdf
from tests.support.server_process import ServerProcess


@pytest.fixture
def page(page: Page) -> Page:
    hasten(page)
    return page


def zipped(contents: Mapping[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return file.getvalue()


def table_of(page: Page) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(save(page, "Table with answers"))))


def start_files(page: Page, n: int) -> None:
    page.get_by_role("button", name=f"Start {n} files").click()
    wait_status(page, "completed")


def test_each_file_of_a_zip_file_is_a_prompt_and_its_answer_has_its_name(
    page: Page, url: str, server: ServerProcess
) -> None:
    open_tab(page, url, "jobs")
    contents: dict[str, str | bytes] = {
        "b.md": "two\nlines",
        "sub/a.pdf": pdf(["one", "page two"]),
        ".x": "",
        "c.pdf": scanned_pdf(1),
    }
    choose(page, "texts.zip", zipped(contents))
    expect(page.locator(".notice")).to_contain_text(".x was left out: hidden.")
    expect(page.locator(".notice")).to_contain_text("c.pdf was left out: contains no text, perhaps because")
    expect(page.get_by_role("region", name="New job").get_by_role("heading")).to_have_text("texts.zip")
    texts = ("two\nlines", "one\n\npage two")
    n = sum(len(server.post("/tokenize", {"content": text})["tokens"]) for text in texts)
    expect(page.get_by_role("region", name="New job")).to_contain_text(f"2 files, each one prompt: {n} tokens.")
    expect(page.get_by_label("Column that identifies the results")).to_have_count(0)
    page.get_by_label("Template").fill("Summarise {file}: {text}")
    expect(page.get_by_text("2 files ready, 0 invalid")).to_be_visible()
    limit_tokens(page, 3)
    start_files(page, 2)
    expect(page.get_by_role("columnheader")).to_have_text(["File", "Answer", "Tokens"])
    rows = table_of(page)
    assert [row["file"] for row in rows] == ["b.md", "sub/a.pdf"]
    assert [*rows[0]] == ["file", "answer", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
    assert all(row["answer"] for row in rows)
    batch = server.get(f"/v1/batches/{page.url.rpartition('/')[2]}")
    sent = [json.loads(line) for line in content(server, batch["input_file_id"]).splitlines()]
    assert [each["body"]["messages"][0]["content"] for each in sent] == [
        "Summarise b.md: two\nlines",
        "Summarise sub/a.pdf: one\n\npage two",
    ]
    assert [each["row"] for each in sent] == [{"file": "b.md"}, {"file": "sub/a.pdf"}], "a text is sent once"


def test_a_folder_is_chosen(page: Page, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "one.txt").write_text("first")
    (folder / "sub" / "two.txt").write_text("second")
    (folder / "logo.png").write_bytes(b"\x89PNG\0\xff")
    (folder / "empty.txt").touch()
    open_tab(page, url, "jobs")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a folder").click()
    chooser.value.set_files(folder)
    form = page.get_by_role("region", name="New job")
    expect(form.get_by_role("heading")).to_have_text("texts")
    expect(form).to_contain_text("2 files, each one prompt")
    notice = page.locator(".notice")
    expect(notice).to_contain_text("empty.txt was left out: empty.")
    expect(notice).to_contain_text("logo.png was left out: not text.")
    page.get_by_text("Preview and edit").click()
    expect(page.get_by_label("Request of line 2")).to_have_value(re.compile('"custom_id": "sub/two.txt"'))


FOLDER = """
  const file = (name, text) => ({isFile: true, name, file: (use) => use(new File([text], name))})
  const folder = (name, ...all) => ({isDirectory: true, name, createReader() {
    const some = [all.slice(0, 1), all.slice(1), []]
    return {readEntries: (use) => use(some.shift())}
  }})
  const entry = folder('texts', file('a.txt', '1'), folder('sub', file('b.txt', '2'), file('c.txt', '3')))
  const found = await m.droppedFiles([entry], [])
  return [found.folder, found.files.map(({path}) => path)]
"""


def test_a_dropped_folder_is_read_with_its_folders(modules: Page) -> None:
    assert evaluated(modules, "job_files", FOLDER) == ["texts", ["a.txt", "sub/b.txt", "sub/c.txt"]]


def test_several_texts_are_prompts_or_lines_of_prompts(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    drop(page, {"one.txt": "Say A\nSay B\n", "two.txt": "Say C\n"})
    expect(page.get_by_role("button", name="Start 2 files")).to_be_enabled()
    page.get_by_role("button", name="Read each line as a prompt").click()
    expect(page.get_by_role("button", name="Start 2 lines")).to_be_enabled()
    expect(page.get_by_text("1 more file to check: two.txt")).to_be_visible()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"%PDF-1.4 damaged", "is not a valid PDF: "),
        (scanned_pdf(2), "contains no text, perhaps because its pages are images; run text recognition (OCR) first."),
    ],
)
def test_a_pdf_without_a_text_is_refused_in_one_sentence(page: Page, url: str, data: bytes, why: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "report.pdf", data)
    expect(page.get_by_role("alert")).to_contain_text(f"report.pdf was left out: {why}")
    expect(page.get_by_role("button", name="Start")).to_have_count(0)


REVIEWS = b'id,review\n1,"Great, I love it."\n2,"It broke at once."\n'


def test_allowed_answers_are_cells_of_the_table(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "reviews.csv", REVIEWS)
    page.get_by_role("combobox", name="Answer", exact=True).select_option("One of these texts")
    expect(page.get_by_role("alert")).to_have_text("Write the texts that are allowed, one per line.")
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    page.get_by_label("Allowed answers, one per line").fill("positive\nnegative\n")
    start(page, 2)
    wait_status(page, "completed")
    assert {row["answer"] for row in table_of(page)} <= {"positive", "negative"}
    expect(page.locator(".facts")).to_contain_text("allowed answerspositive, negative")


def test_columns_of_an_answer_are_columns_of_the_table(page: Page, url: str, server: ServerProcess) -> None:
    open_tab(page, url, "jobs")
    choose(page, "reviews.csv", REVIEWS)
    page.get_by_role("combobox", name="Answer", exact=True).select_option("Columns")
    page.get_by_label("Name of column 1").fill("mood")
    page.get_by_label("Type of column 1").select_option("One of these texts")
    page.get_by_label("Texts allowed in column 1").fill("good\nbad")
    page.get_by_role("button", name="Add a column").click()
    page.get_by_label("Name of column 2").fill("mood")
    expect(page.get_by_role("alert")).to_have_text("Two columns of the answer are named mood: rename one of them.")
    page.get_by_label("Name of column 2").fill("would_buy")
    page.get_by_label("Type of column 2").select_option("Yes or no")
    assert not axe_violations(page)
    start(page, 2)
    wait_status(page, "completed")
    expect(page.locator(".facts")).to_contain_text("answer columnsmood, would_buy")
    rows = table_of(page)
    assert [*rows[0]][:5] == ["custom_id", "id", "review", "answer", "mood"]
    assert {row["mood"] for row in rows} <= {"good", "bad"}
    assert {row["would_buy"] for row in rows} <= {"true", "false"}
    batch: Any = server.get(f"/v1/batches/{page.url.rpartition('/')[2]}")
    body = json.loads(content(server, batch["input_file_id"]).splitlines()[0])["body"]
    assert body["json_schema"] == {
        "type": "object",
        "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}, "would_buy": {"type": "boolean"}},
        "required": ["mood", "would_buy"],
        "additionalProperties": False,
    }


def test_a_schema_of_texts_gives_cells_without_quotes(modules: Page) -> None:
    request = {"custom_id": "a", "body": {"messages": [], "json_schema": {"enum": ["positive"]}}}
    answer = {"custom_id": "a", "response": {"body": {"choices": [{"message": {"content": '"positive"'}}]}}}
    script = "return (await m.joinCsv(...args.map((each) => new Blob([each])))).text()"
    joined = evaluated(modules, "results", script, json.dumps(request), json.dumps(answer), "")
    (row,) = csv.DictReader(io.StringIO(joined))
    assert row["answer"] == "positive"


def test_the_forms_fit_a_phone_and_axe_finds_nothing(page: Page, url: str) -> None:
    phone(page)
    dark(page)
    open_tab(page, url, "jobs")
    choose(page, "texts.zip", zipped({"a-rather-long-name-of-a-file-in-a-folder.txt": "text", "b.txt": "text"}))
    expect(page.get_by_text("2 files ready, 0 invalid")).to_be_visible()
    page.get_by_role("combobox", name="Answer", exact=True).select_option("Columns")
    page.get_by_role("button", name="Add a column").click()
    assert not overflow(page)
    assert not axe_violations(page)
