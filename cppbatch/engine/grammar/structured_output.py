"""Structured output: compiled grammars, token masks for all constrained rows of a step, forced tokens."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cppbatch.chat.lark_grammar import OF_TOOL, LazyGrammar
from cppbatch.config import available_threads
from cppbatch.engine.grammar.grammar_check import (
    QUICK_S,
    TOO_COMPLEX,
    CheckFailed,
    GrammarChecker,
    SlowGrammar,
    TooComplex,
)
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema import generation_schema
from cppbatch.generation_schema.keywords import inner_schemas, not_enforced
from cppbatch.json_schema import GUIDANCE, find, has_finite_instance

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


log = logging.getLogger(__name__)


Row = npt.NDArray[np.float32]


class GrammarCompiler:
    """Compiles a request's grammar (JSON schema, regex, choices, GBNF or Lark), outside the step loop. Thread-safe.

    An LRU cache keeps compiled grammars. `make_tokenizer` returns the vocabulary as an `LLTokenizer`, and raises
    `ValueError` with the reason if it cannot be used with grammars; called for the first grammar.
    """

    def __init__(self, make_tokenizer: Callable[[], Any]) -> None:
        self._make_tokenizer = make_tokenizer
        self._compiled: OrderedDict[tuple[str, str], LLMatcher | str] = OrderedDict()  # str: why it was refused
        self._slow: set[tuple[str, str]] = set()  # grammars that wait for `_patient`
        self._lock = threading.Lock()
        self._quick, self._patient = GrammarChecker(timeout_s=QUICK_S), GrammarChecker()

    def constraint(self, params: SamplingParams, *, patient: bool = True) -> Constraint | None:
        """A new constraint for a request; None: no grammar. Raises `InvalidRequest` for an invalid grammar, except a
        lazy one, which is then not enforced; unless `patient`, `SlowGrammar` after a second."""
        if (wanted := _grammar(params)) is None:
            return None
        lazy = None if params.is_constrained else params.lazy_grammar
        try:
            # Copies share the lexer states counted by LIMITS. When one exceeds them, the next request recompiles.
            matcher = self._matcher(*wanted, patient=patient).deep_copy()
        except InvalidRequest as error:
            if lazy is None:
                raise
            log.warning("tool calls will not be constrained to their schemas: %s", error.message)
            return None
        # With logprobs or a logits_processor, each token needs its own logits, so no token is forced.
        allow_forced = params.logprobs is None and params.logits_processor is None
        return Constraint(matcher, allow_forced=allow_forced, lazy=lazy, on_limit=lambda: self._forget(*wanted))

    def is_compiled(self, params: SamplingParams) -> bool:
        """Whether `constraint` returns immediately: the request has no grammar, or it is cached."""
        with self._lock:
            return (wanted := _grammar(params)) is None or wanted in self._compiled

    def _forget(self, field: str, text: str) -> None:
        with self._lock:
            self._compiled.pop((field, text), None)

    def _matcher(self, field: str, text: str, *, patient: bool) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.pop((field, text), None)
        if compiled is None:
            if not patient and (field, text) in self._slow:
                raise SlowGrammar
            try:
                compiled = self._compile(field, text, self._patient if patient else self._quick)
            except SlowGrammar:
                self._slow.add((field, text))
                raise
        with self._lock:
            self._slow.discard((field, text))
            self._compiled[field, text] = compiled
            if len(self._compiled) > 64:
                self._compiled.popitem(last=False)
        if isinstance(compiled, str):
            raise InvalidRequest(field, compiled)
        return compiled

    def _compile(self, field: str, text: str, checker: GrammarChecker) -> LLMatcher | str:
        """The grammar in its initial state, or the reason why it is refused."""
        if field == "json_schema":
            try:
                schema = json.loads(text)
                if not has_finite_instance(schema):
                    return "no finite JSON satisfies this schema: it is infinitely recursive"
                text = json.dumps(generation_schema(schema), ensure_ascii=False)
            except RecursionError:
                return "is nested too deeply"
        compiled = self._try(field, text, checker)
        if isinstance(compiled, str) and field == "json_schema" and not compiled.startswith(TOO_COMPLEX):
            place, _, reason = compiled.partition(": ") if compiled.startswith("#") else ("", "", compiled)
            is_known = place and find(schema, place) is not None  # in what the client sent
            return f"{place if is_known else self._place(schema, reason, checker)}: {reason}"
        if isinstance(compiled, str) and field == "grammar" and (opened := self._open_arguments(text, checker)) != text:
            compiled = self._try(field, opened, checker)
        return compiled

    def _place(self, schema: Any, reason: str, checker: GrammarChecker) -> str:
        """The keyword for which a schema does not compile, in the innermost part that does not."""
        if not isinstance(schema, dict):
            return "#"
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

        def compiles(part: dict[str, Any]) -> bool:
            alone = {**definitions, **part} if '"$ref"' in json.dumps(part) else part
            error = self._try("json_schema", json.dumps(generation_schema(alone)), checker)
            missing = _MISSING.search(error) if isinstance(error, str) else None
            return not isinstance(error, str) or (missing is not None and find(schema, f"#{missing[1]}") is not None)

        place, part, until = "#", schema, monotonic() + 2.0
        while True:
            for path, inner, _ in inner_schemas(part):
                is_definition = isinstance(inner, dict) and len(inner) == 1 and find(schema, inner.get("$ref"))
                if monotonic() < until and isinstance(inner, dict) and not is_definition and not compiles(inner):
                    place, part = f"{place}/{path}", inner
                    break
            else:
                break
        keywords = sorted(part, key=lambda name: (not reason.startswith(name), name == "type"))
        heals = (name for name in keywords if compiles({key: part[key] for key in part if key != name}))
        fails = (name for name in keywords if not compiles({name: part[name]}))
        return f"{place}/{next(itertools.chain(heals, fails, keywords))}"

    def _open_arguments(self, text: str, checker: GrammarChecker) -> str:
        """The grammar with any JSON for arguments of tools whose schemas do not compile (`OF_TOOL`)."""
        lines = text.split("\n")
        for i, line in enumerate(lines):
            if (found := _ARGUMENTS.fullmatch(line)) and isinstance(
                reason := self._try("json_schema", found["schema"], checker), str
            ):
                said = " ".join(reason.split())
                log.warning("tool %s: any arguments are allowed, as its schema cannot be used: %s", found["tool"], said)
                schema = json.loads(found["schema"])
                kept = {key: schema[key] for key in ("type", GUIDANCE) if key in schema}
                lines[i] = f"{found['rule']}{json.dumps(kept)}"
        return "\n".join(lines)

    def _try(self, field: str, text: str, checker: GrammarChecker) -> LLMatcher | str:
        try:
            definition = checker.definition(field, text)
            tokenizer = self._make_tokenizer()
        except TooComplex as error:
            if checker is self._quick:
                raise SlowGrammar from error
            return str(error)
        except CheckFailed as error:  # not cached: a second attempt may succeed
            raise InvalidRequest(field, str(error)) from error
        except ValueError as error:
            return _unknown_keyword(field, text, str(error)) or _short_reason(str(error))
        from llguidance import LLMatcher  # slow, and most engines never get a grammar

        from cppbatch.engine.grammar.grammar_child import LIMITS

        matcher = LLMatcher(tokenizer, definition, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # the first mask is slowest, so not in the step loop
        return _short_reason(matcher.get_error()) if matcher.is_error() else matcher

    def close(self) -> None:
        """Stops the child processes of the checkers."""
        self._quick.close()
        self._patient.close()
        self._compiled.clear()  # matchers reference the vocabulary


def _grammar(params: SamplingParams) -> tuple[str, str] | None:
    """The field that determines the grammar's type, and its text."""
    if field := params.grammar_field:
        value = getattr(params, field)
        return field, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return ("grammar", params.lazy_grammar.grammar) if params.lazy_grammar else None


