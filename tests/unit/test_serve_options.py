"""The options of `serve` that llama-server has too: their names, their environment variables, their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.main import cli
from cppbatch.cli.server_options import server_options
from cppbatch.config import EngineConfig
from cppbatch.engine.params import SAMPLERS, SamplingParams
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.address import Address
from cppbatch.server.settings import ServerSettings

Read = Callable[..., tuple[ServerSettings, Address]]


@pytest.fixture
def read() -> Read:
    """The settings and addresses of a command line and environment variables."""

    def read(*flags: str, **variables: str) -> tuple[ServerSettings, Address]:
        found: list[tuple[ServerSettings, Address]] = []

        @click.command()
        @server_options
        def command(settings: ServerSettings, address: Address, **_others: Any) -> None:
            found.append((settings, address))

        result = CliRunner().invoke(command, flags, env=variables)
        if result.exception:
            raise result.exception
        return found[0]

    return read


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ("", "127.0.0.1", 8080),
        ("0.0.0.0", "0.0.0.0", 11434),
        ("localhost:9000", "localhost", 9000),
        (" :9000 ", "127.0.0.1", 9000),
        ("[::1]", "::1", 11434),
        ("http://10.0.0.7:9000/", "10.0.0.7", 9000),
        ("http://box", "box", 80),
        ("https://box", "box", 443),
    ],
)
def test_ollama_host_is_the_default_address(
    given: str, host: str, port: int, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Address, "check", lambda self: None)
    address = read(OLLAMA_HOST=given)[1]
    assert (address.hosts, address.port) == ((host,), port)
    for flags, variables in (
        (["--host", "127.0.0.2"], {}),
        (["--port", "0"], {}),
        ([], {"LLAMA_ARG_PORT": "0"}),
        ([], {"CPPBATCH_HOST": "127.0.0.2"}),
    ):
        address = read(*flags, OLLAMA_HOST="1.2.3.4:5", **variables)[1]
        assert (address.hosts, address.port) in ((("127.0.0.2",), 8080), (("127.0.0.1",), 0)), "one of them is enough"


@pytest.mark.parametrize("given", ["box:port", "box:70000", "ftp://box", "::1", "http://[::1"])
def test_a_wrong_ollama_host_is_refused_with_its_forms(given: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=r"^OLLAMA_HOST is .*HOST:PORT"):
        read(OLLAMA_HOST=given)


SAMPLING: list[tuple[str, str, str, Any]] = [
    ("--temp", "0.25", "temperature", 0.25),
    ("--temperature", "0.25", "temperature", 0.25),
    ("--top-k", "7", "top_k", 7),
    ("--top-p", "0.5", "top_p", 0.5),
    ("--min-p", "0.25", "min_p", 0.25),
    ("--typical", "0.5", "typical_p", 0.5),
    ("--top-nsigma", "1.5", "top_n_sigma", 1.5),
    ("--xtc-probability", "0.5", "xtc_probability", 0.5),
    ("--xtc-threshold", "0.25", "xtc_threshold", 0.25),
    ("--dynatemp-range", "0.5", "dynatemp_range", 0.5),
    ("--dynatemp-exp", "2", "dynatemp_exponent", 2),
    ("--repeat-penalty", "1.5", "repetition_penalty", 1.5),
    ("--repeat-last-n", "10", "penalty_last_n", 10),
    ("--presence-penalty", "0.5", "presence_penalty", 0.5),
    ("--frequency-penalty", "0.5", "frequency_penalty", 0.5),
    ("--dry-multiplier", "0.5", "dry_multiplier", 0.5),
    ("--dry-base", "2", "dry_base", 2),
    ("--dry-allowed-length", "3", "dry_allowed_length", 3),
    ("--dry-penalty-last-n", "20", "dry_penalty_last_n", 20),
    ("--dry-sequence-breaker", ";", "dry_sequence_breakers", [";"]),
    ("--adaptive-target", "0.5", "adaptive_target", 0.5),
    ("--adaptive-decay", "0.5", "adaptive_decay", 0.5),
    ("--mirostat", "2", "mirostat", 2),
    ("--mirostat-lr", "0.25", "mirostat_eta", 0.25),
    ("--mirostat-ent", "4", "mirostat_tau", 4),
    ("--samplers", "top_k;typ_p;temperature", "samplers", ["top_k", "typical_p", "temperature"]),
    ("--seed", "5", "seed", 5),
    ("-s", "4294967295", "seed", -1),
    ("-n", "12", "max_tokens", 12),
    ("--predict", "-1", "max_tokens", -1),
]


@pytest.mark.parametrize(("flag", "value", "field", "expected"), SAMPLING)
def test_a_flag_of_sampling_is_a_default_of_the_server(
    read: Read, flag: str, value: str, field: str, expected: object
) -> None:
    assert read()[0].sampling_defaults == {}
    assert read(flag, value)[0].sampling_defaults == {field: expected}


def test_every_number_of_sampling_has_a_flag() -> None:
    given = {field for _, _, field, _ in SAMPLING} | {"ignore_eos"}
    defaults = SamplingParams()
    fields = {name for name in SamplingParams.__struct_fields__ if type(getattr(defaults, name)) in (int, float)}
    assert fields - given == {"min_tokens"}
    assert defaults.samplers == SAMPLERS


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sampler-seq", "kt"], {"samplers": ["top_k", "temperature"]}),
        (["--sampling-seq", "edskypmxt"], {"samplers": list(SAMPLERS)}),
        (["--samplers", "temp"], {"samplers": ["temperature"]}),
        (["-l", "15043+1.5", "--logit-bias", "7-inf", "-l", "15043-1"], {"logit_bias": {"15043": 0.5, "7": -100.0}}),
        (["-r", "User:", "--reverse-prompt", r"a\n\x41\\"], {"stop": ["User:", "a\nA\\"]}),
        (["--no-escape", "-r", r"a\n"], {"stop": [r"a\n"]}),
        (["--dry-sequence-breaker", r"\n"], {"dry_sequence_breakers": ["\n"]}),
        (["--special"], {"skip_special_tokens": False}),
        (["--grammar", 'root ::= "a"'], {"grammar": 'root ::= "a"'}),
        (["-j", "{}"], {"json_schema": "{}"}),
    ],
)
def test_a_default_of_requests_has_llama_servers_flag(read: Read, flags: list[str], expected: dict[str, Any]) -> None:
    assert read(*flags)[0].sampling_defaults == expected


def test_a_grammar_or_schema_may_be_in_a_file(read: Read, tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"type": "object"}')
    assert read("-jf", str(tmp_path / "a"))[0].sampling_defaults == {"json_schema": '{"type": "object"}'}
    assert read("--grammar-file", str(tmp_path / "a"))[0].sampling_defaults == {"grammar": '{"type": "object"}'}
    for flags in (["-jf", str(tmp_path / "none")], ["--grammar-file", str(tmp_path)], ["-l", "5"], ["-l", "a+1"]):
        with pytest.raises(SystemExit):
            read(*flags)
    with pytest.raises(ConfigError, match="only one grammar"):
        read("-jf", str(tmp_path / "a"), "--grammar", "x")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--reasoning-effort", "low"], {"reasoning_effort": "low", "reasoning_strength": "low"}),
        (["--reasoning-effort", "default"], {}),
        (
            ["--reasoning-preserve"],
            {
                "preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False,
                "drop_thinking": False,
            },
        ),
        (
            ["--no-reasoning-preserve", "--reasoning", "off"],
            {
                "enable_thinking": False, "preserve_thinking": False, "clear_thinking": True,
                "truncate_history_thinking": True, "drop_thinking": True,
            },
        ),
    ],
)  # fmt: skip
def test_flags_of_reasoning_are_variables_of_the_template(
    read: Read, flags: list[str], expected: dict[str, Any]
) -> None:
    assert read(*flags)[0].template_variables == expected


def test_a_default_out_of_range_is_refused_before_a_model_is_loaded(read: Read) -> None:
    with pytest.raises(ConfigError, match="default of temperature is 1000"):
        read("--temp", "1000")
    with pytest.raises(InvalidRequest, match="nosuch"):
        read("--samplers", "nosuch")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LLAMA_ARG_TEMPERATURE", "0.25", {"temperature": 0.25}),
        ("LLAMA_ARG_TOP_K", "7", {"top_k": 7}),
        ("LLAMA_ARG_TOP_P", "0.5", {"top_p": 0.5}),
        ("LLAMA_ARG_MIN_P", "0.5", {"min_p": 0.5}),
        ("LLAMA_ARG_REPEAT_PENALTY", "1.5", {"repetition_penalty": 1.5}),
        ("LLAMA_ARG_PRESENCE_PENALTY", "1.5", {"presence_penalty": 1.5}),
        ("LLAMA_ARG_FREQUENCY_PENALTY", "1.5", {"frequency_penalty": 1.5}),
        ("LLAMA_ARG_N_PREDICT", "9", {"max_tokens": 9}),
        ("CPPBATCH_SEED", "9", {"seed": 9}),
    ],
)
def test_a_variable_of_sampling_is_a_default_of_the_server(
    read: Read, variable: str, value: str, expected: dict[str, Any]
) -> None:
    assert read(**{variable: value})[0].sampling_defaults == expected


def test_our_own_variable_comes_before_that_of_llama_cpp_and_a_flag_before_both(read: Read) -> None:
    both = {"CPPBATCH_TEMPERATURE": "0.5", "LLAMA_ARG_TEMPERATURE": "0.25"}
    assert read(**both)[0].sampling_defaults == {"temperature": 0.5}
    assert read("--temp", "1", **both)[0].sampling_defaults == {"temperature": 1}


def test_the_server_listens_on_every_host_that_is_given(read: Read) -> None:
    assert read()[1].hosts == ("127.0.0.1",)
    assert read("--host", "127.0.0.1", "--host", "::1")[1].hosts == ("127.0.0.1", "::1")
    assert read("--host", "127.0.0.1, ::1")[1].hosts == ("127.0.0.1", "::1")
    assert read(LLAMA_ARG_HOST="0.0.0.0", LLAMA_ARG_PORT="81")[1] == Address(hosts=("0.0.0.0",), port=81)
    with pytest.raises(SystemExit):
        read("--host", "")


def test_keys_and_origins_may_be_lists_with_commas(read: Read) -> None:
    settings = read("--api-key", "a,b", "--cors-origins", "https://a.example,localhost")[0]
    assert settings.keys.rules_of("a")
    assert settings.keys.rules_of("b")
    assert not settings.keys.rules_of("a,b")
    assert settings.origins == ("https://a.example", "localhost")
    assert read(LLAMA_API_KEY="c")[0].keys.rules_of("c")
    with pytest.raises(ConfigError, match="API key 1 is empty"):
        read("--api-key", "")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {}),
        (["--reasoning", "auto"], {}),
        (["--reasoning", "on"], {"enable_thinking": True}),
        (["-rea", "false"], {"enable_thinking": False}),
        (["--chat-template-kwargs", '{"a": 1}', "--reasoning", "off"], {"a": 1, "enable_thinking": False}),
    ],
)
def test_variables_of_the_chat_template(read: Read, flags: list[str], expected: dict[str, Any]) -> None:
    assert read(*flags)[0].template_variables == expected


@pytest.mark.parametrize("value", ["{", "[1]", "1"])
def test_variables_that_are_not_a_json_object_are_refused(read: Read, value: str) -> None:
    with pytest.raises(SystemExit):
        read("--chat-template-kwargs", value)


def test_a_chat_template_comes_from_a_file_by_either_flag(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 5 }}")
    assert read("--chat-template-file", str(file))[0].chat_template == "{{ 5 }}"
    assert read(LLAMA_ARG_CHAT_TEMPLATE_FILE=str(file))[0].chat_template == "{{ 5 }}"
    assert read(LLAMA_ARG_CHAT_TEMPLATE="{{ 6 }}")[0].chat_template == "{{ 6 }}"


def test_an_empty_data_folder_is_refused() -> None:
    result = CliRunner().invoke(cli, ["serve", "--data-dir", ""])
    assert result.exit_code == 2
    assert re.search("'--data-dir' .*is empty; name a folder", result.output)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_N_PARALLEL": "2"}, {"n_ctx": 512, "n_parallel": 2}),
        ({"LLAMA_ARG_BATCH": "512", "LLAMA_ARG_UBATCH": "64"}, {"n_batch": 512, "n_ubatch": 64}),
        ({"LLAMA_ARG_N_GPU_LAYERS": "all", "LLAMA_ARG_THREADS": "1"}, {"n_gpu_layers": -2, "n_threads": 1}),
        ({"LLAMA_ARG_FLASH_ATTN": "1", "LLAMA_ARG_REPACK": "false"}, {"flash_attn": "on", "repack": "off"}),
        ({"LLAMA_ARG_CACHE_TYPE_K": "q8_0"}, {"cache_type_k": "q8_0"}),
        ({"LLAMA_ARG_CACHE_PROMPT": "0", "LLAMA_ARG_POOLING": "mean"}, {"prefix_cache": False, "pooling": "mean"}),
    ],
)
def test_the_engine_reads_llama_cpps_variables(
    variables: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.models.pull.choose_model", lambda given: given)
    found: list[EngineConfig] = []

    def found_config(config: EngineConfig) -> None:
        found.append(config)

    command = click.command()(engine_options(found_config))
    CliRunner().invoke(command, env={**variables, "LLAMA_ARG_MODEL": "m.gguf"}, catch_exceptions=False)
    assert found == [EngineConfig("m.gguf", **expected)]


def test_a_flag_may_be_written_with_underscores_as_in_llama_server() -> None:
    result = CliRunner().invoke(cli, ["serve", "--top_p", "7", "-m", "nosuch.gguf"])
    assert "top_p is 7" in str(result.exception)


def test_the_help_names_the_variables() -> None:
    text = re.sub(r"\s+", " ", CliRunner().invoke(cli, ["serve", "--help-all"]).output)
    assert "env var: CPPBATCH_TEMPERATURE, LLAMA_ARG_TEMPERATURE" in text
    assert "env var: CPPBATCH_API_KEY, LLAMA_API_KEY" in text


def test_the_keys_file_of_the_docs_is_read_and_a_mistake_in_it_stops_the_start(read: Read, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "keys.toml"
    path.write_text(example)
    rules = read("--api-key-file", str(path))[0].keys.rules_of("sk-alice-8c1f")
    assert rules
    assert (rules.name, rules.priority, rules.requests_per_minute) == ("alice", 20, 30)
    path.write_text(example.replace("priority = 20", "priority = 2000"))
    with pytest.raises(ConfigError, match=r"keys\.toml, line 2, tiers\.free\.priority"):
        read("--api-key-file", str(path))


@pytest.mark.parametrize(
    ("flags", "variables", "served"),
    [
        ((), {}, True),
        (("--no-webui",), {}, False),
        (("--no-ui",), {}, False),
        (("--ui",), {"LLAMA_ARG_UI": "0"}, True),
        ((), {"LLAMA_ARG_UI": "0"}, False),
        ((), {"LLAMA_ARG_WEBUI": "false"}, False),
        ((), {"CPPBATCH_WEBUI": "1", "LLAMA_ARG_UI": "0"}, True),
    ],
)
def test_the_web_page_is_served_unless_it_is_turned_off_with_llama_servers_names(
    read: Read, flags: tuple[str, ...], variables: dict[str, str], served: bool
) -> None:
    settings, _ = read(*flags, **variables)
    assert settings.webui is served
