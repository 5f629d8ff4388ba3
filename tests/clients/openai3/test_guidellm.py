"""guidellm measures the server: 16 streams, each request complete and its tokens counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.serving import KEY, MODEL, Serving

GUIDELLM = Path(sys.executable).with_name("guidellm")
N_REQUESTS = 32


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_request_of_a_benchmark_is_complete(path: str, server: Serving, tmp_path: Path) -> None:
    prompts = [json.dumps({"prompt": f"Name the capital of country {n}."}) for n in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": server.url,
        "model": MODEL,
        "api_key": KEY,
        "request_format": path,
        "max_tokens": 16,
    }
    before = server.wait_idle()
    done = subprocess.run(
        [
            GUIDELLM, "run", "--disable-console-interactive",
            "--backend", json.dumps(backend),
            "--profile", "kind=concurrent,streams=16",
            "--constraint", f"kind=max_requests,count={N_REQUESTS}",
            "--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
            "--output", f"kind=json,path={tmp_path / 'report.json'}",
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (N_REQUESTS, 0), benchmark["requests"]["errored"]
    finished = benchmark["requests"]["successful"]
    counted = sum(request["output_metrics"]["text_tokens"] for request in finished)
    made = server.wait_idle()["generated_tokens"] - before["generated_tokens"]
    assert made == counted
    assert benchmark["metrics"]["request_concurrency"]["successful"]["max"] == 16