_MISSING = re.compile(r"Pointer '(.*)' does not exist")
_ARGUMENTS = re.compile(rf"(?P<rule>rule_\d+: %json )(?P<schema>.*){re.escape(OF_TOOL)}(?P<tool>[\w-]+)")


def _unknown_keyword(field: str, text: str, error: str) -> str | None:
    """The keyword that the grammar engine does not know, and its place; None: the error is another one."""
    if "Unimplemented keys" not in error and "Unknown format" not in error:
        return None
    schemas = [text] if field == "json_schema" else re.findall(r"^rule_\d+: %json (.*)$", text, re.MULTILINE)
    decoder = json.JSONDecoder()
    return next((reason for each in schemas if (reason := not_enforced(decoder.raw_decode(each)[0]))), None)


def _short_reason(error: str) -> str:
    """llguidance's error message without its markers and its parser's state."""
    reason = re.split(r"<state>|<non-verbose/>|\n  while processing", error)[0].strip()
    if reason.startswith("NoExtension"):
        return "no text can match this"
    return (reason if len(reason) <= 500 else reason[:500] + " ...") or "llguidance gave no reason"


class Constraint:
    """The state of one sequence in its grammar. `on_limit` is called when the matcher exceeds its limits.

    `lazy`: text is free up to its marker, and again if the grammar cannot be followed.
    """

    def __init__(
        self, matcher: LLMatcher, *, allow_forced: bool, on_limit: Callable[[], None], lazy: LazyGrammar | None = None
    ) -> None:
        self.matcher = matcher
        self._allow_forced = allow_forced
        self._on_limit = on_limit
        self._lazy = lazy
        self.is_active = lazy is None
        """Whether it constrains the next token."""
        self._opening: list[int] = []
        self._in_thought = False
        self._wait()

    def _wait(self) -> None:
        """Matches the marker of a lazy grammar."""
        if self._lazy:
            forced, start = self.matcher.compute_ff_tokens(), self._lazy.start
            self._opening = forced[: forced.index(start) + 1] if start in forced else []
            self.is_active, self._in_thought = False, self._lazy.in_thought

    @property
    def is_lazy(self) -> bool:
        """Whether it can be abandoned."""
        return self._lazy is not None

    def accept(self, token: int) -> bool:
        """Advances by a sampled token. False if the grammar does not allow it; `error` then has the reason."""
        if self.is_active:
            return bool(self.matcher.consume_token(token)) or self.give_up()
        assert self._lazy
        if self._lazy.thought and token in self._lazy.thought:
            self._in_thought = token == self._lazy.thought[0]
        if token == self._lazy.start and self._opening and not self._in_thought:
            self.is_active = True
            return bool(self.matcher.consume_tokens(self._opening)) or self.give_up()
        return True

    def give_up(self) -> bool:
        """Abandons the grammar, so that the text is free from here on. Returns whether that is possible."""
        if self._lazy is None:
            return False
        self.is_active, self._opening = False, []
        return True

    @property
    def error(self) -> str | None:
        """Why no token can follow although the text is incomplete; None: one can follow, or the text is complete."""
        if not self.is_active:
            return None
        if self.matcher.is_error() or (self.matcher.is_stopped() and not self.matcher.is_accepting()):
            self._on_limit()
            if self.give_up():
                return None
            return f"the grammar cannot be followed further: {_short_reason(self.matcher.get_error())}"
        return None

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return bool(self.is_active and self.matcher.is_stopped() and self.matcher.is_accepting())

    def forced_tokens(self) -> list[int]:
        """The next tokens, as long as the grammar allows only one: they need no logits. Empty if none is forced."""
        return list(self.matcher.compute_ff_tokens()) if self._allow_forced and self.is_active else []

    def forced_text(self) -> str:
        """The forced continuation of the text, as long as the grammar leaves no choice. Complete characters only."""
        return bytes(self.matcher.compute_ff_bytes()).decode("utf-8", "ignore") if self.is_active else ""

    def rebuild(self, tokens: Iterable[int]) -> None:
        """Restarts at the beginning of the grammar and accepts these tokens."""
        self.matcher.reset()
        if self._lazy is None:
            self.matcher.consume_tokens(list(tokens))
            return
        self._wait()
        for token in tokens:
            self.accept(token)


