"""Launch scripts of llama-server start here as they are, but for the file of the model, and do what they say."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch.models.synthetic import LlamaShape
from tests.integration.test_control_vectors import control_vector
from tests.support import tiny_models
from tests.support.file_site import Registry
from tests.support.lora_files import write_lora
from tests.support.server_process import ServerProcess

Json = dict[str, Any]
SMALL = ("--no-memory-check", "--no-profile")


def fetch(url: str, body: Json | None = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for 128 tokens."""
    path = tmp_path_factory.mktemp("models") / "short.gguf"
    return tiny_models.llama(path, shape=LlamaShape(n_ctx_train=128))


def test_yarn_makes_the_context_of_a_model_longer(short: Path) -> None:
    flags = "-c 512 -np 1 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 128 -fa -t -1".split()
    with ServerProcess("-m", short, *flags, *SMALL) as server:
        url = server.wait_ready().url
        body: Json = {"prompt": list(range(10, 60)) * 6, "n_predict": 4, "temperature": 0}
        answer = fetch(f"{url}/completion", body)
        assert answer["tokens_evaluated"] == 300
        assert fetch(f"{url}/props")["default_generation_settings"]["n_ctx"] == 512


def test_a_service_with_defaults_a_prefix_and_a_log(tiny_llama: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "digits.gbnf"
    grammar.write_text('root ::= "7" [0-9]+')
    line = f"""--grammar-file {grammar} -n 6 --temp 0 -np 2 --api-prefix /llm --api-key secret --no-webui --alias gpt
    --log-file {tmp_path / "log"} --log-jsonl --cont-batching --no-warmup --prio 2 --cors-methods POST"""
    with ServerProcess("-m", tiny_llama, *line.split(), *SMALL) as server:
        url = server.wait_ready().url
        assert url.endswith("/llm")
        key = {"Authorization": "Bearer secret"}
        answer = fetch(f"{url}/v1/completions", {"prompt": "a"}, **key)
        text = answer["choices"][0]["text"]
        assert text[0] == "7"
        assert text.isdigit()
        assert answer["model"] == "gpt"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(f"{url}/v1/completions", {"prompt": "a"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"{url.removesuffix('/llm')}/health", None, **key)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    messages = [line["message"] for line in lines]
    assert any("POST /v1/completions 200" in message for message in messages)
    assert any(message.startswith("--prio: no effect") for message in messages)
    assert "secret" not in (tmp_path / "log").read_text()


def test_a_router_with_a_preset(tiny_llama: Path, short: Path, tmp_path: Path) -> None:
    preset = tmp_path / "models.ini"
    preset.write_text(
        "version = 1\n[*]\nc = 256  ; of each\nnp = 1\nLLAMA_ARG_CACHE_RAM = 0\nmmap = 0\nt = -1\n\n"
        f'[chat]\nm = {tiny_llama}\nalias = gpt\njinja = true\ngrammar = root ::= "yes"\n\n'
        f"[long]\nm = {short}\nrope-scaling = yarn\nrope-scale = 2\n"
    )
    with ServerProcess("--models-preset", preset, "--models-max", "1", *SMALL) as server:
        url = server.wait_ready().url
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
        answer = fetch(f"{url}/v1/chat/completions", {"model": "gpt", **body})
        assert answer["choices"][0]["message"]["content"] == "yes"
        answer = fetch(f"{url}/v1/completions", {"model": "long", "prompt": [7] * 200, "max_tokens": 2})
        assert answer["usage"]["prompt_tokens"] == 200


def test_a_refused_flag_ends_the_command_with_the_reason(tiny_llama: Path) -> None:
    with ServerProcess("-m", tiny_llama, "--jinja", "--tools", "all") as server:
        assert server.process.wait(60) == 2
        server.stop()
        assert "--tools: the server runs no tools" in "".join(server.errors)


def test_a_container_whose_variables_name_a_model_of_a_registry(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry({"ai/smol:135M-Q4_0": [tiny_llama.read_bytes()]}).running() as registry:
        env = {
            "LLAMA_ARG_DOCKER_REPO": "smol:135M-Q4_0",
            "LLAMA_ARG_CTX_SIZE": "512",
            "LLAMA_ARG_N_PARALLEL": "2",
            "LLAMA_ARG_ENDPOINT_METRICS": "1",
            "CPPBATCH_DOCKER_REGISTRY": registry,
            "CPPBATCH_MODELS": str(tmp_path),
        }
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with ServerProcess("--no-webui", *SMALL) as server:
            url = server.wait_ready().url
            assert fetch(f"{url}/v1/models")["data"][0]["id"] == "smol-135M-Q4_0"
            assert fetch(f"{url}/completion", {"prompt": "a", "n_predict": 2})["tokens_predicted"] == 2
            assert len(fetch(f"{url}/slots")) == 2


def test_an_embedding_server(tmp_path: Path) -> None:
    model = tiny_models.encoder_only(tmp_path / "vectors.gguf")
    line = "--embedding --pooling mean -ub 256 -b 256 -np 4 --embd-normalize -1 -ngl 0"
    with ServerProcess("-m", model, *line.split(), *SMALL) as server:
        url = server.wait_ready().url
        answer = fetch(f"{url}/v1/embeddings", {"input": ["a", "b c"]})
        norms = [sum(x * x for x in each["embedding"]) for each in answer["data"]]
        assert len(norms) == 2
        assert all(abs(norm - 1) > 1e-3 for norm in norms)


def test_a_server_with_adapters_and_a_control_vector_that_requests_choose(tiny_llama: Path, tmp_path: Path) -> None:
    style = write_lora(tmp_path / "style.gguf", seed=1)
    calm = control_vector(tmp_path / "calm.gguf", {1: np.linspace(-1, 1, 64)})
    line = f"--lora-scaled {style}:0.5 --lora-init-without-apply --control-vector-scaled {calm}:0 -n 8 --temp 0"
    with ServerProcess("-m", tiny_llama, *line.split(), *SMALL) as server:
        url = server.wait_ready().url

        def text(**fields: Any) -> str:
            return str(fetch(f"{url}/completion", {"prompt": "The river", "ignore_eos": True, **fields})["content"])

        plain = text()
        assert text(control_vectors={"calm": 3}) != plain
        assert text(lora=[{"id": 0, "scale": 1}]) != plain
        assert text(lora=[], control_vectors={}) == plain
