"""The server process apart from requests: signals, loading progress, the lines printed when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from cppbatch.chat.template import NO_TEMPLATE
from cppbatch.config import EngineConfig
from cppbatch.engine.model_info import ModelInfo

IMMEDIATE_EXIT_CODE = 130
"""The exit code of a process ended by a second signal."""


def set_on_signals(stop: asyncio.Event) -> None:
    """Sets the event on SIGINT, SIGTERM or SIGHUP. A second SIGINT or SIGTERM ends the process.

    Closing a terminal sends SIGHUP, often twice. Where SIGHUP is ignored (nohup), it stays ignored.
    """
    loop = asyncio.get_running_loop()

    def received() -> None:
        if stop.is_set():
            os._exit(IMMEDIATE_EXIT_CODE)  # at once, even while other threads are busy
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, received)
        except NotImplementedError:  # Windows
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(received))
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)


# --- show loading ----------------------------------------------------------------------------------------------------
# The progress of loading a model, and how it is shown.


ShowLoading = Callable[[Callable[[], float]], contextlib.AbstractContextManager[None]]
"""Shows the progress until the context ends. Its argument returns the loaded fraction, 0.0 to 1.0."""


def hide_loading(_fraction: Callable[[], float]) -> contextlib.AbstractContextManager[None]:
    """Shows nothing."""
    return contextlib.nullcontext()


# --- announcement ----------------------------------------------------------------------------------------------------
# The lines that `cppbatch serve` prints when it is ready.


_QUESTION = "Why is the sky blue?"


def first_lines(
    info: ModelInfo, config: EngineConfig, urls: Sequence[str], *, has_template: bool, has_keys: bool, has_page: bool
) -> list[str]:
    """The model, its KV cells and the reason for their number, what it lacks, the URLs, and an example request for it.

    `has_template`: whether there is a chat template. `has_keys`: whether requests need an API key.
    `has_page`: whether the web page is served.
    """
    reason = explain_n_ctx(info, config)
    path, body = _example(info, has_template=has_template)
    key = ' -H "Authorization: Bearer $CPPBATCH_API_KEY"' if has_keys else ""
    return [
        f"loaded {info.name} ({info.description}): {_at_once(info, config.n_parallel)}",
        *([reason] if reason else []),
        *([info.not_repacked] if info.not_repacked else []),
        *([] if has_template or info.pooling else [NO_TEMPLATE]),
        ready_line(urls, has_page=has_page),
        f"try:  curl {urls[0]}{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]


def ready_line(urls: Sequence[str], *, has_page: bool) -> str:
    """Where the server is, and how it ends."""
    page = "open it in a browser for the web page; " if has_page else ""
    return f"ready at {' and '.join(urls)}  ({page}OpenAI-compatible API under {urls[0]}/v1; Ctrl-C stops it)"


def explain_n_ctx(info: ModelInfo, config: EngineConfig) -> str | None:
    """Why the number of KV cells differs from -c; None: it does not."""
    if info.n_ctx == config.n_ctx:
        return None
    if info.pooling and info.n_ctx < config.n_ctx:
        why = f"each text is computed in a single step of at most {info.n_ctx} tokens, limited by -b {config.n_batch}"
    elif info.kv_layout == "per-sequence":
        each = info.n_ctx // config.n_parallel
        why = f"llama.cpp rounds the cells of each of {config.n_parallel} sequences up to {each}, a multiple of 256"
    else:
        why = "llama.cpp rounds it up to a multiple of 256"
    return f"-c {config.n_ctx} was changed to {info.n_ctx}: {why}"


def _at_once(info: ModelInfo, n: int) -> str:
    """How much the engine computes at once; then llama.cpp's words for it."""
    sequences = f"{n} sequences" if n > 1 else "1 sequence"
    if info.pooling:
        texts = f"{n} texts at once" if n > 1 else "1 text at a time"
        kind = "a reranker" if info.pooling == "rank" else f"vectors, pooling {info.pooling}"
        return f"{texts} ({sequences}, {info.n_ctx:,} tokens per step, {kind})"
    layout = "per-sequence or unified, depending on load" if info.kv_layout == "auto" else info.kv_layout
    answers = f"{n} answers at once" if n > 1 else "1 answer at a time"
    return f"{answers} ({sequences}, {info.n_ctx:,} KV cells, {layout})"


def _example(info: ModelInfo, *, has_template: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of an example request for this kind of model."""
    if info.pooling == "rank":
        return "/v1/rerank", {"query": _QUESTION, "documents": ["Air scatters blue light.", "Bread needs yeast."]}
    if info.pooling == "none":
        return "/embeddings", {"input": _QUESTION}
    if info.pooling:
        return "/v1/embeddings", {"input": _QUESTION}
    if not has_template:
        return "/v1/completions", {"prompt": "The sky is blue because", "max_tokens": 64}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 64}
