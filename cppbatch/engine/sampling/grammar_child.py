"""Run as a program: tries grammars out where they can do no harm. A JSON line in, a JSON line out.

In: the field of `SamplingParams` and its text. Out: `{"definition": ...}`, the grammar as llguidance wants it, or
`{"error": ...}`. The vocabulary is 256 bytes: what explodes with those would with any.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose names mean other things elsewhere

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)

_ADVICE = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Its alternatives are not clearly exclusive; use anyOf",
)
_LONGEST_S = 12  # a little more than the parent waits
_MOST_MEMORY = 2 << 30  # bytes
_TOKEN_IDS = re.compile(r"<\[[\d,\- ]*\]>")
_WHITESPACE = r"( |\r?\n[ \t]{0,32})?"  # between JSON's parts: a weak model would never stop adding more


class _Bytes:
    """A vocabulary of single bytes, as llguidance's `TokenizerWrapper` wants it."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Answers until its input ends, at a low CPU priority: a hard grammar takes all of a core for seconds."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    _limit_memory()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    for line in sys.stdin:
        _end_after(_LONGEST_S)
        try:
            answer = {"definition": _checked(tokenizer, *json.loads(line))}
        except (ValueError, RecursionError) as error:
            answer = {"error": str(error).replace(*_ADVICE)}
        _end_after(0)
        print(json.dumps(answer), flush=True)


def _end_after(seconds: int) -> None:
    """Ends this process by then, as nobody else might: its parent may be gone. 0: never mind."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(seconds)


def _checked(tokenizer: LLTokenizer, field: str, text: str) -> str:
    definition = _definition(field, text)
    # Tokens named by their ids are not those of this vocabulary; which there are is found out later.
    tried = _TOKEN_IDS.sub("<[0]>", definition) if field == "grammar" else definition
    matcher = LLMatcher(tokenizer, tried, log_level=0, limits=LIMITS)
    # Some mistakes only show when the first token is asked for.
    if matcher.is_error() or (not any(matcher.compute_bitmask()) and not matcher.is_accepting()):
        raise ValueError(matcher.get_error() or "no text can satisfy this")
    return definition


def _definition(field: str, text: str) -> str:
    if field == "json_schema":
        if text == "false":
            raise ValueError("no JSON satisfies the schema false")
        text = "{}" if text == "true" else text
        definition: str = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
        return definition
    if field == "grammar":
        return grammar_from("grammar", text)
    return grammar_from("regex" if field == "guided_regex" else "choice", text)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))


if __name__ == "__main__":
    main()
