"""Structured output: grammars compiled off the step loop, masks for all constrained rows at once, forced tokens."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from cppbatch.config import available_threads
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sampling.grammar_check import CheckFailed, GrammarChecker
from cppbatch.engine.sampling.grammar_child import LIMITS
from cppbatch.engine.sampling.json_schema_check import has_finite_instance
from cppbatch.errors import InvalidRequest

_MOST_KEPT = 64  # compiled grammars
_THREADS = 4

Row = npt.NDArray[np.float32]


class GrammarCompiler:
    """Compiles what `SamplingParams` say of the text's form. Thread-safe; keeps those used last.

    `make_tokenizer` gives the vocabulary as an `LLTokenizer`; it is called when the first grammar comes.
    """

    def __init__(self, make_tokenizer: Callable[[], Any]) -> None:
        self._make_tokenizer = make_tokenizer
        self._known: OrderedDict[tuple[str, str], LLMatcher | str] = OrderedDict()  # or why it was refused
        self._lock = threading.Lock()
        self._checker = GrammarChecker()

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """A request's constraint, None if it has none. Raises `InvalidRequest` with the reason for a bad grammar."""
        field = params.grammar_field
        if field is None:
            return None
        text = _text(params, field)
        # Each forced token would need logits of its own where somebody looks at them.
        forces = params.logprobs is None and params.logits_processor is None
        # Copies share the states that their limits count: once those are reached, the next request gets new ones.
        matcher = self._matcher(field, text).deep_copy()
        return Constraint(matcher, forces=forces, given_up=lambda: self._forget(field, text))

    def knows(self, params: SamplingParams) -> bool:
        """Whether `constraint` takes no time: there is no grammar, or it is one of those used last."""
        field = params.grammar_field
        if field is None:
            return True
        with self._lock:
            return (field, _text(params, field)) in self._known

    def _forget(self, field: str, text: str) -> None:
        with self._lock:
            self._known.pop((field, text), None)

    def _matcher(self, field: str, text: str) -> LLMatcher:
        with self._lock:
            known = self._known.pop((field, text), None)
        if known is None:
            known = self._compile(field, text)
        with self._lock:
            self._known[field, text] = known
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        if isinstance(known, str):
            raise InvalidRequest(field, known)
        return known

    def _compile(self, field: str, text: str) -> LLMatcher | str:
        """The grammar at its beginning, or why it is refused."""
        try:
            if field == "json_schema" and not has_finite_instance(json.loads(text)):
                return "no finite JSON satisfies this schema: it requires itself within itself"
            definition = self._checker.definition(field, text)
        except RecursionError:
            return "is nested too deeply"
        except CheckFailed as error:  # not remembered: another time it may go well
            raise InvalidRequest(field, str(error)) from error
        except ValueError as error:
            return _first_lines(str(error))
        matcher = LLMatcher(self._make_tokenizer(), definition, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # the first one takes the longest
        return _first_lines(matcher.get_error()) if matcher.is_error() else matcher

    def close(self) -> None:
        """Ends the process that tries grammars out."""
        self._checker.close()
        self._known.clear()  # they point into the vocabulary


def _text(params: SamplingParams, field: str) -> str:
    value = getattr(params, field)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first_lines(error: str) -> str:
    """llguidance's reason without its marks and the state of its parser."""
    reason = re.split(r"<state>|<non-verbose/>", error)[0].strip()
    if reason.startswith("NoExtension"):
        return "no text can match this"
    return (reason if len(reason) <= 500 else reason[:500] + " ...") or "llguidance gives no reason"


class Constraint:
    """One sequence's place in its grammar. `given_up` is called when its limits are reached."""

    def __init__(self, matcher: LLMatcher, *, forces: bool, given_up: Callable[[], None]) -> None:
        self.matcher = matcher
        self._forces = forces
        self._given_up = given_up

    def accept(self, token: int) -> bool:
        """Goes on by a token that was taken. False when that cannot be, and `error` says why."""
        return bool(self.matcher.consume_token(token))

    @property
    def error(self) -> str | None:
        """Why nothing can follow although the text is not complete, if that is so."""
        if self.matcher.is_error() or (self.matcher.is_stopped() and not self.matcher.is_accepting()):
            self._given_up()
            return f"the grammar cannot be followed further: {_first_lines(self.matcher.get_error())}"
        return None

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self.matcher.is_stopped() and self.matcher.is_accepting())

    def forced(self) -> list[int]:
        """Tokens that are the only ones that can follow, so that nothing has to be computed to know them."""
        return list(self.matcher.compute_ff_tokens()) if self._forces else []

    def rebuild(self, tokens: Iterable[int]) -> None:
        """Starts over and accepts these tokens."""
        self.matcher.reset()
        self.matcher.consume_tokens(list(tokens))


class Masks:
    """Forbids what the grammars of a step's rows do not allow."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._words = (n_vocab + 31) // 32
        self._bits = np.zeros((0, self._words), np.int32)
        self._executor: LLExecutor | None = None

    def apply(self, constrained: list[tuple[Constraint, Row]]) -> list[str | None]:
        """Sets the logits of tokens that may not come to -inf, in place; the masks are computed in one call.

        What went wrong with each, if anything did.
        """
        n = len(constrained)
        if n > len(self._bits):
            self._bits = np.zeros((n, self._words), np.int32)
        if self._executor is None:
            self._executor = LLExecutor(min(_THREADS, available_threads()))
        matchers = [(constraint.matcher, i) for i, (constraint, _) in enumerate(constrained)]
        self._executor.unsafe_compute_mask_ptr(matchers, self._bits.ctypes.data, self._words * 4, n)
        allowed = np.unpackbits(self._bits[:n].view(np.uint8), axis=1, count=self._n_vocab, bitorder="little")
        for (_, row), may_come in zip(constrained, allowed, strict=True):
            np.copyto(row, np.float32(-np.inf), where=may_come == 0)
        return [constraint.error for constraint, _ in constrained]
