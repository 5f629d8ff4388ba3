"""The Models tab: loaded models and those in the folder; load, unload, a broken file, one model."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import APIResponse, Locator, Page, Route, expect

from tests.browser.conftest import StartServer
from tests.support import tiny_models
from tests.support.server_process import ServerProcess

PRESETS = "[models.tiny-one]\ntemp = 0.25\n[models.tiny-two]\ntemp = 1.25\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models and a broken one."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tiny-one", "tiny-two"):
        tiny_models.llama(folder / f"{name}.gguf")
    tiny_models.encoder_only(folder / "tiny-vectors.gguf")
    tiny_models.truncated(folder / "tiny-broken.gguf")
    (folder / "models.toml").write_text(PRESETS)
    return folder


@pytest.fixture(scope="module")
def folder_server(folder: Path, lasting_server: StartServer) -> ServerProcess:
    flags = ("--models-dir", folder, "--models-preset", folder / "models.toml", "-np", "2", "-c", "1024")
    return lasting_server(*flags)


@pytest.fixture
def several(folder_server: ServerProcess) -> ServerProcess:
    """A server of `folder` with no model loaded."""
    for model in folder_server.get("/v1/models")["data"]:
        if model["status"]["value"] == "loaded":
            folder_server.post("/models/unload", {"model": model["id"]})
    return folder_server


def row(page: Page, model: str) -> Locator:
    return page.get_by_role("row").filter(has_text=model)


def test_models_are_loaded_and_unloaded(several: ServerProcess, page: Page) -> None:
    page.goto(f"{several.url}/#models")
    one = row(page, "tiny-one")
    expect(one).to_contain_text("unloaded")
    expect(one).to_contain_text("text")
    expect(row(page, "tiny-vectors")).to_contain_text("embeddings (mean)")
    expect(one).to_contain_text("fits")
    one.get_by_role("button", name="Load tiny-one").click()
    expect(one.get_by_text("loaded", exact=True)).to_be_visible()
    expect(one).to_contain_text("2 sequences")
    expect(one).to_contain_text("1,024 KV cells")
    one.get_by_role("button", name="Unload tiny-one").click()
    expect(one.get_by_text("unloaded", exact=True)).to_be_visible()


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_reason(several: ServerProcess, page: Page) -> None:
    page.goto(f"{several.url}/#models")
    broken = row(page, "tiny-broken")
    broken.get_by_role("button", name="Load tiny-broken").click()
    expect(broken).to_contain_text("failed")
    expect(broken).to_contain_text("Download it again")
    expect(broken.get_by_role("button")).to_have_text("Try again")


def test_a_model_that_is_loaded_elsewhere_is_shown_as_loaded_without_a_button_to_load_it(
    several: ServerProcess, page: Page
) -> None:
    page.goto(f"{several.url}/#models")
    one = row(page, "tiny-one")
    expect(one.get_by_role("button", name="Load tiny-one")).to_be_visible()
    with page.expect_request("**/v1/models"):
        several.post("/models/load", {"model": "tiny-one"})
    expect(one.get_by_text("loaded", exact=True)).to_be_visible()
    expect(one.get_by_role("button")).to_have_text("Unload")


def test_whether_models_fit_is_said_late_and_does_not_bring_back_an_old_state(
    several: ServerProcess, page: Page
) -> None:
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/v1/models?fit=true", lambda route: held.append((route, route.fetch())))
    page.goto(f"{several.url}/#models")
    one = row(page, "tiny-one")
    expect(one.get_by_text("unloaded", exact=True)).to_be_visible()  # although it is not known whether it fits
    while not held:
        page.wait_for_timeout(50)
    one.get_by_role("button", name="Load tiny-one").click()
    expect(one.get_by_text("loaded", exact=True)).to_be_visible()
    route, response = held[0]
    route.fulfill(response=response)
    expect(row(page, "tiny-vectors")).to_contain_text("fits")
    expect(one.get_by_text("loaded", exact=True)).to_be_visible()
    expect(one.get_by_role("button")).to_have_text("Unload")


def test_a_list_that_is_not_there_yet_has_its_place_taken(url: str, page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/models*", lambda route: held.append(route))  # noqa: PLW0108  # Playwright marks its handlers
    page.goto(f"{url}#models")
    expect(page.locator(".models[aria-busy=true] .skeleton")).to_have_count(3)
    expect(page.get_by_text("Reading the models")).to_be_attached()
    page.route("**/v1/models*", lambda route: route.continue_())
    for route in held:
        route.continue_()
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page.locator(".skeleton")).to_have_count(0)


def test_a_new_file_is_found(several: ServerProcess, page: Page, folder: Path) -> None:
    page.goto(f"{several.url}/#models")
    expect(row(page, "tiny-one")).to_be_visible()
    tiny_models.llama(folder / "tiny-new.gguf", seed=1)
    page.get_by_role("button", name="Rescan folder").click()
    expect(row(page, "tiny-new")).to_contain_text("unloaded")


def test_a_server_with_one_model_shows_how_to_serve_several(url: str, page: Page) -> None:
    page.goto(f"{url}#models")
    expect(page.get_by_role("status").filter(has_text="--models-dir")).to_be_visible()
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page.get_by_text("loaded", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Unload")).to_have_count(0)


def test_settings_show_the_defaults_of_the_model_that_is_chosen_in_the_header(
    several: ServerProcess, page: Page
) -> None:
    page.goto(f"{several.url}/#models")
    for name in ("tiny-one", "tiny-two"):
        row(page, name).get_by_role("button", name=f"Load {name}").click()
        expect(row(page, name).get_by_text("loaded", exact=True)).to_be_visible()
    page.get_by_role("link", name="Chat").click()
    for name, temperature in (("tiny-two", "1.25"), ("tiny-one", "0.25")):
        page.get_by_role("combobox", name="Model").select_option(name)
        page.get_by_role("button", name="Conversation settings").click()
        expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", temperature)
        page.keyboard.press("Escape")


def test_the_model_for_chats_is_chosen_in_the_header(several: ServerProcess, page: Page) -> None:
    page.goto(f"{several.url}/#chat")
    page.get_by_role("combobox", name="Model").select_option("tiny-one")
    expect(page).to_have_title("Chat · tiny-one")
    page.get_by_role("textbox", name="Message").fill("Hello")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert sent.value.post_data_json["model"] == "tiny-one"
    page.goto(f"{several.url}/#models")
    expect(row(page, "tiny-one").get_by_text("loaded", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny-one")
