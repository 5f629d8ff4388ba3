"""--llama-cpp-python-config: the models and the server of a --config_file of llama-cpp-python's server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from cppbatch.cli.llama_cpp_python_config import read_llama_cpp_python_config, use_config
from cppbatch.cli.model_sources import Catalog, ModelSources
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.server.models.loader import ModelSpec
from cppbatch.server.settings import ServerSettings

MODEL = {"model": "models/a.gguf"}


def written(folder: Path, *models: dict[str, Any], **server: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**server, "models": models}))
    (folder / "models").mkdir(exist_ok=True)
    for model in models:
        (folder / model["model"]).write_bytes(b"GGUF")
    return file


def catalog(file: Path) -> tuple[dict[str, ModelSpec], str | None]:
    sources = ModelSources(settings_file=file, is_llama_cpp_python=True)
    content = Catalog(sources, EngineConfig(""), set(), Deployment(step_timeout=60), ServerSettings()).read()
    return {spec.name: spec for spec in content.specs}, content.default


def test_each_model_has_its_alias_and_the_first_is_loaded_and_default(tmp_path: Path) -> None:
    file = written(tmp_path, MODEL | {"model_alias": "gpt"}, {"model": "models/b.gguf"})
    found, default = catalog(file)
    assert list(found) == ["gpt", "b"]
    assert default == "gpt"
    assert (found["gpt"].preload, found["b"].preload) == (True, False)
    assert found["gpt"].config.model_path == str(tmp_path / "models/a.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"n_ctx": "many"}, "n_ctx: Expected `int | null`, got `str`"),
        ({"n_threads": [4]}, "n_threads: Expected `int | null`, got `array`"),
        ({"tensor_split": 3}, "tensor_split: Expected `array | null`, got `int`"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs: Expected `object | null`, got `str`"),
        ({"model": 3}, "models[0].model: Expected `str | null`, got `int`"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"models": [MODEL | content]}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_llama_cpp_python_config(file)


def test_values_that_llama_cpp_python_accepts_are_read(tmp_path: Path) -> None:
    file = written(tmp_path, MODEL | {"n_ctx": "2048", "n_threads": "4", "n_gpu_layers": None}, host=None, port="8001")
    found = read_llama_cpp_python_config(file)
    assert (found.server["hosts"], found.server["port"]) == (("localhost",), 8001)
    assert found.models.models["a"]["threads"] == 4
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is nested too deeply"):
        read_llama_cpp_python_config(tmp_path / "deep.json")


def test_a_context_of_no_size_is_that_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.cli.model_settings.context_length", lambda path: {"a.gguf": 131_072}[path.name])
    assert catalog(written(tmp_path, MODEL | {"n_ctx": 0}))[0]["a"].config.n_ctx == 131_072


def test_settings_become_flags(tmp_path: Path) -> None:
    model = MODEL | {
        "n_ctx": 8192, "n_gpu_layers": -1, "n_ubatch": 128, "n_threads": 3, "flash_attn": True, "type_k": 8,
        "type_v": 1, "numa": True,
        "chat_format": "chatml", "chat_template_kwargs": {"enable_thinking": False}, "draft_model_num_pred_tokens": 4,
        "draft_model": "prompt-lookup-decoding", "last_n_tokens_size": 32, "seed": 7, "n_batch": 64, "cache": True,
    }  # fmt: skip
    spec = catalog(written(tmp_path, model))[0]["a"]
    config = spec.config
    assert (config.n_ctx, config.n_gpu_layers, config.n_ubatch, config.n_threads) == (16384, -1, 128, 3)
    assert (config.flash_attn, config.cache_type_k, config.cache_type_v) == ("on", "q8_0", "f16")
    assert config.numa == "distribute"
    assert (config.spec, config.draft_max) == ("suffix", 4)
    assert "<|im_start|>" in str(spec.settings.chat_template)
    assert spec.settings.template_variables == {"enable_thinking": False}
    assert spec.settings.sampling_defaults == {"seed": 7, "penalty_last_n": 32}


def test_a_model_without_sizes_has_those_of_the_other_server(tmp_path: Path) -> None:
    config = catalog(written(tmp_path, MODEL))[0]["a"].config
    assert (config.n_gpu_layers, config.n_ctx) == (0, 16384)
    assert catalog(written(tmp_path, MODEL | {"n_ctx": 100_000}))[0]["a"].config.n_ctx == 100_000


def test_positions_and_metadata_are_those_of_the_file(tmp_path: Path) -> None:
    given = {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64, "yarn_attn_factor": 1.0}
    ((_, spec),) = catalog(written(tmp_path, MODEL | given | {"kv_overrides": ["a.b=int:1"]}))[0].items()
    assert spec.config.model_changes == {
        "rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64, "kv_overrides": ("a.b=int:1",),
    }  # fmt: skip


def test_the_server_is_where_the_file_says_unless_flags_say_otherwise(tmp_path: Path) -> None:
    file = written(tmp_path, MODEL, host="0.0.0.0", port=9000, api_key="secret", ssl_keyfile="key.pem")
    context = click.Context(click.Command("serve"))
    use_config(context, click.Option(["--llama-cpp-python-config"]), file)
    wanted = {"hosts": ("0.0.0.0",), "port": 9000, "api_keys": ("secret",), "ssl_keyfile": "key.pem"}
    assert context.default_map == wanted | {"any_model": True}
    assert read_llama_cpp_python_config(written(tmp_path, MODEL)).server["port"] == 8000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_only": True}, "vocab_only is not supported"),
        ({"kv_overrides": ["a=long:1"]}, "its type is 'long'"),
        ({"chat_format": "snoozy"}, "chat_format is 'snoozy'"),
        ({"type_k": 12}, "type_k is 12"),
        ({"draft_model": "other"}, "draft_model is 'other'"),
        ({"n_ctxx": 5}, "unknown setting n_ctxx"),
    ],
)
def test_settings_without_a_counterpart_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        catalog(written(tmp_path, MODEL | settings))


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("{", "Expecting property name"),
        ('{"models": []}', "models must be a list"),
        ("[]", "models"),
    ):
        file = tmp_path / "config.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_llama_cpp_python_config(file)
