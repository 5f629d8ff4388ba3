"""A server whose model writes what a script says. HTTP, prompts, grammars, parsers and streams are the server's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from aiohttp import web

from cppbatch import LocalEngine
from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.models.synthetic import LlamaShape, copy_vocab, write_llama
from cppbatch.server.app import create_app
from tests.support.app_thread import AppThread
from tests.templates.round_trip import AsTheyAre, Said, completion

Json = dict[str, Any]
Move = list[tuple[str, Json]] | str
"""A message of the model: tools with their arguments, or text."""
THOUGHT = "The sum looks like a difference."
"""What the model thinks before each message, if its template has thoughts."""

N_CTX = 1 << 17
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


def write_model(path: Path, vocabulary: Path, template: str) -> Path:
    """A tiny random model with this GGUF file's vocabulary, the control tokens of the template, and a long context."""
    vocab = copy_vocab(vocabulary)
    unused = vocab.ids(gguf.TokenType.UNUSED)
    for i, (mark, kind) in enumerate(
        [(mark, gguf.TokenType.USER_DEFINED) for mark in _TAGS] + [(mark, gguf.TokenType.CONTROL) for mark in _HARMONY]
    ):
        if mark not in vocab.pieces:
            vocab.pieces[unused[i]], vocab.types[unused[i]] = mark, kind
    vocab.copied.pop("tokenizer.chat_template", None)
    shape = LlamaShape(n_layer=1, n_ctx_train=N_CTX)
    return write_llama(path, shape, vocab=vocab, chat_template=template)


@dataclass
class Request:
    """An answered request of an agent."""

    method: str
    path: str
    status: int

    @property
    def refused(self) -> bool:
        return self.status >= 400


@dataclass
class Turn:
    """A message that the model wrote."""

    tools: list[Json]
    n_prompt_tokens: int
    said: Move
    text: str
    n_written: int = 0
    """Tokens of the text that were generated."""
    n_tokens: int = 0


@dataclass
class Recording:
    """What one agent did."""

    moves: Sequence[Move]
    requests: list[Request] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Forced:
    """A logits processor that leaves one token possible at each step: the text's next one, then the end of text.

    A grammar that forbids it leaves none, so the request fails.
    """

    def __init__(self, tokens: list[int], n_prompt: int, turn: Turn) -> None:
        self._tokens, self._n_prompt, self._turn = tokens, n_prompt, turn

    def __call__(self, tokens: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> None:
        n = self._turn.n_written = len(tokens) - self._n_prompt
        row[:] = -np.inf
        row[self._tokens[n]] = 0


class ScriptedModel(AppThread):
    """A server of a tiny model that writes the moves of a script, in the format of its chat template."""

    def __init__(self, folder: Path, vocabulary: Path, template: str) -> None:
        self._form = ChatFormat(AsTheyAre(template, bos="", eos=""))
        self.recording = Recording([])
        model = write_model(folder / "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", vocabulary, template)
        settings = {"model": model, "n_parallel": 4, "n_threads": 2, "n_ctx": N_CTX, "kv_layout": "unified"}
        super().__init__(settings, self._make_app)

    def record(self, moves: Sequence[Move]) -> Recording:
        """From now on the model makes these moves."""
        self.recording = Recording(moves)
        return self.recording

    def _make_app(self, engine: LocalEngine) -> web.Application:
        app = create_app(engine)
        app.on_response_prepare.append(self._add_request)
        chat = engine.chat_formats.get()
        chat.render = self._scripted(chat.render)  # type: ignore[method-assign, assignment]
        return app

    async def _add_request(self, request: web.Request, response: web.StreamResponse) -> None:
        self.recording.requests.append(Request(request.method, request.path_qs, response.status))
        if response.status >= 400:
            body = response.body if isinstance(response, web.Response) else b""
            self.recording.errors.append(f"{request.method} {request.path_qs} {response.status} {body!r:.600}")

    def _scripted(self, render: Callable[[ChatTurn], PreparedChat]) -> Callable[[ChatTurn], PreparedChat]:
        def render_scripted(turn: ChatTurn) -> PreparedChat:
            prepared = render(turn)
            move = self._next(turn)
            text = self._written(move, turn.tools)
            prompt, written = self._ids(prepared.prompt), self._ids(text)
            its = Turn(turn.tools, len(prompt), move, text, n_tokens=len(written))
            self.recording.turns.append(its)
            prepared.params["logits_processor"] = Forced([*written, self._end], len(prompt), its)
            return prepared

        return render_scripted

    def _next(self, turn: ChatTurn) -> Move:
        """The move after those that the conversation has."""
        moves = self.recording.moves
        if not turn.tools and any(isinstance(move, list) for move in moves):
            return "Fix the sum"  # a title
        said = [message for message in turn.messages if message["role"] == "assistant"]
        done = sum(bool(message.get("tool_calls")) for message in said) if turn.tools else len(said)
        return moves[min(done, len(moves) - 1)]

    def _written(self, move: Move, tools: list[Json]) -> str:
        """The move as the model writes it."""
        whole = Said(text=move) if isinstance(move, str) else Said(tuple(move))
        first = replace(whole, calls=whole.calls[:1])  # all that some templates write in a message
        said = (replace(each, thought=thought) for each in (whole, first) for thought in (THOUGHT, ""))
        found = next(filter(None, (completion(self._form, each, tools) for each in said)), None)
        assert found, f"the template does not write {move}"
        return found[1].strip()

    def _ids(self, text: str) -> list[int]:
        engine = self.engine._engine
        assert engine
        pieces = engine.inputs.tokens(text, add_special=False, parse_special=True)
        return [piece.id for piece in pieces]

    @property
    def _end(self) -> int:
        (end,) = self._ids("<|im_end|>")
        return end
