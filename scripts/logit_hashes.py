#!/usr/bin/env python3
"""Under which conditions a sequence's logits are the same bit for bit: hashes of its rows of logits.

One sequence is watched: its prompt is computed in several ways, then eight fixed tokens are decoded among other
sequences, in each KV layout with and without flash attention. A cell of the table has two letters, for the rows of the
last prompt tokens of all --prompts and for their decode rows; equal letters in a column mean equal bits. Behind them is
the largest difference of a logit from the first line of the table.

Quantised weights round activations to 8 bits, which hides small differences until one flips a rounding: what is equal
for one prompt may differ for another. F32 weights hide nothing.

    .venv/bin/python scripts/logit_hashes.py -m model.gguf [--prompt-tokens 200,600] [--layouts per-sequence]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from measuring import markdown_table

from cppbatch.bench.prompts import random_prompt
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.runtime import load_model
from cppbatch.llama import Batch, Context, Model
from cppbatch.models.pull import choose_model

STEPS = 8
ROWS, SOURCE, FILLER = 20, 20, 21  # the most decode rows; seq_ids of a prefix's source and of another prompt
N_SEQ = 24
OTHER_TOKENS, PIECE_MOST = 16, 128

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """How the watched sequence is computed."""

    name: str
    rows: int = 16
    """Sequences that decode, with the watched one."""
    padded: int = 0
    """A decode has at least this many rows: spare seq_ids, each with one token, fill it."""
    row: int = 0
    """seq_id of the watched sequence and its place among the rows."""
    other_tokens: int = OTHER_TOKENS
    """Prompt length of the other sequences."""
    others_first: bool = False
    """The other prompts are computed first."""
    together: bool = False
    """The prompt is computed in one decode with a prompt of the same length."""
    piece: int = 0
    """Prompt tokens in one decode; 0: all."""
    beside_rows: bool = False
    """Each of these decodes has the decode rows of all other sequences too (the other prompts are computed first)."""
    filler: int = 0
    """Tokens of another prompt in each decode."""
    source: Literal["computed", "copied", "truncated", "restored"] = "computed"
    """copied, truncated: from a sequence with this prompt, or a longer one; restored: saved to host memory and back."""
    fresh: int = 1
    """Tokens at the end of the prompt that are computed after that."""


CASES = [
    Case("16 rows, prompt computed alone"),
    Case("4 rows", rows=4),
    Case("7 rows", rows=7),
    Case("1 row", rows=1),
    Case("1 row, padded to 16", rows=1, padded=16),
    Case("7 rows, padded to 16", rows=7, padded=16),
    Case("20 rows", rows=20),
    Case("20 rows, the last of them", rows=20, row=19),
    Case("4 rows, the others have longer prompts", rows=4, other_tokens=PIECE_MOST * 6),
    Case("the others' prompts computed first", others_first=True),
    Case("beside 32 tokens of a prompt in each decode", filler=32),
    Case("beside 128 tokens of a prompt in each decode", filler=PIECE_MOST),
    Case("prompt computed with another one", together=True),
    Case("prompt in pieces of 1", piece=1),
    Case("prompt in pieces of 7", piece=7),
    Case("prompt in pieces of 16", piece=16),
    Case("prompt in pieces of 64", piece=64),
    Case("prompt in pieces of 100", piece=100),
    Case("prompt in pieces of 128", piece=PIECE_MOST),
    Case("pieces of 16 beside decode rows", piece=16, beside_rows=True),
    Case("pieces of 64 beside decode rows", piece=64, beside_rows=True),
    Case("pieces of 16 beside rows of the seq_ids before", row=15, piece=16, beside_rows=True),
    Case("pieces of 64 beside rows of the seq_ids before", row=15, piece=64, beside_rows=True),
    Case("whole prompt beside decode rows", beside_rows=True),
    Case("all but 1 token copied from another sequence", source="copied"),
    Case("all but 1 token saved and restored", source="restored"),
    Case("all but 2 tokens copied from another sequence", source="copied", fresh=2),
    Case("all but 72 tokens copied from another sequence", source="copied", fresh=72),
    Case("all but 72 tokens copied from a longer sequence", source="truncated", fresh=72),
    Case("all but 72 tokens saved and restored", source="restored", fresh=72),
]


class Sequences:
    """The sequences of one case in an empty context."""

    def __init__(self, context: Context, case: Case, prompt_tokens: int, seed: int) -> None:
        self._context, self._case, self._seed = context, case, seed
        self._n_vocab = context.model.vocab.n_tokens
        self._batch = Batch(context.n_batch)
        self._others = [seq_id for seq_id in range(case.rows) if seq_id != case.row]
        self._lengths = dict.fromkeys(range(N_SEQ), 0)
        self._prompt = self._tokens("prompt", prompt_tokens)
        self._forced = self._tokens("forced", STEPS)

    def run(self) -> Logits:
        """Returns the rows of the last prompt token and of all decodes, float32[1 + STEPS, n_vocab]."""
        case, context = self._case, self._context
        if case.others_first or case.beside_rows:
            self._compute_others()
        rows = [self._compute_prompt()]
        if not (case.others_first or case.beside_rows):
            self._compute_others()
        rows += [self._decode_rows(int(token)) for token in self._forced]
        context.clear()
        return np.stack(rows)

    def _tokens(self, name: str, n: int) -> Tokens:
        return random_prompt(np.random.default_rng([self._seed, *name.encode()]), n, self._n_vocab)

    def _compute_others(self) -> None:
        for seq_id in self._others:
            self._batch.clear()
            self._add(self._tokens(f"other {seq_id}", self._case.other_tokens), seq_id)
            self._decode()

    def _compute_prompt(self) -> Logits:
        """Computes the watched prompt and returns the logits of its last token."""
        case, prompt = self._case, self._prompt
        if case.source == "computed":
            return self._compute(prompt, case.row, case.piece)
        n_shared = len(prompt) - case.fresh
        longer = self._tokens("longer", 100) if case.source == "truncated" else prompt[n_shared:]
        source = case.row if case.source == "restored" else SOURCE
        self._compute(np.concatenate([prompt[:n_shared], longer]), source, case.piece)
        if case.source == "restored":
            state = self._context.save_sequence(source)
            self._context.remove(source)
            self._context.restore_sequence(case.row, state)
        else:
            self._context.copy(SOURCE, case.row)
            self._context.remove(SOURCE)
        self._context.remove(case.row, n_shared)
        self._lengths[case.row] = n_shared
        return self._compute(prompt[n_shared:], case.row, 0)

    def _compute(self, tokens: Tokens, seq_id: int, piece: int) -> Logits:
        """Computes tokens in pieces and returns the logits of the last one."""
        piece = piece or len(tokens)
        for start in range(0, len(tokens), piece):
            self._batch.clear()
            if self._case.beside_rows:
                self._add_decode_rows(self._others)
            at = self._add(tokens[start : start + piece], seq_id)
            if self._case.together:
                self._add(self._tokens("second", len(tokens)), SOURCE)
            self._decode()
        return self._logits(at)

    def _decode_rows(self, token: int) -> Logits:
        """Decodes `token` in the watched sequence and one token in each other one. Returns its row of logits."""
        case = self._case
        padding = range(case.rows, max(case.rows, case.padded))
        self._batch.clear()
        self._add_decode_rows([*range(case.rows), *padding], {case.row: token})
        if case.filler:
            self._add(self._tokens(f"filler {self._lengths[FILLER]}", case.filler), FILLER)
        self._decode()
        for seq_id in padding:
            self._context.remove(seq_id)
            self._lengths[seq_id] = 0
        return self._logits(case.row)

    def _add_decode_rows(self, seq_ids: list[int], forced: dict[int, int] | None = None) -> None:
        tokens = [(forced or {}).get(seq_id, 20 + seq_id) for seq_id in seq_ids]
        self._batch.add_rows(tokens, [self._lengths[seq_id] for seq_id in seq_ids], seq_ids)
        for seq_id in seq_ids:
            self._lengths[seq_id] += 1

    def _add(self, tokens: Tokens, seq_id: int) -> int:
        """Appends tokens with logits for the last one. Returns the place of its row."""
        self._batch.add_run(tokens, self._lengths[seq_id], seq_id, n_logits=1)
        self._lengths[seq_id] += len(tokens)
        return self._batch.n_outputs - 1

    def _decode(self) -> None:
        self._context.decode(self._batch)

    def _logits(self, row: int) -> Logits:
        logits: Logits = self._context.logits(self._batch.n_outputs)[row].copy()
        return logits


def letters(values: list[bytes]) -> list[str]:
    """Names equal values by equal letters, A for the first one."""
    names: dict[bytes, str] = {}
    return [names.setdefault(value, chr(ord("A") + len(names))) for value in values]


def column(context: Context, cases: list[Case], prompt_tokens: int, n_prompts: int) -> list[str]:
    """Returns the cell of each case."""
    firsts: list[Logits] = []
    prompt_hashes, decode_hashes, differences = [], [], []
    for case in cases:
        rows = [Sequences(context, case, prompt_tokens, seed).run() for seed in range(n_prompts)]
        firsts = firsts or rows
        prompt_hashes.append(hash_of([row[:1] for row in rows]))
        decode_hashes.append(hash_of([row[1:] for row in rows]))
        differences.append(max(float(np.abs(a - b).max()) for a, b in zip(rows, firsts, strict=True)))
    names = zip(letters(prompt_hashes), letters(decode_hashes), strict=True)
    return [
        f"{prompt}{decode}" + (f" {difference:.2g}" if difference else "")
        for (prompt, decode), difference in zip(names, differences, strict=True)
    ]


def hash_of(rows: list[Logits]) -> bytes:
    return hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest()


def contexts(model: Model, args: argparse.Namespace, prompt_tokens: int) -> Iterator[tuple[str, Context]]:
    """Yields a context for each layout, with and without flash attention."""
    longest = max(prompt_tokens, PIECE_MOST * 6) + 2 * STEPS + prompt_tokens
    for layout, flash_attn in itertools.product(args.layouts, args.flash_attns):
        with Context(
            model,
            n_ctx=N_SEQ * longest,
            n_ubatch=args.n_ubatch,
            n_seq_max=N_SEQ,
            n_threads=args.threads,
            flash_attn=flash_attn,
            kv_unified=layout == "unified",
            type_k=args.cache_type,
            type_v=args.cache_type,
        ) as context:
            yield f"{layout}, FA {flash_attn}", context


def main() -> None:
    """Prints a table for each length of the prompt."""
    args = _arguments()
    file = choose_model(args.model)
    cases = [case for case in CASES if args.cases in case.name or case is CASES[0]]
    with load_model(EngineConfig(model_path=str(file))) as model:
        for prompt_tokens in args.prompt_tokens:
            columns = {
                name: column(context, cases, prompt_tokens, args.prompts)
                for name, context in contexts(model, args, prompt_tokens)
            }
            print(f"{file.stem}, {args.prompts} prompts of {prompt_tokens} tokens, -ub {args.n_ubatch}:\n")
            body = [[case.name, *cells] for case, *cells in zip(cases, *columns.values(), strict=True)]
            print(markdown_table(["", *columns], body), end="\n\n", flush=True)


def _arguments() -> argparse.Namespace:
    def words(given: str) -> list[str]:
        return given.split(",")

    def numbers(given: str) -> list[int]:
        return list(map(int, words(given)))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    parser.add_argument("--prompt-tokens", type=numbers, default=[200, 600], metavar="N,N...")
    parser.add_argument("--prompts", type=int, default=2, help="prompts for each case (2)")
    parser.add_argument("--layouts", type=words, default=["per-sequence", "unified"], metavar="NAME,NAME")
    parser.add_argument("--flash-attns", type=words, default=["on", "off"], metavar="on,off")
    parser.add_argument("--cases", default="", help="only the first case and those with a name that contains this")
    parser.add_argument("--cache-type", default="f16", help="of keys and values (f16)")
    parser.add_argument("-ub", "--n-ubatch", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=available_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
