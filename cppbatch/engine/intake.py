"""From a request to a sequence: tokenised, and refused if it can never run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as AnySequence
from time import perf_counter

import numpy as np
import numpy.typing as npt

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.runtime import ModelInfo, Tokens
from cppbatch.engine.sequence import Sequence
from cppbatch.errors import InvalidRequest

Prompt = str | list[int]

_SEEDS = 2**32 - 1  # llama.cpp takes the seed 2**32 - 1 for "random"


class Intake:
    """Where requests are checked; behind it nobody checks again. Thread-safe."""

    def __init__(self, vocab: Tokens, kv: KVPool, info: ModelInfo) -> None:
        self._vocab = vocab
        self._info = info
        self._n_ctx = kv.n_ctx

    def prepare(self, request: GenerationRequest) -> Sequence:
        """Tokenises and validates. Raises `InvalidRequest` naming the field."""
        prompt = self._tokens(request.prompt)
        limit, n = self._info.max_sequence, len(prompt)
        if n >= limit:
            raise InvalidRequest("prompt", f"has {n} tokens, and {self._limit_text()} for prompt and answer")
        wanted = request.params.max_tokens
        if wanted is not None and n + wanted > limit:
            message = f"is {wanted}: with a prompt of {n} tokens that is {n + wanted}, and {self._limit_text()}"
            raise InvalidRequest("max_tokens", message)
        self._check_ids("stop_token_ids", request.params.stop_token_ids)
        return Sequence(
            request,
            prompt,
            max_new=wanted or limit - n,
            seed=_seed(request.params.seed),
            now=perf_counter(),
        )

    def _limit_text(self) -> str:
        limit = self._info.max_sequence
        if limit == self._info.n_ctx_train:
            return f"this model takes {limit}"
        shared = "raise -c" if limit == self._n_ctx else "raise -c or lower -np"
        return f"this context holds {limit} ({shared} for more)"

    def _tokens(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        if isinstance(prompt, str):
            tokens = self._vocab.tokenize(prompt) if prompt else np.empty(0, np.int32)
        elif isinstance(prompt, list):
            self._check_ids("prompt", prompt)
            tokens = np.array(prompt, np.int32)
        else:
            raise InvalidRequest("prompt", f"is {prompt!r}; it must be a string or a list of token ids")
        if len(tokens) == 0:  # some vocabularies make nothing of some texts
            raise InvalidRequest("prompt", f"is empty ({prompt!r} has no tokens); give at least one")
        return tokens

    def _check_ids(self, field: str, tokens: AnySequence[int]) -> None:
        for i, token in enumerate(tokens):
            is_id = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
            if not is_id or not 0 <= token < self._vocab.n_tokens:
                raise InvalidRequest(f"{field}[{i}]", f"is {token!r}; token ids are 0 to {self._vocab.n_tokens - 1}")


def _seed(wanted: int | None) -> int:
    return secrets.randbelow(_SEEDS) if wanted is None or wanted == -1 else wanted % _SEEDS
