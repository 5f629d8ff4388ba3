"""The first lines of `serve` fit the model, and say why its number of KV cells is not -c."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import EngineConfig
from cppbatch.engine.model_info import ModelInfo
from cppbatch.server.process import explain_n_ctx, first_lines

_INFO: dict[str, Any] = {
    "name": "m", "path": "m.gguf", "description": "llama 135M", "size_bytes": 1, "n_params": 1, "n_vocab": 1,
    "n_ctx": 256, "kv_layout": "unified", "sampling": "host", "n_ctx_train": 2048, "max_sequence": 256, "bos": "",
    "eos": "", "chat_template": "{{ 1 }}",
}  # fmt: skip


def announced(
    *, n: int = 16, urls: tuple[str, ...] = ("http://x",), keys: bool = False, has_page: bool = True, **fields: Any
) -> list[str]:
    info = ModelInfo(**{**_INFO, **fields})
    config = EngineConfig("m.gguf", n_ctx=info.n_ctx, n_parallel=n)
    has_template = info.chat_template is not None
    return first_lines(info, config, urls, has_template=has_template, has_keys=keys, has_page=has_page)


@pytest.mark.parametrize(("n", "text"), [(1, "1 answer at a time (1 sequence"), (2, "2 answers at once (2 sequences")])
def test_the_first_line_counts_answers_and_sequences(n: int, text: str) -> None:
    assert f": {text}, 256 KV cells, unified)" in announced(n=n)[0]
    assert f": {n} text" in announced(n=n, pooling="mean")[0]


def test_the_reason_for_not_repacking_weights_is_reported() -> None:
    assert announced(not_repacked="weights are not repacked: ...")[1] == "weights are not repacked: ..."
    assert "ready at" in announced()[1]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "/v1/chat/completions -H 'Content-Type: application/json' -d '{\"messages\": "),
        ({"chat_template": None}, "/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": "),
        ({"pooling": "mean"}, "/v1/embeddings -H 'Content-Type: application/json' -d '{\"input\": "),
        ({"pooling": "none"}, "/embeddings -H 'Content-Type: application/json' -d '{\"input\": "),
        ({"pooling": "rank"}, "/v1/rerank -H 'Content-Type: application/json' -d '{\"query\": "),
    ],
)
def test_the_request_to_try_is_one_that_the_model_can_answer(fields: dict[str, Any], shown: str) -> None:
    assert f"try:  curl http://x{shown}" in announced(**fields)[-1]


def test_a_model_without_a_chat_template_is_reported_unless_it_returns_vectors() -> None:
    line = "this file has no chat template"
    assert announced(chat_template=None)[1].startswith(line)
    lines = [*announced(), *announced(chat_template=None, pooling="mean")]
    assert [each for each in lines if each.startswith(line)] == []


def test_a_request_to_try_has_the_key_if_one_is_required() -> None:
    assert '-H "Authorization: Bearer $CPPBATCH_API_KEY"' in announced(keys=True)[-1]
    assert "Authorization" not in announced()[-1]


def test_the_address_is_that_of_the_web_page_unless_it_is_disabled() -> None:
    assert (
        "ready at http://x  (open it in a browser for the web page; OpenAI-compatible API under http://x/v1;"
        in announced()[1]
    )
    assert "ready at http://x  (OpenAI-compatible API under http://x/v1;" in announced(has_page=False)[1]


def test_every_address_is_shown() -> None:
    assert "ready at http://a:1 and http://b:1 " in announced(urls=("http://a:1", "http://b:1"))[1]


@pytest.mark.parametrize(
    ("settings", "fields", "line"),
    [
        ({"n_ctx": 256}, {}, None),
        ({"n_ctx": 1000}, {"n_ctx": 1024}, "-c 1000 was changed to 1024: llama.cpp rounds it up to a multiple of 256"),
        (
            {"n_ctx": 1000, "n_parallel": 4},
            {"n_ctx": 1024, "kv_layout": "per-sequence"},
            "-c 1000 was changed to 1024: llama.cpp rounds the cells of each of 4 sequences up to 256, a multiple "
            "of 256",
        ),
        (
            {"n_ctx": 16384},
            {"n_ctx": 2048, "pooling": "mean"},
            "-c 16384 was changed to 2048: each text is computed in a single step of at most 2048 tokens, limited by "
            "-b 2048",
        ),
    ],
)
def test_a_changed_number_of_cells_is_explained(
    settings: dict[str, Any], fields: dict[str, Any], line: str | None
) -> None:
    assert explain_n_ctx(ModelInfo(**{**_INFO, **fields}), EngineConfig("m.gguf", **settings)) == line
