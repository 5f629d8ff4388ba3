"""Home Assistant: its integration of Ollama is set up in its dialog, and answers as a conversation agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from homeassistant import bootstrap, loader
from homeassistant.auth import auth_manager_from_config
from homeassistant.components import conversation
from homeassistant.config_entries import ConfigEntries, ConfigEntry
from homeassistant.core import Context, HomeAssistant
from homeassistant.setup import async_setup_component

from tests.clients.conftest import serve
from tests.clients.serving import MODEL, QUESTION, Serving


@pytest.fixture(scope="module")
def open_server(default_model: Path) -> Iterator[Serving]:
    """Without keys: this release of the integration sends none."""
    yield from serve("-m", default_model, "-np", "2", "-c", "4096", key=None)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[HomeAssistant]:
    """Home Assistant without a frontend."""
    home = HomeAssistant(str(tmp_path))
    home.config.skip_pip = True
    loader.async_setup(home)
    home.config_entries = ConfigEntries(home, {})
    await bootstrap.async_load_base_functionality(home)
    home.auth = await auth_manager_from_config(home, [], [])
    for component in ("homeassistant", "conversation"):
        assert await async_setup_component(home, component, {}), component
    yield home
    await home.async_stop(force=True)


async def add_integration(home: HomeAssistant, url: str, model: str | None = None) -> Any:
    """The dialog's last step: the address, then one of the models that it offers."""
    flows = home.config_entries.flow
    step = await flows.async_init("ollama", context={"source": "user"})
    step = await flows.async_configure(step["flow_id"], {"url": url})
    (choice,) = step["data_schema"].schema.values()
    step = await flows.async_configure(step["flow_id"], {"model": model or choice.config["options"][0]["value"]})
    await home.async_block_till_done()
    return step


async def ask(home: HomeAssistant, entry: ConfigEntry, text: str, conversation_id: str | None = None) -> Any:
    return await conversation.async_converse(home, text, conversation_id, Context(), agent_id=entry.entry_id)


def speech(result: Any) -> str:
    return str(result.response.as_dict()["speech"]["plain"]["speech"])


async def test_the_integration_offers_the_models_and_answers_with_one(
    home: HomeAssistant, open_server: Serving
) -> None:
    entry = (await add_integration(home, open_server.url))["result"]
    assert entry.state.value == "loaded"
    assert entry.data["model"].startswith(MODEL)
    first = await ask(home, entry, QUESTION)
    assert "Paris" in speech(first)
    assert speech(await ask(home, entry, "And of Spain?", first.conversation_id))


async def test_the_tools_of_the_house_may_be_used(home: HomeAssistant, open_server: Serving) -> None:
    entry = (await add_integration(home, open_server.url))["result"]
    options = {"llm_hass_api": "assist", "num_ctx": 2048, "keep_alive": -1, "max_history": 1}
    home.config_entries.async_update_entry(entry, options=options)
    await home.async_block_till_done()
    result = await ask(home, entry, QUESTION)
    assert result.response.as_dict()["response_type"] == "action_done"
    assert speech(result)


async def test_a_model_that_cannot_be_pulled_ends_the_dialog(home: HomeAssistant, open_server: Serving) -> None:
    step = await add_integration(home, open_server.url, "no-such-model:latest")
    while step["type"] == "progress":
        await home.async_block_till_done()
        step = await home.config_entries.flow.async_configure(step["flow_id"])
    assert (step["type"], step["reason"]) == ("abort", "download_failed")
