#!/usr/bin/env python3
"""What a draft head in the model's file (MTP) gains at a known acceptance, beside llama-server's draft-mtp.

The model has random weights and layers that change nothing: the next token is a function of the last one, and the text
cycles through all tokens. The head computes the same function, except for the share of tokens that it is to miss. So
speed and acceptance are those of a real model of this size, and the text is known.

    .venv/bin/python scripts/bench_draft_head.py PEERS/llama-server [--acceptance 60,80,100] [-B 1,4,16] [--turns 3]

A shared machine changes by a tenth from turn to turn. Engines that step alternately show the gain more exactly:

    .venv/bin/python scripts/bench_draft_head.py --models FOLDER --acceptance 80
    .venv/bin/python scripts/bench_steps_in_turns.py --cycle -m FOLDER/head-80.gguf -B 4 off=. mtp='.:{"spec": "mtp"}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import numpy as np
from gguf.quants import quantize
from measuring import Comparison, Figures, markdown_table, numbers, script_arguments
from server_process import running_servers

from cppbatch.bench.report import Column
from cppbatch.config import available_threads
from cppbatch.models.synthetic import LlamaShape, Weight, byte_vocab, matrix, norm, start_gguf, write_gguf

FIRST = 8  # the first token of the round; those before it mean something to the tokenizer
N_ROUND = 512  # tokens of the round, and those before it
HEAD_SIZE = 64


def write_model(path: Path, args: argparse.Namespace, acceptance: float) -> Path:
    """Writes a Hunyuan 3 model (hy_v3) with dense layers and a head. `acceptance`: from 0 to 1. What determines the
    text and the drafts is Q8_0; tokens after the round are never generated."""
    n, n_kv, n_ff, vocab = args.width, args.width // 4, 4 * args.width, byte_vocab(args.vocab)
    shape = LlamaShape(
        n_layer=args.layers + 1, n_embd=n, n_head=n // HEAD_SIZE, n_head_kv=n_kv // HEAD_SIZE, n_ff=n_ff,
        n_ctx_train=8192,
    )  # fmt: skip
    writer = start_gguf(path, "hy_v3", shape, vocab)
    writer.add_nextn_predict_layers(1)
    writer.add_expert_feed_forward_length(n_ff)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(HEAD_SIZE)
    tables = [Weight(f"{name}.weight", (args.vocab, n), kind="Q8_0") for name in ("token_embd", "output")]
    weights: list[Weight] = [*tables, norm("output_norm", n)]
    for i in range(args.layers + 1):
        blk = f"blk.{i}"
        weights += [norm(f"{blk}.{name}_norm", n) for name in ("attn", "ffn")]
        weights += [norm(f"{blk}.attn_{x}_norm", HEAD_SIZE) for x in "qk"]
        weights += [matrix(f"{blk}.attn_q", n, n), matrix(f"{blk}.attn_k", n_kv, n), matrix(f"{blk}.attn_v", n_kv, n)]
        weights += [Weight(f"{blk}.attn_output.weight", (n, n)), Weight(f"{blk}.ffn_down.weight", (n, n_ff))]
        weights += [matrix(f"{blk}.ffn_{x}", n_ff, n) for x in ("gate", "up")]
    nextn = f"blk.{args.layers}.nextn"
    weights += [norm(f"{nextn}.{name}", n) for name in ("enorm", "hnorm", "shared_head_norm")]
    weights.append(Weight(f"{nextn}.eh_proj.weight", (n, 2 * n), kind="Q8_0"))
    written = write_gguf(path, writer, weights, quant=args.quant)
    embeddings, output, head = _tables(n, acceptance)
    arrays = {"token_embd.weight": embeddings, "output.weight": output, f"{nextn}.eh_proj.weight": head}
    for tensor in gguf.GGUFReader(written, "r+").tensors:
        if (array := arrays.get(tensor.name)) is not None:
            tensor.data[: len(array)] = quantize(array.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    return written


def _tables(n: int, acceptance: float) -> tuple[Any, Any, Any]:
    """Orthogonal embeddings, an output matrix with each token's embedding as the row of its next token, and the
    matrix of the head, which maps the embedding of a token that it misses to another one."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.standard_normal((n, N_ROUND)))[0].T  # float64[N_ROUND, n], orthonormal
    order = np.arange(FIRST, N_ROUND)
    output = np.zeros((N_ROUND, n))
    output[np.roll(order, -1)] = 20 * directions[order]
    missed = rng.permutation(order)[: round((1 - acceptance) * len(order))]
    others = np.roll(missed, 1) if len(missed) > 1 else missed
    head = np.eye(n) + (directions[others] - directions[missed]).T @ directions[missed]
    return directions * n**0.5, output, np.concatenate([head, np.zeros((n, n))], axis=1)


