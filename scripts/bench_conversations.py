#!/usr/bin/env python3
"""Conversations with a common system prompt, beside llama-server: prompt tokens that each server computes, and TTFT.

Each conversation sends its whole history at every turn, thinks for a while, and sends the next message. The models have
random weights: Llama's layers (plain), Gemma 3's with a sliding window (window), or LFM2's short convolutions beside
attention (hybrid).

    .venv/bin/python scripts/bench_conversations.py PEERS/llama-server [--kind plain,window,hybrid] [--layers 16]
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import gguf
from measuring import Comparison, Figures, script_arguments, words
from server_process import running_server, serve_command

from cppbatch.bench.load.client import LoadClient, RequestOutcome, TargetServer
from cppbatch.bench.load.workload import LoadRequest
from cppbatch.bench.report import Column
from cppbatch.config import available_threads
from cppbatch.models.synthetic import Weight, add_vocab, byte_vocab, matrix, norm, write_gguf

WORDS = [" the", " that", " this", " they", " and", " are", " was", " for", " you", " not", " with", " have", " from"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMIT_S = 3600
COLUMNS = [
    Column("prompt", "prompt tokens", 0), Column("computed", "computed", 0), Column("ttft_p50", "TTFT p50, s", 2),
    Column("ttft_p95", "TTFT p95, s", 2), Column("seconds", "seconds", 0),
]  # fmt: skip
WINDOW = 512  # as Gemma 3's 1B model
FULL_EVERY = 6  # layers, of which one has no window; of the hybrid model every third one is attention


@dataclass(frozen=True)
class Size:
    """Sizes of a model."""

    layers: int
    width: int

    @property
    def heads(self) -> int:
        """Of 64 numbers; a quarter of them has keys and values."""
        return self.width // 64


def write_model(path: Path, kind: str, size: Size) -> Path:
    """Writes a model with random weights in Q8_0 and a ChatML template."""
    n, heads, heads_kv, vocab = size.width, size.heads, max(1, size.heads // 4), byte_vocab()
    n_kv, n_ff = heads_kv * 64, 3 * size.width
    writer = gguf.GGUFWriter(path, {"plain": "llama", "window": "gemma3", "hybrid": "lfm2"}[kind])
    is_attention = [kind != "hybrid" or i % 3 == 2 for i in range(size.layers)]
    writer.add_context_length(8192)
    writer.add_embedding_length(n)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv([heads_kv * full for full in is_attention] if kind == "hybrid" else heads_kv)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab.pieces))
    add_vocab(writer, vocab)
    writer.add_chat_template(CHATML)
    if kind == "window":
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([(i + 1) % FULL_EVERY != 0 for i in range(size.layers)])
    if kind == "hybrid":
        writer.add_shortconv_l_cache(3)
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


@dataclass(frozen=True)
class Load:
    """What the clients do."""

    conversations: int
    turns: int
    system_words: int
    message_words: int
    new_tokens: int
    think_s: float


async def converse(client: LoadClient, load: Load, system: str, chance: random.Random) -> list[RequestOutcome]:
    """Holds one conversation."""
    messages, outcomes = [{"role": "system", "content": system}], []
    await asyncio.sleep(chance.random() * load.think_s)
    for _ in range(load.turns):
        messages.append({"role": "user", "content": text(chance, load.message_words)})
        outcome = await client.send(LoadRequest(messages.copy(), load.new_tokens), perf_counter())
        if outcome.failure:
            raise outcome.failure
        outcomes.append(outcome)
        messages.append({"role": "assistant", "content": outcome.text})
        await asyncio.sleep(chance.uniform(0.5, 1.5) * load.think_s)
    return outcomes


async def run_load(url: str, load: Load, seed: int) -> Figures:
    """Holds all conversations at the same time."""
    began, system = perf_counter(), text(random.Random(seed), load.system_words)
    async with LoadClient(TargetServer(label="server", url=url, model="", endpoint="chat"), LIMIT_S) as client:
        chances = [random.Random(f"{seed} {i}") for i in range(load.conversations)]
        of_each = await asyncio.gather(*(converse(client, load, system, chance) for chance in chances))
    outcomes = [outcome for conversation in of_each for outcome in conversation]
    n_prompt, n_cached = (
        sum(getattr(each, name) or 0 for each in outcomes) for name in ("prompt_tokens", "cached_tokens")
    )
    times = sorted(each.time_to_first_token for each in outcomes)
    return {
        "prompt": n_prompt, "computed": n_prompt - n_cached, "ttft_p50": times[len(times) // 2],
        "ttft_p95": times[int(0.95 * len(times))], "seconds": perf_counter() - began,
    }  # fmt: skip


def text(chance: random.Random, n_words: int) -> str:
    return "".join(chance.choice(WORDS) for _ in range(n_words))


def main() -> None:
    """Prints a table for each kind of model."""
    parser = script_arguments(__doc__)
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("--kind", type=words, default=["plain", "window", "hybrid"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    for name, default in (("conversations", 16), ("turns", 6), ("system-words", 600), ("message-words", 330)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--think", type=float, default=5.0, help="seconds between an answer and the next message")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.system_words, args.message_words, args.new_tokens, args.think)
    sizes = ["-np", "8", "-c", "32768", "-t", str(available_threads())]
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kind:
            model = write_model(Path(folder, f"{kind}.gguf"), kind, Size(args.layers, args.width))
            theirs = [args.llama_server, "-m", model, *sizes, "--jinja", "--no-ui", "--cache-ram", "8192"]
            commands = {"cppbatch": serve_command(model, *sizes), "llama-server": list(map(str, theirs))}

            def measure(name: str, turn: int) -> Figures:
                with running_server(commands[name]) as server:  # noqa: B023
                    return asyncio.run(run_load(server.url, load, turn))

            found = Comparison(commands).measure(args.repeats, measure)
            print(f"\n{kind}, {model.stat().st_size / 1e6:,.0f} MB: {load}\n")
            ratios = {"computed": "computed, ratio", "ttft_p50": "TTFT p50, ratio", "ttft_p95": "TTFT p95, ratio"}
            print(found.table(COLUMNS, ratios, base="llama-server"), flush=True)
            model.unlink()


if __name__ == "__main__":
    main()
