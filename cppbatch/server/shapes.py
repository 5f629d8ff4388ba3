"""The types of OpenAI's models."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines that run a model."""

    name: str
    device: int | None
    """The GPU it runs on, if it was told which."""
    status: str


class ModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """More about a model than OpenAI's object tells."""

    description: str
    n_ctx: int
    """KV cells of each worker."""
    kv_layout: str
    sampling: str
    n_ctx_train: int
    max_sequence: int
    """Most tokens of prompt and answer together."""
    n_params: int
    n_vocab: int
    size: int
    """Bytes."""
    workers: list[ModelWorker]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as in OpenAI's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: Literal["cppbatch"] = "cppbatch"
    meta: ModelMeta


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
