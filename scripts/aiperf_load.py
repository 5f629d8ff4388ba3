"""Runs AIPerf, NVIDIA's load generator, against one server, for scripts/bench_llama_server.py."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from measuring import Figures
from server_process import get_json, run_with_timeout

from cppbatch.errors import UnusableServer

AIPERF_FLAGS = {
    "mixed": "--seq-dist 32,32:25;96,64:25;192,128:25;448,16:25",
    "fan-out": "--num-dataset-entries 1 --isl 256 --osl 32",
    "shared-prefix": "--num-prefix-prompts 1 --prefix-prompt-length 580 --isl 20 --osl 32",
    "full-cells": "--isl 64 --osl 64",
}
"""The flags of each load."""
_FIGURES = {
    "output_tokens_per_second": ("output_token_throughput", "avg"),
    **{f"ttft_ms_{p}": ("time_to_first_token", p) for p in ("p50", "p95")},
    **{f"inter_token_ms_{p}": ("inter_chunk_latency", p) for p in ("p50", "p95", "p99")},
    "inter_token_ms_p100": ("inter_chunk_latency", "max"),
    **{f"tpot_ms_{p}": ("inter_token_latency", p) for p in ("p50", "p95")},
}
"""The metric of AIPerf's summary for each figure of `bench serve`."""


def run_aiperf(
    program: Path, url: str, load: str, *, n_requests: int, clients: int, seed: int, tokenizer: Path, seconds: float
) -> Figures:
    """Runs it for at most `seconds`. `tokenizer`: a folder in the format of Hugging Face. Raises `UnusableServer`."""
    model = get_json(f"{url}/v1/models")["data"][0]["id"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "artifacts")
        command = [
            program, "profile", "--url", url, "--model", model, "--endpoint-type", "completions", "--streaming",
            "--tokenizer", tokenizer, "--use-server-token-count", "--use-legacy-max-tokens",
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", *AIPERF_FLAGS[load].split(),
            "--request-count", n_requests, "--concurrency", clients, "--random-seed", seed,
            "--workers-max", 1, "--record-processors", 1, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            "--export-level", "summary", "--artifact-dir", folder,
        ]  # fmt: skip
        done = run_with_timeout(list(map(str, command)), seconds)
        if done.failure:
            raise UnusableServer(f"{' '.join(map(str, command))}: {done.failure}\n{done.output[-2000:]}")
        return _figures(json.loads((folder / "profile_export_aiperf.json").read_bytes()))


def _figures(export: dict[str, Any]) -> dict[str, float | None]:
    """Reads the summary. A request that ends in an error after its first token counts as answered there; only answers
    with a usage have a length, so those are counted here."""

    def read(metric: str, key: str) -> float | None:
        return export[metric][key] if metric in export else None

    n = sum(int(read(name, "avg") or 0) for name in ("request_count", "error_request_count"))
    failed = n - int(read("output_sequence_length", "count") or 0)
    return {name: read(*where) for name, where in _FIGURES.items()} | {"failed": failed, "requests": n}


def write_tokenizer(model: Path, folder: Path) -> Path:
    """Writes the model's byte-level vocabulary in the format of Hugging Face into `folder` and returns that."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(model).fields
    if fields["tokenizer.ggml.model"].contents() != "gpt2":
        raise UnusableServer(f"{model} has no byte-level vocabulary that could be written for AIPerf; give --tokenizer")
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder
