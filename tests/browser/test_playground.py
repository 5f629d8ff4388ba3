"""The Playground tab on a real server: streams side by side, order, differences, tokens, exports, wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.conftest import PageErrors
from tests.browser.page_checks import axe_violations, dark, open_tab, overflow, phone
from tests.support.batch_files import client_of, counts, make_batch, wait_for
from tests.support.server_process import ServerProcess

STORY = "Write a long story about a lighthouse keeper, a storm, and a ship that nobody expected to see again."


@pytest.fixture
def tab(page: Page, url: str) -> Page:
    open_tab(page, url, "playground")
    return page


def fill(page: Page, prompt: str, temperatures: str, **settings: int | float) -> None:
    """The form: a prompt, the values of temperature, and settings of all cells."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Values of temperature").fill(temperatures)
    if settings:
        page.get_by_text("Settings of all cells").click()
        for label, value in settings.items():
            page.get_by_label(label.replace("_", " "), exact=True).fill(str(value))


def run(page: Page) -> Locator:
    """Runs the form, and returns the cells once all have ended."""
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("button", name="Stop all")).to_have_count(0, timeout=90_000)
    return page.locator(".cell")


def texts(cells: Locator) -> list[str]:
    return cells.locator(".cell-text").all_text_contents()


# --- a run ------------------------------------------------------------------------------------------------------------


def test_16_streams_fill_side_by_side_and_their_prompt_is_computed_once(tab: Page, server: ServerProcess) -> None:
    before = server.wait_idle()
    fill(tab, STORY, "0.5..1.5 x 16")
    tab.get_by_role("button", name="Run", exact=True).click()
    tab.wait_for_function(
        """() => {
          const running = [...document.querySelectorAll('.cell.running .cell-text')]
          return running.length === 16 && running.every((each) => each.textContent.length > 20)
        }""",
        timeout=60_000,
    )  # `running`: none of them has ended
    expect(tab.get_by_role("button", name="Stop all")).to_have_count(0, timeout=90_000)
    after = server.wait_idle()
    assert tab.locator(".cell.done").count() == 16
    assert len(set(texts(tab.locator(".cell")))) > 8
    asked, shared = (after[name] - before[name] for name in ("prompt_tokens", "prefix_hit_tokens"))
    assert shared >= asked * 15 / 16 * 0.9
    expect(tab.locator(".run-status strong")).to_have_text("16 of 16 cells ended")


def test_a_table_fills_a_template_and_each_row_is_sent(tab: Page) -> None:
    tab.get_by_text("Table of variables").click()
    tab.get_by_label("Rows").fill("country\tcontinent\nFrance\tEurope\nPeru\tSouth America\n")
    fill(tab, "The capital of {country} ({{{continent}}}) is", "0", Maximum_tokens=4)
    tab.get_by_label("Send prompt as").select_option("text")
    tab.get_by_label("Samples of each").fill("2")
    with tab.expect_request("**/generate/batch") as sent:
        cells = run(tab)
    assert sent.value.post_data_json["prompts"] == [
        "The capital of France ({Europe}) is", "The capital of Peru ({South America}) is",
    ]  # fmt: skip
    assert cells.locator("h3").all_text_contents() == [
        f"{i + 1}. {row} · temperature 0, sample {i % 2 + 1}"
        for i, row in enumerate(["France, Europe"] * 2 + ["Peru, South America"] * 2)
    ]
    france, again, *_ = texts(cells)
    assert france == again, "temperature 0"


def test_one_cell_is_stopped_and_then_all(tab: Page, server: ServerProcess) -> None:
    fill(tab, STORY, "0.5..1 x 4", Maximum_tokens=20_000)  # over three minutes of the paced server
    tab.get_by_role("button", name="Run", exact=True).click()
    second = tab.locator(".cell").nth(1)
    expect(tab.locator(".cell.running")).to_have_count(4)
    second.get_by_role("button", name="Stop").click()
    expect(second).to_have_class("cell stopped")
    expect(tab.locator(".cell.running")).to_have_count(3)
    tab.get_by_role("button", name="Stop all").click()
    expect(tab.locator(".cell.stopped")).to_have_count(4)
    server.wait_idle()


def test_a_cell_that_fails_shows_the_reason_and_the_others_continue(tab: Page) -> None:
    fill(tab, "Say hello.", "0, 101", Maximum_tokens=5)
    cells = run(tab)
    expect(cells.nth(0)).to_have_class("cell done")
    expect(cells.nth(1)).to_have_class("cell failed")
    expect(cells.nth(1)).to_contain_text("is 101.0; it must be from 0 to 100")


def test_a_request_that_the_server_refuses_as_a_whole_is_shown_once(
    page: Page, small_server: ServerProcess, errors: PageErrors
) -> None:
    open_tab(page, f"{small_server.url}/", "playground")
    errors.allow("status of 400")
    fill(page, "x", "0..1 x 4")
    run(page)
    expect(page.get_by_role("alert")).to_contain_text("the limit of this server is 3 (--max-prompts-per-batch)")


