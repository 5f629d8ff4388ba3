#!/usr/bin/env python3
"""Conversations with a common system prompt, beside llama-server: prompt tokens that each server computes, and TTFT.

Each conversation sends its whole history at every turn, thinks for a while, and sends the next message. The models have
random weights: Llama's layers (plain), Gemma 3's with a sliding window (window), or LFM2's short convolutions beside
attention (hybrid).

    .venv/bin/python scripts/bench_conversations.py PEERS/llama-server [--kind plain,window,hybrid] [--layers 16]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from measuring import Comparison, Figures, script_arguments, words
from server_process import load_client, running_server, serve_command

from cppbatch.bench.load.client import LoadClient, RequestOutcome
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.report import Column
from cppbatch.config import available_threads
from cppbatch.models.synthetic import LlamaShape, Weight, byte_vocab, matrix, norm, start_gguf, write_gguf

WORDS = [" the", " that", " this", " they", " and", " are", " was", " for", " you", " not", " with", " have", " from"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLUMNS = [
    Column("prompt", "prompt tokens", 0), Column("computed", "computed", 0), Column("ttft_p50", "TTFT p50, s", 2),
    Column("ttft_p95", "TTFT p95, s", 2), Column("seconds", "seconds", 0),
]  # fmt: skip
WINDOW = 512  # as Gemma 3's 1B model
FULL_EVERY = 6  # layers, of which one has no window; of the hybrid model every third one is attention


def write_model(path: Path, kind: str, n_layers: int, n: int) -> Path:
    """Writes a model with random weights in Q8_0 and a ChatML template. `n`: its width; heads have 64 numbers, and a
    quarter of them keys and values."""
    heads, n_ff, vocab = n // 64, 3 * n, byte_vocab()
    heads_kv = max(1, heads // 4)
    n_kv, is_attention = heads_kv * 64, [kind != "hybrid" or i % 3 == 2 for i in range(n_layers)]
    shape = LlamaShape(
        n_layer=n_layers, n_embd=n, n_head=heads, n_head_kv=heads_kv, n_ff=n_ff, n_ctx_train=8192
    )  # fmt: skip
    writer = start_gguf(path, {"plain": "llama", "window": "gemma3", "hybrid": "lfm2"}[kind], shape, vocab)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_chat_template(CHATML)
    if kind == "window":
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([(i + 1) % FULL_EVERY != 0 for i in range(n_layers)])
    if kind == "hybrid":
        writer.add_shortconv_l_cache(3)
        writer.add_head_count_kv([heads_kv * full for full in is_attention])
    weights = [matrix("token_embd", len(vocab.pieces), n, 0.5)]
    for i, full in enumerate(is_attention):
        blk = f"blk.{i}"
        weights += [norm(f"{blk}.attn_norm", n), norm(f"{blk}.ffn_norm", n)]
        weights += [matrix(f"{blk}.ffn_{x}", n_ff, n) for x in ("gate", "up")] + [matrix(f"{blk}.ffn_down", n, n_ff)]
        if full:
            weights += [matrix(f"{blk}.attn_q", heads * 64, n), matrix(f"{blk}.attn_output", n, heads * 64)]
            weights += [matrix(f"{blk}.attn_{x}", n_kv, n) for x in "kv"]
        else:
            weights += [Weight(f"{blk}.shortconv.conv.weight", (n, 3), std=0.5)]
            weights += [matrix(f"{blk}.shortconv.in_proj", 3 * n, n), matrix(f"{blk}.shortconv.out_proj", n, n)]
        if full and kind != "plain":
            weights += [norm(f"{blk}.attn_{x}_norm", 64) for x in "qk"]
        if kind == "window":
            weights += [norm(f"{blk}.{x}", n) for x in ("post_attention_norm", "post_ffw_norm")]
    weights += [norm("token_embd_norm" if kind == "hybrid" else "output_norm", n)]
    weights += [matrix("output", len(vocab.pieces), n, 4.0)]
    return write_gguf(path, writer, weights, quant="Q8_0")


async def converse(
    client: LoadClient, load: argparse.Namespace, system: str, chance: random.Random
) -> list[RequestOutcome]:
    """Holds one conversation."""
    messages, outcomes = [{"role": "system", "content": system}], []
    await asyncio.sleep(chance.random() * load.think)
    for _ in range(load.turns):
        messages.append({"role": "user", "content": text(chance, load.message_words)})
        outcome = await client.send(LoadRequest(messages.copy(), load.new_tokens), perf_counter())
        if outcome.failure:
            raise outcome.failure
        outcomes.append(outcome)
        messages.append({"role": "assistant", "content": outcome.text})
        await asyncio.sleep(chance.uniform(0.5, 1.5) * load.think)
    return outcomes


async def run_load(url: str, load: argparse.Namespace, seed: int) -> Figures:
    """Holds all conversations at the same time."""
    began, system = perf_counter(), text(random.Random(seed), load.system_words)
    async with load_client(url, "chat") as client:
        chances = [random.Random(f"{seed} {i}") for i in range(load.conversations)]
        of_each = await asyncio.gather(*(converse(client, load, system, chance) for chance in chances))
    outcomes = [outcome for conversation in of_each for outcome in conversation]
    n_prompt, n_cached = (
        sum(getattr(each, name) or 0 for each in outcomes) for name in ("prompt_tokens", "cached_tokens")
    )
    p50, p95 = np.percentile([each.time_to_first_token for each in outcomes], (50, 95)).tolist()
    return {
        "prompt": n_prompt, "computed": n_prompt - n_cached, "ttft_p50": p50, "ttft_p95": p95,
        "seconds": perf_counter() - began,
    }  # fmt: skip


def text(chance: random.Random, n_words: int) -> str:
    return "".join(chance.choice(WORDS) for _ in range(n_words))


def main() -> None:
    """Prints a table for each kind of model."""
    parser = script_arguments(__doc__)
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("--kind", type=words, default=["plain", "window", "hybrid"])
    sizes = {"conversations": 16, "turns": 6, "system-words": 600, "message-words": 330, "new-tokens": 64}
    sizes |= {"layers": 16, "width": 2048, "repeats": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--think", type=float, default=5.0, help="seconds between an answer and the next message")
    args = parser.parse_args()
    common = ["-np", "8", "-c", "32768", "-t", str(available_threads())]
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kind:
            model = write_model(Path(folder, f"{kind}.gguf"), kind, args.layers, args.width)
            theirs = [args.llama_server, "-m", model, *common, "--jinja", "--no-ui", "--cache-ram", "8192"]
            commands = {"cppbatch": serve_command(model, *common), "llama-server": list(map(str, theirs))}

            def measure(name: str, turn: int) -> Figures:
                with running_server(commands[name]) as server:  # noqa: B023
                    return asyncio.run(run_load(server.url, args, turn))

            found = Comparison(commands).measure(args.repeats, measure)
            print(f"\n{kind}, {model.stat().st_size / 1e6:,.0f} MB; {args.conversations} x {args.turns} messages\n")
            ratios = {"computed": "computed, ratio", "ttft_p50": "TTFT p50, ratio", "ttft_p95": "TTFT p95, ratio"}
            print(found.table(COLUMNS, ratios, base="llama-server"), flush=True)
            model.unlink()


if __name__ == "__main__":
    main()
