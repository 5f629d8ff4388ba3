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
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import gguf

from cppbatch.bench.report import markdown_table
from cppbatch.config import available_threads
from cppbatch.models.synthetic import Weight, add_vocab, byte_vocab, matrix, norm, write_gguf
from cppbatch.sizing.child_process import running_server

WORDS = [" the", " that", " this", " they", " and", " are", " was", " for", " you", " not", " with", " have", " from"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


@dataclass
class Result:
    """One server under the load."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def p(self, share: float) -> float:
        """A percentile of the times to the first token."""
        times = sorted(self.ttft)
        return times[min(len(times) - 1, int(share * len(times)))]


@dataclass(frozen=True)
class Clients:
    """The clients of one server."""

    session: aiohttp.ClientSession
    url: str
    load: Load
    result: Result

    async def converse(self, system: str, chance: random.Random) -> None:
        """One conversation."""
        load, messages = self.load, [{"role": "system", "content": system}]
        await asyncio.sleep(chance.random() * load.think_s)
        for _ in range(load.turns):
            messages.append({"role": "user", "content": text(chance, load.message_words)})
            messages.append({"role": "assistant", "content": await self.answer(messages)})
            await asyncio.sleep(chance.uniform(0.5, 1.5) * load.think_s)

    async def answer(self, messages: list[dict[str, str]]) -> str:
        """The text of an answer; its figures go into the result."""
        body = {
            "messages": messages, "max_tokens": self.load.new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_prompt": True,
        }  # fmt: skip
        began, parts, first = time.perf_counter(), [], 0.0
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    self.result.prompt_tokens += usage["prompt_tokens"]
                    self.result.computed_tokens += usage["prompt_tokens"] - cached
                for content in (choice["delta"].get("content") for choice in chunk["choices"]):
                    if content:
                        first = first or time.perf_counter()
                        parts.append(content)
        self.result.ttft.append((first or time.perf_counter()) - began)
        return "".join(parts)


async def run_load(url: str, load: Load, seed: int) -> Result:
    """Runs all conversations at the same time."""
    result, began = Result(), time.perf_counter()
    system = text(random.Random(seed), load.system_words)
    headers = {"Connection": "close"}  # llama-server's HTTP library closes kept-alive connections now and then
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600), headers=headers) as session:
        clients = Clients(session, url, load, result)
        chances = [random.Random(f"{seed} {i}") for i in range(load.conversations)]
        await asyncio.gather(*(clients.converse(system, chance) for chance in chances))
    result.seconds = time.perf_counter() - began
    return result


def text(chance: random.Random, n_words: int) -> str:
    return "".join(chance.choice(WORDS) for _ in range(n_words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("--kind", default="plain,window,hybrid")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-words", type=int, default=600)
    parser.add_argument("--message-words", type=int, default=330)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--think", type=float, default=5.0, help="seconds between an answer and the next message")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.system_words, args.message_words, args.new_tokens, args.think)
    threads = str(available_threads())
    sizes = ["-np", "8", "-c", "32768", "-t", threads]
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kind.split(","):
            model = write_model(Path(folder, f"{kind}.gguf"), kind, Size(args.layers, args.width))
            servers: dict[str, list[str | Path]] = {
                "cppbatch": [sys.executable, "-m", "cppbatch", "serve", "-m", model, *sizes],
                "llama-server": [args.llama_server, "-m", model, *sizes, "--jinja", "--no-ui", "--cache-ram", "8192"],
            }
            measure(f"{kind}, {model.stat().st_size / 1e6:,.0f} MB", servers, load, args.repeats)
            model.unlink()


def measure(title: str, servers: dict[str, list[str | Path]], load: Load, repeats: int) -> None:
    results: dict[str, list[Result]] = {name: [] for name in servers}
    for seed in range(repeats):
        for name in list(servers)[:: -1 if seed % 2 else 1]:
            with running_server(servers[name]) as server:
                results[name].append(asyncio.run(run_load(server.url, load, seed)))

    def figure(name: str, of: Callable[[Result], float]) -> float:
        return median(map(of, results[name]))

    rows = [
        (
            name,
            f"{figure(name, lambda r: r.prompt_tokens):,.0f}",
            f"{figure(name, lambda r: r.computed_tokens):,.0f}",
            f"{figure(name, lambda r: r.p(0.5)):.2f}",
            f"{figure(name, lambda r: r.p(0.95)):.2f}",
            f"{figure(name, lambda r: r.seconds):.0f}",
        )
        for name in servers
    ]
    print(f"\n{title}: {load}\n")
    print(markdown_table(["server", "prompt tokens", "computed", "TTFT p50, s", "TTFT p95, s", "seconds"], rows))
    ours, theirs = servers
    for what, of in (("computed", lambda r: r.computed_tokens), ("TTFT p95", lambda r: r.p(0.95))):
        print(f"{what}: {figure(ours, of) / figure(theirs, of):.2f} of {theirs}'s", flush=True)


if __name__ == "__main__":
    main()
