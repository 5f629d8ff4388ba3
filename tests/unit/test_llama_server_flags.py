"""llama-server's flags that cppbatch has under other names, or accepts and logs."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import cppbatch
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.llama_server_flags import (
    PRESETS,
    REFUSED,
    UNNEEDED,
    LlamaServerCommand,
    RefusedFlag,
    UnneededFlag,
    flags_log,
    unneeded_flags,
)
from cppbatch.cli.serve_command import serve
from cppbatch.config import EngineConfig
from cppbatch.server.observe.log_setup import set_up


def config_of(*flags: str, **variables: str) -> EngineConfig:
    """The settings of a command line with these flags."""
    found: list[EngineConfig] = []

    def found_config(config: EngineConfig) -> None:
        found.append(config)

    command = click.command(cls=LlamaServerCommand)(engine_options(unneeded_flags(found_config)))
    result = CliRunner().invoke(command, ["-m", "m.gguf", *flags], env=variables)
    assert not result.exception, (result.output, result.exception)
    return found[0]


@pytest.fixture(autouse=True)
def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.models.pull.choose_model", lambda given: given)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-kvu"], {"kv_layout": "unified"}),
        (["--kv-unified"], {"kv_layout": "unified"}),
        (["--kv_unified"], {"kv_layout": "unified"}),
        (["-no-kvu"], {"kv_layout": "per-sequence"}),
        (["--no-kv-unified"], {"kv_layout": "per-sequence"}),
        (["-nr"], {"repack": "off"}),
        (["--cache-ram", "64"], {"prefix_cache_ram": 64}),
        (["-cram=64"], {"prefix_cache_ram": 64}),
        (["--cache-ram", "-1"], {"prefix_cache_ram": 2**31 - 1}),
        (["--no-cache-prompt"], {"prefix_cache": False}),
        (["--spec-type", "none"], {"spec": "off"}),
        (["--spec-type", "ngram-mod"], {"spec": "suffix"}),
        (["-fit", "off"], {"fit_params": False}),
        (["--fit", "on"], {}),
        (["-fitt", "1024"], {"fit_target": (1024,)}),
        (["--fit-target", "512/1024"], {"fit_target": (512, 1024)}),
        (["-fitc", "4096"], {"fit_ctx": 4096}),
        (["-lzm", "on"], {"lazy_mode": "on"}),
        (["--numa", "distribute"], {"numa": "distribute"}),
        (["-lm", "dio"], {"load_mode": "dio"}),
        (["-ts", "3,1"], {"tensor_split": (3.0, 1.0)}),
        (["--gpu-layers-draft", "2"], {"draft_gpu_layers": 2}),
        (["--spec-default"], {"spec": "suffix"}),
        (["--draft", "5"], {"draft_max": 5}),
        (["-ctkd", "q8_0", "--cache-type-v-draft", "f16"], {"draft_cache_type_k": "q8_0", "draft_cache_type_v": "f16"}),
        (["--rope-scaling", "yarn", "--rope-scale", "4"], {"rope_scaling": "yarn", "rope_freq_scale": 0.25}),
        (["--rope-freq-base", "1e6", "--rope-freq-scale", ".5"], {"rope_freq_base": 1e6, "rope_freq_scale": 0.5}),
        (["--yarn-orig-ctx", "4096", "--yarn-ext-factor", "0"], {"yarn_orig_ctx": 4096, "yarn_ext_factor": 0.0}),
        (["--yarn-attn-factor", "2", "--yarn-beta-slow", "3"], {"yarn_attn_factor": 2.0, "yarn_beta_slow": 3.0}),
        (["--yarn-beta-fast", "16", "--check-tensors"], {"yarn_beta_fast": 16.0, "check_tensors": True}),
        (
            ["--override-kv", 'a.b=int:5,"c=str:x,y"', "--override-kv", "d=bool:true"],
            {"kv_overrides": ("a.b=int:5", "c=str:x,y", "d=bool:true")},
        ),
        (["--lora", "a.gguf,b.gguf"], {"lora": (("a.gguf", 1.0), ("b.gguf", 1.0))}),
        (["--lora-scaled", "a.gguf:0.5,b:c.gguf:-1"], {"lora": (("a.gguf", 0.5), ("b:c.gguf", -1.0))}),
        (
            ["--lora", "a.gguf=2", "--lora-init-without-apply"],
            {"lora": (("a.gguf", 0.0),), "lora_init_without_apply": True},
        ),
        (
            ["--control-vector", "a.gguf", "--control-vector-scaled", "b.gguf:0.5,c.gguf:2"],
            {"control_vectors": (("a.gguf", 1.0), ("b.gguf", 0.5), ("c.gguf", 2.0))},
        ),
        (["--control-vector-layer-range", "2", "9", "-c", "512"], {"control_vector_layers": (2, 9), "n_ctx": 512}),
        (["--image-min-tokens", "8", "--image-max-tokens", "64"], {"image_min_tokens": 8, "image_max_tokens": 64}),
        (["--mtmd-batch-max-tokens", "64", "-C", "0xF"], {"media_batch": 64, "cpu_mask": "0xF"}),
        (["-Cr", "0-3"], {"cpu_range": "0-3"}),
        (["--kv-unified-per-slot", "512"], {"n_ctx_seq": 512}),
        (["--kv-unified-per-slot", "512", "-np", "4"], {"n_ctx_seq": 512, "n_parallel": 4, "n_ctx": 2048}),
        (
            ["--kv-unified-per-slot", "512", "-np", "4", "-c", "1024"],
            {"n_ctx_seq": 512, "n_parallel": 4, "n_ctx": 1024},
        ),
        (["-dev", "none"], {"n_gpu_layers": 0, "draft_gpu_layers": 0}),
        (["-dev", "none", "-devd", "CUDA0"], {"n_gpu_layers": 0, "draft_device_names": ("CUDA0",)}),
    ],
)
def test_a_flag_that_has_an_equal_sets_it(flags: list[str], expected: dict[str, Any]) -> None:
    assert config_of(*flags) == EngineConfig("m.gguf", **expected)


@pytest.mark.parametrize(
    ("name", "spec"), [("simple", "draft"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dflash")]
)
def test_the_kinds_of_draft_models_have_llama_servers_names(tmp_path: Path, name: str, spec: str) -> None:
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF" + b"\1" * 20)
    assert config_of("--spec-type", f"draft-{name}", "-md", str(file)).spec == spec


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LLAMA_ARG_KV_UNIFIED", "1", {"kv_layout": "unified"}),
        ("LLAMA_ARG_KV_UNIFIED", "false", {"kv_layout": "per-sequence"}),
        ("LLAMA_ARG_CACHE_RAM", "64", {"prefix_cache_ram": 64}),
        ("LLAMA_ARG_SPEC_TYPE", "none", {"spec": "off"}),
        ("LLAMA_ARG_FIT", "off", {"fit_params": False}),
        ("LLAMA_ARG_FIT_TARGET", "512,1024", {"fit_target": (512, 1024)}),
        ("LLAMA_ARG_FIT_CTX", "4096", {"fit_ctx": 4096}),
        ("LLAMA_ARG_LAZY_MODE", "off", {"lazy_mode": "off"}),
        ("LLAMA_ARG_NUMA", "isolate", {"numa": "isolate"}),
        ("LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "1", {"draft_cpu_moe": True}),
        ("LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", "2", {"draft_n_cpu_moe": 2}),
        ("LLAMA_ARG_ROPE_SCALE", "4", {"rope_freq_scale": 0.25}),
        ("LLAMA_ARG_YARN_ORIG_CTX", "4096", {"yarn_orig_ctx": 4096}),
        ("LLAMA_ARG_IMAGE_MAX_TOKENS", "64", {"image_max_tokens": 64}),
        ("LLAMA_ARG_DRAFT_MAX", "5", {"draft_max": 5}),
    ],
)
def test_llama_servers_variables_change_the_same_settings(variable: str, value: str, expected: dict[str, Any]) -> None:
    assert config_of(**{variable: value}) == EngineConfig("m.gguf", **expected)


_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("-ot a=CUDA0 -cmoe", {}, {"override_tensor": ("a=CUDA0",), "cpu_moe": True}),
        ("-cmoe -ot a=CUDA0", {}, {"override_tensor": (_EXPERTS, "a=CUDA0")}),
        ("-ncmoe 2 -ot a=CUDA0", {}, {"override_tensor": (rf"blk\.(0|1){_EXPERTS}", "a=CUDA0")}),
        ("-ot a=CUDA0", {"LLAMA_ARG_CPU_MOE": "1"}, {"override_tensor": (_EXPERTS, "a=CUDA0")}),
        ("-cmoe", {"LLAMA_ARG_OVERRIDE_TENSOR": "a=CUDA0"}, {"override_tensor": ("a=CUDA0",), "cpu_moe": True}),
        ("-cmoed -otd a=CUDA0", {}, {"draft_override_tensor": (_EXPERTS, "a=CUDA0")}),
    ],
)
def test_of_several_placements_of_a_tensor_the_first_counts(
    flags: str, variables: dict[str, str], expected: dict[str, Any]
) -> None:
    assert config_of(*flags.split(), **variables) == EngineConfig("m.gguf", **expected)


@pytest.mark.parametrize(
    ("flags", "unknown", "close"),
    [
        ("-nzz", "-nzz", "'-n'"),
        ("-ncmox 4", "-ncmox", "'-ncmoe'"),
        ("-n 64 -ncmox -n 32", "-ncmox", "'-ncmoe'"),
        ("-sx", "-sx", "'-s'"),
        ("-fitz on", "-fitz", "'-fit'"),
        ("-vkx", "-vkx", ""),
        ("-ncmox=4", "-ncmox", "'-ncmoe'"),
    ],
)
def test_an_unknown_short_flag_is_named_whole(flags: str, unknown: str, close: str) -> None:
    result = CliRunner().invoke(serve, flags.split())
    assert result.exit_code == 2
    assert re.search(rf"No such option:? '?{unknown}\b", result.output)
    assert close in result.output


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("-c4096", "n_ctx", 4096),
        ("-b64", "n_batch", 64),
        ("-vc4096", "n_ctx", 4096),
        ("-t 2 -c 512", "n_ctx", 512),
        ("-md -nzz -c 512", "n_ctx", 512),
        ("-otd -nzz=CPU", "draft_override_tensor", ("-nzz=CPU",)),
    ],
)
def test_a_short_flag_may_have_its_value_attached(
    flags: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda _path: True)
    monkeypatch.setattr("cppbatch.models.find.check_file", lambda path: path)
    assert getattr(config_of(*flags.split()), name) == value


@pytest.mark.parametrize("flag", UNNEEDED, ids=lambda flag: flag.names.split()[0])
def test_an_unneeded_flag_changes_nothing_and_is_one_line_in_the_log(
    flag: UnneededFlag, caplog: pytest.LogCaptureFixture
) -> None:
    for name in flag.names.split():
        caplog.clear()
        with caplog.at_level(logging.INFO, flags_log.name):
            assert config_of(name, *(flag.values or ("1",))[: bool(flag.value)]) == EngineConfig("m.gguf")
        (line,) = caplog.messages
        assert name in line
        assert line.endswith(f": no effect; {flag.instead}")


def test_a_command_line_without_them_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, flags_log.name):
        config_of("-c", "512", "-np", "2")
    assert not caplog.messages


def test_serve_takes_them_and_shows_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    assert {name for flag in UNNEEDED for name in flag.names.split()} <= names
    monkeypatch.setattr(logging, "basicConfig", lambda **_others: None)  # it would replace pytest's handlers
    set_up("text")
    assert flags_log.isEnabledFor(logging.INFO)


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.names.split()[0])
def test_a_flag_that_would_change_the_answer_or_the_safety_is_refused_with_the_reason(flag: RefusedFlag) -> None:
    for name in flag.names.split():
        result = CliRunner().invoke(serve, [name, *["x"][: bool(flag.value)], "-m", "m.gguf"])
        assert result.exit_code == 2
        assert f"Error: {flag.names.replace(' ', ' or ')}: {flag.reason}; leave it out" in result.output
    assert flag.reason in CliRunner().invoke(serve, [], env={flag.llama_env: "1"}).output


def test_an_unknown_format_of_reasoning_is_refused() -> None:
    assert "'other' is not one of" in CliRunner().invoke(serve, ["--reasoning-format", "other"]).output


def test_flags_that_only_inform_print_it_and_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + b"\1" * 20)
    for flags, line in (
        ("--version", f"cppbatch {cppbatch.__version__}, llama-cpp-python "),  # perhaps not installed
        ("-cl", "number of models in the models folder: 1\n   1. a"),
        ("--completion-bash", "_CPPBATCH_COMPLETE=bash_complete"),
        ("--usage", "Usage: serve [OPTIONS]"),
    ):
        result = CliRunner().invoke(serve, ["--port", "0", flags])
        assert result.exit_code == 0
        assert line in result.output


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_model_of_the_hub_with_its_settings(name: str) -> None:
    flags = PRESETS[name]
    assert flags[0] == "-hf"
    known = {flag for option in serve.params for flag in option.opts}
    assert {flag for flag in flags if flag.startswith("-")} <= known
    with serve.make_context("serve", [name, "--port", "9"]) as context:
        assert context.params["hf_repo"] == flags[1]
        assert context.params["port"] == 9  # a later flag counts