# --- the results ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(tab: Page) -> Locator:
    """Six cells that have ended, of one prompt and different seeds."""
    fill(tab, "Name three animals.", "1", Maximum_tokens=14)
    tab.get_by_role("combobox", name="Setting").select_option("seed")
    tab.get_by_label("Values of seed").fill("1..6")
    return run(tab)


def test_cells_are_sorted_and_the_most_likely_one_is_marked(tab: Page, cells: Locator) -> None:
    def order(by: str) -> list[str]:
        tab.get_by_role("combobox", name="Order").select_option(by)
        return cells.locator("h3").all_text_contents()

    given = order("given")
    assert given == [f"{i}. seed {i}" for i in range(1, 7)]
    mean = order("mean")
    footers = cells.locator("footer").all_text_contents()  # a cell that is scrolled away has no inner text
    values = [float(re.findall(r"log-probability (-[\d.]+)", each)[0]) for each in footers]
    assert values == sorted(values, reverse=True)
    assert sorted(mean) == given
    expect(cells.get_by_text("most likely", exact=True)).to_have_count(1)
    expect(cells.nth(0).get_by_text("most likely", exact=True)).to_be_visible()
    assert sorted(order("total")) == given
    order("length")
    counts = [int(re.findall(r"(\d+) tokens?,", each)[0]) for each in cells.locator("footer").all_text_contents()]
    assert counts == sorted(counts, reverse=True)


def test_the_differences_from_a_chosen_cell_are_marked_in_all_others(tab: Page, cells: Locator) -> None:
    plain = texts(cells)
    cells.nth(0).hover()
    cells.nth(0).get_by_role("button", name="Compare").click()
    assert cells.nth(0).locator("ins, del").count() == 0
    for i in range(1, 6):
        text = cells.nth(i).locator(".cell-text")
        without = "e => [...e.childNodes].filter((n) => n.nodeName !== '%s').map((n) => n.textContent).join('')"
        assert text.evaluate(without % "DEL").strip() == plain[i].strip()
        assert text.evaluate(without % "INS").strip() == plain[0].strip()
        assert text.locator("ins").count() == 0 or plain[i] != plain[0]
    assert cells.locator("ins").count() > 0
    tab.get_by_role("button", name="Stop comparing").click()
    assert texts(cells) == plain


def test_tokens_show_their_probability_and_their_alternatives_by_keyboard(tab: Page, cells: Locator) -> None:
    text = texts(cells)[2]
    cells.nth(2).get_by_role("button", name="Tokens").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_be_visible()
    tokens = dialog.locator(".tokens button")
    said = "".join(label.rpartition(", ")[0] for label in tokens.evaluate_all("all => all.map((e) => e.ariaLabel)"))
    assert said.replace("␣", " ").replace("↵", "\n").replace("<|im_end|>", "").strip() == text.strip()
    tokens.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    rows = dialog.locator(".alternatives tbody tr")
    assert 5 <= rows.count() <= 6
    shares = [float(cell.rstrip("%")) for cell in rows.locator("td:nth-child(2)").all_inner_texts()]
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert 0 < sum(shares) <= 101
    taken = dialog.locator(".taken")
    expect(taken).to_have_count(1)
    assert taken.locator("td").first.inner_text() in (tokens.nth(1).get_attribute("title") or "")
    classes = set(tokens.evaluate_all("all => all.map((e) => e.className)"))
    assert len(classes) > 1, "tokens of different probability look different"
    tab.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


# --- exports ----------------------------------------------------------------------------------------------------------


def export(page: Page, kind: str) -> str:
    page.get_by_role("dialog").get_by_label("As").select_option(kind)
    return page.locator(".export-text").inner_text()


def test_a_cell_as_a_curl_command_gives_its_text_again(tab: Page, cells: Locator) -> None:
    text = texts(cells)[3]
    cells.nth(3).get_by_role("button", name="Export").click()
    command = export(tab, "curl")
    done = subprocess.run(["bash", "-c", command + " "], capture_output=True, text=True, check=True)
    (result,) = json.loads(done.stdout)["results"]
    assert result["seed"] == 4
    assert result["text"].strip()[:20] == text.strip()[:20]
    status = command.rstrip() + " -s -o /dev/null -w '%{http_code}'"
    assert subprocess.run(["bash", "-c", status], capture_output=True, text=True, check=True).stdout == "200"