class GrammarMasks:
    """Computes the grammar masks of a step's rows and applies them to the logits."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._words = (n_vocab + 31) // 32
        self._bits = np.zeros((0, self._words), np.int32)
        self._executor: LLExecutor | None = None

    def apply(self, constrained: list[tuple[Constraint, Row]]) -> list[str | None]:
        """Sets the logits of tokens that the grammars do not allow to -inf, in place, with one call for all masks.

        Returns an error message per row; None: no error.
        """
        n = len(constrained)
        if n > len(self._bits):
            self._bits = np.zeros((n, self._words), np.int32)
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(4, available_threads()))
        matchers = [(constraint.matcher, i) for i, (constraint, _) in enumerate(constrained)]
        self._executor.unsafe_compute_mask_ptr(matchers, self._bits.ctypes.data, self._words * 4, n)
        allowed = np.unpackbits(self._bits[:n].view(np.uint8), axis=1, count=self._n_vocab, bitorder="little")
        errors = [constraint.error for constraint, _ in constrained]
        for (constraint, row), is_allowed in zip(constrained, allowed, strict=True):
            if not constraint.is_active:
                continue
            if constraint.is_lazy and not np.isfinite(row[is_allowed == 1]).any():  # the request bans these tokens
                constraint.give_up()
                continue
            np.copyto(row, np.float32(-np.inf), where=is_allowed == 0)
        return errors
