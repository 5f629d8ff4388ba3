"""Anthropic's client lists and finds the model in its own types."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo

from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.scripted_chat import ChatServer, strictly


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[anthropic.Anthropic]:
    server = ChatServer(tiny_llama, ServerSettings(aliases=("claude-here",), limits=Limits(max_tokens=100)))
    yield anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    server.stop()


def test_the_model_is_listed_in_anthropics_form(client: anthropic.Anthropic) -> None:
    page = client.models.list(limit=1)
    (model,) = page.data
    strictly(ModelInfo, model.to_dict(mode="python"))
    assert (model.type, model.id, model.display_name) == ("model", "claude-here", "tiny-llama")
    assert (model.max_input_tokens, model.max_tokens, model.lifecycle) == (1024, 100, "active")
    assert abs((datetime.now(timezone.utc) - model.created_at).total_seconds()) < 600
    assert (page.has_more, page.first_id, page.last_id) == (False, "claude-here", "claude-here")


def test_paging_ends_before_and_after_the_one_model(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["claude-here"]  # follows the pages to their end
    assert client.models.list(after_id="claude-here").data == []
    assert client.models.list(before_id="claude-here").data == []


@pytest.mark.parametrize("query", [{"after_id": "x"}, {"before_id": "x"}, {"limit": 0}, {"limit": 1001}])
def test_a_page_that_does_not_exist_is_refused(client: anthropic.Anthropic, query: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError, match=next(iter(query))) as refused:
        client.models.list(**query)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_the_model_is_found_by_its_names(client: anthropic.Anthropic) -> None:
    for name in ("claude-here", "tiny-llama"):
        assert client.models.retrieve(name).id == "claude-here"
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("claude-nine")
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
