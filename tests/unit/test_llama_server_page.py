"""docs/llama-server.md has the tables of llama-server's tests, and names flags that exist."""

from __future__ import annotations

from pathlib import Path

from tests.llama_server import placement
from tests.llama_server.known import KnownFile, page_tables, read_known, surprises_of_cppbatch
from tests.llama_server.ring import Outcome
from tests.support import tiny_models

PAGE = (Path(__file__).parents[2] / "docs" / "llama-server.md").read_text()


def test_the_page_has_the_ratios_and_the_exceptions() -> None:
    assert page_tables(read_known()) in PAGE


def test_a_run_reports_unknown_failures_and_exceptions_that_pass() -> None:
    known = KnownFile(not_here={"elsewhere": "a text"}, exceptions={"ever": "no such thing", "one[b]": "not so"})
    outcomes = {
        "elsewhere[a]": Outcome("failed", "E"),
        "ever[1]": Outcome("failed", "E"),
        "ever[2]": Outcome("passed", ""),
        "one[a]": Outcome("failed", "E assert 1 == 2"),
        "one[b]": Outcome("failed", "E"),
        "left out": Outcome("skipped", ""),
    }
    assert list(surprises_of_cppbatch(known, outcomes)) == [
        "ever[2]: passes now: it is no longer an exception",
        "one[a]: fails: E assert 1 == 2",
    ]


def test_the_page_has_the_number_of_compared_command_lines() -> None:
    n_different = sum(bool(line.different) for line in placement.LINES)
    assert f"with {len(placement.LINES)} command lines" in PAGE
    assert f"{len(placement.LINES) - n_different} put the same tensors and cells on the same devices" in PAGE


def test_the_comparison_of_placements_names_what_is_elsewhere(tmp_path: Path) -> None:
    model = tiny_models.experts(tmp_path / "experts.gguf", n_layers=1)
    log = [
        f"llama_model_loader: loaded meta data with 20 key-value pairs and 13 tensors from {model} (version GGUF V3)",
        "load_tensors: layer   0 assigned to device RPC0, is_swa = 0",
        "load_tensors: layer   1 assigned to device RPC1, is_swa = 0",
        *(f"create_tensor: loading tensor {name}.weight" for name in ("token_embd", "output", "blk.0.attn_qkv")),
        "create_tensor: loading tensor blk.0.ffn_up_exps.weight",
        "tensor blk.0.ffn_up_exps.weight (0 MiB f32) buffer type overridden to CPU",
        "load_tensors: RPC0[127.0.0.1:1] model buffer size =     1.07 MiB",
        "llama_kv_cache: layer   0: dev = RPC0",
    ]
    there = placement.read_placements(log)
    assert there["experts"].tensors == {
        "token_embd.weight": "CPU", "output.weight": "RPC1", "blk.0.ffn_up_exps.weight": "CPU",
    }  # fmt: skip
    assert list(placement.differences(there, placement.read_placements([*log[:1], *log]))) == []
    here = placement.read_placements([line.replace("RPC0", "CPU").replace("to CPU", "to RPC0") for line in log])
    assert list(placement.differences(there, here)) == [
        "experts, tensors blk.0.ffn_up_exps.weight: CPU in llama-server, RPC0 here",
        "experts, cells 0: RPC0 in llama-server, CPU here",
        "experts, mib CPU[127.0.0.1:1]: None in llama-server, 1.07 here",
        "experts, mib RPC0[127.0.0.1:1]: 1.07 in llama-server, None here",
    ]
    assert list(placement.differences(there, {})) == ["llama-server: experts: 2 CPU, 1 RPC1"]
