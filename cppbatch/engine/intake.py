"""From a request to a sequence: tokenised, and refused if it can never run."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt

from cppbatch.engine.adapters import adapter_set
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import actual_seed
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.sampling.grammar import GrammarCompiler
from cppbatch.engine.sampling.recipe import check_ids, make_recipe
from cppbatch.engine.sequence import Sequence
from cppbatch.engine.vocabulary import Tokens
from cppbatch.errors import InvalidRequest

Prompt = str | list[int]


class Intake:
    """Where requests are checked; behind it nobody checks again. Thread-safe."""

    def __init__(self, vocab: Tokens, n_ctx: int, info: ModelInfo) -> None:
        self._vocab = vocab
        self._info = info
        self._n_ctx = n_ctx
        self._grammars = GrammarCompiler(vocab.for_grammars)

    def prepare(self, request: GenerationRequest) -> Sequence:
        """Tokenises, validates, compiles a grammar. Raises `InvalidRequest` naming the field."""
        arrived_at = perf_counter()
        prompt = self._tokens(request.prompt)
        limit, n = self._info.max_sequence, len(prompt)
        if n >= limit:
            raise InvalidRequest("prompt", f"has {n} tokens, and {self._limit_text()} for prompt and answer")
        wanted = request.params.max_tokens
        if wanted is not None and n + wanted > limit:
            message = f"is {wanted}: with a prompt of {n} tokens that is {n + wanted}, and {self._limit_text()}"
            raise InvalidRequest("max_tokens", message)
        adapters = adapter_set(request.lora, self._info.adapters)
        recipe = make_recipe(request.params, self._vocab, limit)
        constraint = self._grammars.constraint(request.params)
        max_new = limit - n if wanted is None else wanted
        seed = actual_seed(request.params.seed)
        sequence = Sequence(request, prompt, max_new=max_new, seed=seed, now=arrived_at, adapters=adapters)
        sequence.recipe, sequence.constraint = recipe, constraint
        return sequence

    def close(self) -> None:
        """Ends what it has started."""
        self._grammars.close()

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
            check_ids("prompt", prompt, self._vocab.n_tokens)
            tokens = np.array(prompt, np.int32)
        else:
            raise InvalidRequest("prompt", f"is {prompt!r}; it must be a string or a list of token ids")
        if len(tokens) == 0:  # some vocabularies make nothing of some texts
            raise InvalidRequest("prompt", f"is empty ({prompt!r} has no tokens); give at least one")
        return tokens
