"""Ollama's OpenAPI file and docs/ollama.md: which fields are handled, and that the page names each one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch.errors import InvalidRequest
from cppbatch.models.library import _REPOSITORIES
from cppbatch.server.answer.logprobs import ChatTokenLogprob, ChatTopLogprob
from cppbatch.server.api.ollama import descriptions, fields, manage, models, types
from cppbatch.server.http.error_formats import OllamaErrorResponse
from cppbatch.server.openapi import document

THEIRS: dict[str, Any] = json.loads(Path(__file__).with_name("ollama_openapi.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "ollama.md").read_text()

OURS: dict[str, tuple[type[msgspec.Struct], set[str]]] = {
    "GenerateRequest": (types.OllamaGenerateRequest, set()),
    "ChatRequest": (types.OllamaChatRequest, set()),
    "ChatMessage": (types.RequestMessage, set()),
    "EmbedRequest": (types.OllamaEmbedRequest, set()),
    "CreateRequest": (manage.CreateRequest, {"renderer", "parser"}),
    "CopyRequest": (manage.CopyRequest, set()),
    "DeleteRequest": (manage.NameFields, set()),
    "PullRequest": (manage.PullRequest, set()),
    "PushRequest": (manage.PullRequest, set()),
    "ShowRequest": (models.ShowRequest, set()),
    "GenerateResponse": (types.OllamaGenerateResponse, set()),
    "GenerateStreamEvent": (types.OllamaGenerateResponse, set()),
    "ChatResponse": (types.OllamaChatResponse, set()),
    "ChatStreamEvent": (types.OllamaChatResponse, set()),
    "EmbedResponse": (types.OllamaEmbedResponse, set()),
    "ShowResponse": (descriptions.ShowResponse, set()),
    "ModelSummary": (descriptions.ListedModel, {"remote_model", "remote_host"}),
    "Ps": (descriptions.RunningModel, set()),
    "StatusEvent": (manage.ProgressResponse, set()),
    "VersionResponse": (models.VersionResponse, set()),
    "Logprob": (ChatTokenLogprob, set()),
    "TokenLogprob": (ChatTopLogprob, set()),
    "ErrorResponse": (OllamaErrorResponse, set()),
}
"""By the name of their schema: our type, and the fields that it does not have."""


@pytest.mark.parametrize("name", OURS)
def test_a_type_has_all_fields_of_ollamas_schema_but_those_named_as_missing(name: str) -> None:
    kind, missing = OURS[name]
    own = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert set(THEIRS["schemas"][name]) - own == missing


def test_every_path_is_served() -> None:
    served = {f"{method} {path}" for path, methods in json.loads(document())["paths"].items() for method in methods}
    assert set(THEIRS["paths"]) <= served


def test_every_option_is_one_of_a_request_or_of_the_runner() -> None:
    assert set(THEIRS["schemas"]["ModelOptions"]) <= fields._KNOWN | fields._OF_RUNNER


def test_the_page_names_every_field_and_path() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([\w]+)`", rows))
    shown: tuple[str, ...] = (
        "GenerateRequest",
        "ChatRequest",
        "ChatMessage",
        "ModelOptions",
        "GenerateResponse",
        "ChatResponse",
    )
    shown += ("EmbedRequest", "EmbedResponse", "CreateRequest", "ModelSummary", "Ps", "ShowRequest", "ShowResponse")
    shown += ("CopyRequest", "DeleteRequest", "PullRequest", "StatusEvent", "VersionResponse")
    for name in shown:
        assert set(THEIRS["schemas"][name]) <= named, name
    for path in THEIRS["paths"]:
        method, where = path.split()
        assert f"{method.upper()} {where}" in PAGE, path


def test_the_page_names_the_models_of_ollamas_library_that_can_be_pulled() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("`gemma3`")]
    assert set(re.findall(r"`([\w.-]+)`", line)) == set(_REPOSITORIES)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None), ("", None), (0, 0), ("0", 0), ("0s", 0), (5, 5), (2.5, 2.5), ("5m", 300), ("1h30m", 5400),
        ("100ms", 0.1), (-1, -1), ("-1m", -1), ("-5", InvalidRequest), ("5", InvalidRequest), ("soon", InvalidRequest),
    ],
)  # fmt: skip
def test_keep_alive_is_seconds_or_a_duration(given: Any, seconds: Any) -> None:
    body = types.ModelFields(model="x", keep_alive=given)
    if seconds is InvalidRequest:
        with pytest.raises(InvalidRequest, match="keep_alive: is"):
            fields.keep_alive_of(body)
    else:
        assert fields.keep_alive_of(body) == seconds