def test_a_run_as_curl_and_as_python_asks_for_all_cells(tab: Page, tmp_path: Path) -> None:
    fill(tab, "It's \"red\", isn't it? $HOME `x` \\", "0, 1", Maximum_tokens=3)
    tab.get_by_role("button", name="Export").click()
    done = subprocess.run(["bash", "-c", export(tab, "curl")], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert (answer["total_prompts"], answer["failed"]) == (2, 0)
    program = tmp_path / "exported.py"
    program.write_text(export(tab, "python"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines() if line[:1].isdigit()] == ["0", "1"]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_batch_file_is_used_unchanged_and_every_line_is_answered(tab: Page, server: ServerProcess, kind: str) -> None:
    tab.get_by_label("Send prompt as").select_option(kind)
    fill(tab, "Blue is", "0, 0.5, 1", Maximum_tokens=3)
    tab.get_by_role("button", name="Export").click()
    export(tab, "batch")
    with tab.expect_download() as saved:
        tab.get_by_role("button", name="Save").click()
    assert saved.value.suggested_filename == "playground.jsonl"
    data = Path(saved.value.path()).read_bytes()
    client = client_of(server)
    endpoint = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    batch = make_batch(client, data, endpoint=endpoint)
    assert counts(wait_for(client, batch.id, "completed", seconds=60)) == (3, 3, 0)


# --- the form ---------------------------------------------------------------------------------------------------------


def test_invalid_input_is_reported_beside_its_field_and_nothing_is_sent(tab: Page) -> None:
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url) if "generate" in request.url else None)

    def problem(prompt: str, temperatures: str) -> str:
        fill(tab, prompt, temperatures)
        tab.get_by_role("button", name="Run", exact=True).click()
        alert = tab.get_by_role("alert")
        expect(alert).to_have_count(1)
        return alert.inner_text()

    assert problem("", "0") == "Enter a prompt"
    assert problem("x", "hot").startswith("hot is not a number")
    tab.get_by_label("Samples of each").fill("20")
    assert problem("x", "0..1 x 4").startswith("4 temperature x 20 samples = 80 cells: the limit is 64 cells")
    tab.get_by_text("Table of variables").click()
    tab.get_by_label("Rows").fill("a,b\n1")
    assert problem("x", "0") == "Line 2 has 1 fields, but the first line names 2"
    assert not sent


def test_the_form_is_kept_and_works_by_keyboard(tab: Page) -> None:
    tab.get_by_label("Prompt", exact=True).focus()
    tab.keyboard.type("One, two,")
    tab.get_by_label("Values of temperature").fill("0, 1")
    tab.get_by_text("Settings of all cells").click()
    tab.get_by_label("Maximum tokens").fill("5")
    tab.reload()
    expect(tab.get_by_label("Prompt", exact=True)).to_have_value("One, two,")
    tab.get_by_label("Prompt", exact=True).focus()
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".cell.done")).to_have_count(2)
    cells = tab.locator(".cell-text")
    cells.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    expect(cells.nth(1)).to_be_focused()
    for name in ("Tokens", "Compare", "Export", "Copy text"):
        tab.keyboard.press("Tab")
        expect(tab.locator(".cell").nth(1).get_by_role("button", name=name)).to_be_focused()
    tab.keyboard.press("Enter")
    assert tab.evaluate("navigator.clipboard.readText()").strip() == texts(tab.locator(".cell"))[1].strip()


def test_a_run_continues_while_another_tab_is_shown(tab: Page) -> None:
    fill(tab, STORY, "0.5, 1", Maximum_tokens=60)
    tab.get_by_role("button", name="Run", exact=True).click()
    expect(tab.locator(".cell.running")).to_have_count(2)
    tab.get_by_role("link", name="Models").click()
    expect(tab.locator(".cell.done")).to_have_count(2, timeout=60_000)


def test_results_are_accessible_and_fit_a_phone_in_both_themes(
    new_context: Callable[..., BrowserContext], url: str
) -> None:
    page = new_context().new_page()
    open_tab(page, url, "playground")
    fill(page, "Donaudampfschifffahrtsgesellschaft" * 4, "0..1 x 3", Maximum_tokens=6)
    cells = run(page)
    cells.nth(0).get_by_role("button", name="Compare").click()
    for theme in ("light", "dark"):
        if theme == "dark":
            dark(page)
        assert axe_violations(page) == []
        cells.nth(1).get_by_role("button", name="Tokens").click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
        cells.nth(1).get_by_role("button", name="Export").click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
    phone(page)
    assert overflow(page) == []
    widths = cells.evaluate_all("all => all.map((e) => e.getBoundingClientRect().width)")
    assert all(250 < width <= 360 for width in widths), "stacked"
    cells.nth(1).get_by_role("button", name="Tokens").click()
    assert overflow(page) == []


def test_on_a_phone_the_answers_are_in_view_after_run(tab: Page) -> None:
    phone(tab)
    tab.get_by_label("Prompt", exact=True).fill("Hello")
    tab.get_by_role("button", name="Run", exact=True).click()
    expect(tab.locator(".cells")).to_be_in_viewport()
