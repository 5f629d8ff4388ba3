"""A program that compiles grammars in a separate process, where a crash is harmless. Reads and writes lines of JSON.

In: `[field of SamplingParams, its text, its limit in CPU seconds]`. Out: `{}` when it is ready; then
`{"definition": ...}`, the grammar in llguidance's format, or `{"error": ...}`. The vocabulary is 256 bytes: a grammar
that explodes with it explodes with any vocabulary.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)

_ADVICE = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Its alternatives are not clearly exclusive; use anyOf",
)
_MAX_MEMORY = 2 << 30  # bytes
_TOKEN_IDS = re.compile(r"<\[\^?[\d,\- ]*\]>")
_WHITESPACE = r"( |\r?\n[ \t]{0,32})?"  # between parts of JSON: bounded, or a small model would never stop


class _Bytes:
    """A vocabulary of single bytes, in the form that llguidance's `TokenizerWrapper` expects."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Answers until stdin ends, at low CPU priority: a complex grammar uses a whole core for seconds."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    _limit_memory()
    tokenizer = bytes_tokenizer()
    print("{}", flush=True)
    for line in sys.stdin:
        field, text, cpu_s = json.loads(line)
        _limit_cpu_time(cpu_s)
        answer = check(tokenizer, field, text)
        _limit_cpu_time(0)
        print(json.dumps(answer), flush=True)


def bytes_tokenizer() -> LLTokenizer:
    """The tokenizer of a vocabulary of single bytes."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def check(tokenizer: LLTokenizer, field: str, text: str) -> dict[str, str]:
    """The answer to one line: `{"definition": ...}` or `{"error": ...}`."""
    try:
        return {"definition": _definition_of_valid(tokenizer, field, text)}
    except (ValueError, RecursionError) as error:
        return {"error": str(error).replace(*_ADVICE)}


def _limit_cpu_time(seconds: float) -> None:
    """Ends this process (SIGPROF) when it has computed for this long; 0 cancels."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _definition_of_valid(tokenizer: LLTokenizer, field: str, text: str) -> str:
    definition = _definition(field, text)
    # Token ids in a grammar refer to the model's vocabulary, and are checked later by the engine.
    portable = _TOKEN_IDS.sub("<[0]>", definition) if field == "grammar" else definition
    matcher = LLMatcher(tokenizer, portable, log_level=0, limits=LIMITS)
    # Some errors only appear when the first mask is computed.
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
        return grammar_from("grammar", _GBNF_ESCAPE.sub(_unescape, text) if "::=" in text else text)
    return grammar_from("regex" if field == "guided_regex" else "choice", text)


_GBNF_ESCAPE = re.compile(r"\\(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|[\s\S])")


def _unescape(found: re.Match[str]) -> str:
    """The character of a GBNF escape `\\u` or `\\U`, whose leading zeros llguidance would lose; in ASCII, where
    characters have a meaning, as `\\x`. Other escapes are unchanged."""
    digits = found["short"] or found["long"]
    code = int(digits, 16) if digits else -1
    if code < 0 or code > sys.maxunicode or 0xD800 <= code <= 0xDFFF:
        return found[0]
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))


if __name__ == "__main__":
    main()
