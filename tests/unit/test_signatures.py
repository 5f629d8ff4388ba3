"""Keyword arguments of the public API are typed: type checkers and editors see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, EngineProcess, GenerationRequest, LocalEngine, generate_batch
from cppbatch.engine.request import RequestOptions
from cppbatch.engine_settings import EngineSettings
from cppbatch.sizing.profile import TunedSettings


def fields(struct: type[msgspec.Struct], *without: str) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(struct).items() if name not in without}


def test_engine_settings_are_the_fields_of_the_config() -> None:
    assert get_type_hints(EngineSettings) == fields(EngineConfig, "model_path")
    assert not EngineSettings.__required_keys__


def test_the_settings_of_a_profile_have_the_types_of_the_config() -> None:
    assert get_type_hints(TunedSettings).items() <= get_type_hints(EngineConfig).items()


def test_request_options_are_the_fields_of_the_request() -> None:
    assert get_type_hints(RequestOptions) == fields(
        GenerationRequest, "id", "prompt", "task", "params", "client", "report_acceptance"
    )
    assert not RequestOptions.__required_keys__


@pytest.mark.parametrize(
    "function",
    [
        BatchInferenceEngine.__init__, BatchInferenceEngine.generate, BatchInferenceEngine.stream,
        BatchInferenceEngine.map, BatchInferenceEngine.chat, BatchInferenceEngine.chat_stream,
        LocalEngine.chat, LocalEngine.chat_stream, BatchInferenceEngine.embed, BatchInferenceEngine.add_request,
        LocalEngine.__init__, EngineProcess.__init__, generate_batch,
    ],
)  # fmt: skip
def test_no_keyword_argument_is_any(function: Callable[..., Any]) -> None:
    assert {kind for kind in function.__annotations__.values() if "Any" in str(kind)} == set()