async def answer(session: aiohttp.ClientSession, url: str, start: int, n_new: int) -> dict[str, Any]:
    """The answer to a prompt of 32 tokens of the round. Raises `AssertionError` for another text than the model's."""
    round_ = [*range(FIRST, N_ROUND)] * 3
    prompt = round_[start : start + 32]
    body = {
        "prompt": prompt, "n_predict": n_new, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
        "return_tokens": True,
    }  # fmt: skip
    async with session.post(f"{url}/completion", json=body) as response:
        response.raise_for_status()
        found: dict[str, Any] = await response.json()
    expected = round_[start + 32 :][:n_new]
    assert found["tokens"] == expected, f"{found['tokens'][:8]} instead of {expected[:8]}"
    return found


async def tokens_per_second(url: str, at_once: int, n_requests: int, n_new: int, seed: int) -> float:
    """Measures `n_requests` answers, `at_once` of them at a time."""
    starts = random.Random(f"{seed} {at_once}").sample(range(N_ROUND - FIRST), n_requests)
    timeout, headers = aiohttp.ClientTimeout(total=1800), {"Connection": "close"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:

        async def client() -> None:
            while starts:
                await answer(session, url, starts.pop(), n_new)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        return n_requests * n_new / (time.perf_counter() - began)


def main() -> None:
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("llama_server", type=Path, nargs="?", help="without it, only writes the models")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="keep the models there")
    parser.add_argument("--acceptance", type=numbers, default=[60, 80, 100], help="percent of the tokens")
    parser.add_argument("-B", dest="at_once", type=numbers, default=[1, 4, 16])
    parser.add_argument("--layers", type=int, default=16, help="(as Llama 3.2 1B)")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=N_ROUND, help="tokens")
    parser.add_argument("--quant", choices=["Q8_0", "Q4_0", "F16"], default="Q8_0", help="type of the matrices")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=2, help="of each client in each turn")
    args = parser.parse_args()
    if not (args.llama_server or args.models):
        parser.error("name the program llama-server, or --models FOLDER, or both")
    if args.models:
        args.models.mkdir(parents=True, exist_ok=True)
    for acceptance in args.acceptance:
        with contextlib.nullcontext(args.models) if args.models else tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder, f"head-{acceptance}.gguf"), args, acceptance / 100)
            print(f"\nacceptance {acceptance}%, {model.stat().st_size / 1e6:,.0f} MB\n", flush=True)
            if args.llama_server:
                print(markdown_table(TITLES, [row(args, model, n) for n in args.at_once]), flush=True)


TITLES = [
    "B", "cppbatch off", "mtp", "llama-server off", "draft-mtp", "mtp / off", "draft-mtp / off", "ours / its best",
]  # fmt: skip


def row(args: argparse.Namespace, model: Path, at_once: int) -> list[str]:
    """Returns a row of the table: medians of the turns, in each of which all four servers run one after the other."""
    sizes = ["-m", str(model), "-np", str(at_once), "-c", str(512 * at_once), "-t", str(available_threads())]
    ours = [sys.executable, "-m", "cppbatch", "serve", *sizes, "--spec"]
    theirs = [str(args.llama_server), *sizes, "--no-ui", "--cache-ram", "0", "--spec-type"]
    commands = {"off": [*ours, "off"], "mtp": [*ours, "mtp"], "none": [*theirs, "none"]}
    commands["draft-mtp"] = [*theirs, "draft-mtp"]
    with running_servers(commands) as servers:

        def measure(name: str, turn: int) -> Figures:
            load = at_once, args.answers * at_once, args.new_tokens, turn
            return {"speed": asyncio.run(tokens_per_second(servers[name].url, *load))}

        found = Comparison(commands).measure(args.turns, measure, uncounted=1)  # it learns what drafts gain
    best = max(("none", "draft-mtp"), key=lambda name: found.median(name, "speed") or 0.0)
    pairs = [("mtp", "off"), ("draft-mtp", "none"), ("mtp", best)]
    return found.side_by_side([Column("speed", str(at_once))], pairs)[0]


if __name__ == "__main__":
    main()
