"""Models from the page: searched on the hub, judged, downloaded, cancelled, deleted; a hub out of reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PageErrors, StartServer
from tests.browser.page_checks import axe_violations, dark, open_tab, phone, wait_ready
from tests.support import tiny_models
from tests.support.batch_files import wait_until
from tests.support.fake_hub import FakeHub
from tests.support.server_process import ServerProcess

NAME = "owner/Tiny-GGUF:Tiny-Q8_0.gguf"
IMPACTS = ("critical", "serious", "moderate", "minor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_models.llama(folder / "tiny-one.gguf")
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[FakeHub]:
    content = (folder / "tiny-one.gguf").read_bytes()
    files = {
        "Tiny-Q8_0.gguf": content,
        "Tiny-F16-00001-of-00002.gguf": content,
        "Tiny-F16-00002-of-00002.gguf": b"x" * 99,
    }
    with FakeHub({"owner/Tiny-GGUF": files, "other/Large-GGUF": {"Large-Q4_K_M.gguf": content}}).running() as hub:
        yield hub


@pytest.fixture(scope="module")
def hub_server(folder: Path, hub: FakeHub, lasting_server: StartServer) -> ServerProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setenv("HF_ENDPOINT", hub.url)
        return lasting_server("--models-dir", folder, "-np", "2", "-c", "1024")


@pytest.fixture
def models(page: Page, hub_server: ServerProcess) -> Page:
    open_tab(page, f"{hub_server.url}/", "models")
    wait_ready(page)
    return page


def search(page: Page, text: str) -> None:
    page.get_by_role("button", name="Download a model").click()
    page.get_by_label("Search on the Hugging Face hub").fill(text)
    page.keyboard.press("Enter")


def test_a_model_is_found_judged_downloaded_with_progress_and_deleted_after_a_question(
    models: Page, hub: FakeHub, folder: Path
) -> None:
    search(models, "tiny gguf")
    found = models.get_by_role("list", name="Repositories").get_by_role("button")
    expect(found).to_have_count(1)
    expect(found).to_contain_text("1.2 k downloads last month")
    assert axe_violations(models, *IMPACTS) == []
    found.click()
    files = models.get_by_role("region", name="Files of owner/Tiny-GGUF").get_by_role("row")
    expect(files).to_have_count(3)
    expect(files.filter(has_text="Tiny-F16-00001")).to_contain_text("F16")  # one row: its parts are one model
    default = files.filter(has_text="Tiny-Q8_0")
    expect(default).to_contain_text("default")
    expect(default).to_contain_text("fits")
    expect(models.get_by_text("of the disk and")).to_be_visible()
    dark(models)
    phone(models)
    assert axe_violations(models, *IMPACTS) == []
    hub.hold = threading.Event()
    default.get_by_role("button", name="Download Tiny-Q8_0.gguf").click()
    progress = models.get_by_role("progressbar", name=f"Download of {NAME}")
    expect(progress).to_have_attribute("value", "0")
    expect(models.locator(".download")).to_contain_text(" of 558 KiB")
    assert axe_violations(models, *IMPACTS) == []
    hub.hold.set()
    row = models.get_by_role("row").filter(has=models.get_by_text("Tiny-Q8_0", exact=True))
    expect(row).to_be_visible()
    expect(models.locator(".download")).to_have_count(0)
    expect(models.get_by_role("button", name="Delete tiny-one")).to_have_count(0)  # a file that a person put there
    row.get_by_role("button", name="Delete Tiny-Q8_0").click()
    question = models.get_by_role("dialog")
    expect(question).to_contain_text("owner/Tiny-GGUF/Tiny-Q8_0.gguf")
    question.get_by_role("button", name="Cancel").click()
    assert (folder / "owner/Tiny-GGUF/Tiny-Q8_0.gguf").exists()
    row.get_by_role("button", name="Delete Tiny-Q8_0").click()
    question.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert not (folder / "owner/Tiny-GGUF/Tiny-Q8_0.gguf").exists()


def test_a_download_is_cancelled_and_one_that_fails_says_why(
    models: Page, hub: FakeHub, folder: Path, errors: PageErrors
) -> None:
    errors.allow("status of 400")  # of a repository that is not there
    hub.hold = threading.Event()
    search(models, "other/Large-GGUF")  # opened at once
    models.get_by_role("button", name="Download Large-Q4_K_M.gguf").click()
    expect(models.locator(".download")).to_contain_text(" of 558 KiB")
    models.get_by_role("button", name="Cancel the download").click()
    expect(models.locator(".download")).to_have_count(0)
    wait_until(lambda: not [*(folder / "other/Large-GGUF").iterdir()], 30)
    hub.hold.set()
    hub.hold = None
    search(models, "owner/Nothing-GGUF")
    expect(models.get_by_role("alert")).to_contain_text("owner/Nothing-GGUF is neither an existing file nor")
    models.keyboard.press("Escape")
    search(models, "large")
    models.get_by_role("list", name="Repositories").get_by_role("button").click()
    file = models.get_by_role("row").filter(has_text="Large-Q4_K_M")
    expect(file).to_contain_text("fits")
    hub.repositories = {}
    file.get_by_role("button", name="Download").click()
    failed = models.locator(".download").filter(has=models.get_by_role("alert"))
    expect(failed).to_contain_text("other/Large-GGUF:Large-Q4_K_M.gguf is neither")
    failed.get_by_role("button", name="Dismiss").click()
    expect(failed).to_have_count(0)


def test_without_the_network_the_search_says_so_in_one_sentence(
    models: Page, hub_server: ServerProcess, errors: PageErrors
) -> None:
    errors.allow("status of 400")
    message = "search: https://hub could not be searched: no route. Check the network"
    answer = {"status": 400, "json": {"error": {"message": message}}}
    models.route("**/models/hub?search=*", lambda route: route.fulfill(**answer))
    search(models, "tiny")
    expect(models.get_by_role("alert")).to_have_text(message)


def test_a_server_of_one_model_offers_no_downloads(page: Page, url: str) -> None:
    open_tab(page, url, "models")
    wait_ready(page)
    expect(page.get_by_role("button", name="Download a model")).to_have_count(0)
