"""Rewrites a Lark grammar of a text for the text as the content of a JSON string."""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as sre_parser
else:
    import sre_constants as sre
    import sre_parse as sre_parser

MAX_GRAMMAR = 128 << 10
"""Characters of a grammar or a schema, which take about a second to compile."""


INPUT = "input"
"""The argument of a custom tool: its text."""
LARK = "x-lark"
"""The keyword of a string's JSON schema for the Lark grammar of its text."""

_SPECIAL = [*map(chr, range(32)), '"', "\\", "\x7f"]
"""Characters that are escaped in JSON strings, and DEL, which llguidance does not allow in strings."""
_SAFE = r'[^"\\\x00-\x1f\x7f]'

_ITEM = re.compile(
    r"""
    (?P<comment> (?://|\#)[^\n]* )
  | (?P<range> "(?:[^"\\\n]|\\.)+" \s*\.\.\s* "(?:[^"\\\n]|\\.)+" )
  | (?P<string> "(?:[^"\\\n]|\\.)*" i? )
  | (?P<regex> /(?:[^/\\\n]|\\.)+/ [imsux]* )
  | (?P<common> %import\s+common\.(?P<name>\w+) (?:\s*->\s*(?P<alias>\w+))? )
  | (?P<refused> %(?!ignore\b)\w+ | @\w+ | <[^>\n]*> )
  | (?P<unclosed> ["/<] )
    """,
    re.VERBOSE,
)
_COMMON = {
    "DIGIT": "/[0-9]/",
    "HEXDIGIT": "/[a-fA-F0-9]/",
    "INT": "/[0-9]+/",
    "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "FLOAT": r"/[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_FLOAT": r"/[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)/",
    "NUMBER": r"/[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?)/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "LCASE_LETTER": "/[a-z]/",
    "UCASE_LETTER": "/[A-Z]/",
    "LETTER": "/[A-Za-z]/",
    "WORD": "/[A-Za-z]+/",
    "CNAME": "/[_A-Za-z][_A-Za-z0-9]*/",
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
}
"""Terminals of Lark's library `common`."""


def input_grammar(schema: dict[str, Any]) -> str | None:
    """The Lark grammar of the text, if this is the schema for a custom tool with a grammar."""
    properties = schema.get("properties")
    described = properties.get(INPUT) if isinstance(properties, dict) else None
    source = described.get(LARK) if isinstance(described, dict) else None
    return source if isinstance(source, str) else None


class UnsupportedGrammar(ValueError):
    """The grammar contains something that cannot be rewritten, named in the message."""


def escape_lark(source: str) -> str:
    """The grammar whose texts are those of `source`, each as the content of a JSON string. Raises `UnsupportedGrammar`.

    Only strings and regular expressions change, because all else consists of them.
    """
    if len(source) > MAX_GRAMMAR:
        raise UnsupportedGrammar(f"has {len(source):,} characters; the limit is {MAX_GRAMMAR:,}")
    return _ITEM.sub(_rewrite, source)


def _rewrite(found: re.Match[str]) -> str:
    item, kind = found[0], found.lastgroup
    if found["comment"] is not None:
        return ""
    if found["range"] is not None:
        first, last = re.findall(r'"(?:[^"\\\n]|\\.)+"', item)
        return _escape_regex(f"[{re.escape(_text(first))}-{re.escape(_text(last))}]")
    if found["string"] is not None:
        text = _text(item.removesuffix("i"))
        return _escape_regex(f"(?i:{re.escape(text)})") if item.endswith("i") else json.dumps(_escape(text))
    if found["regex"] is not None:
        end = item.rindex("/")
        flags, regex = item[end + 1 :], item[1:end].replace("\\/", "/")
        return _escape_regex(f"(?{flags}:{regex})" if flags else regex)
    if found["common"] is not None:
        if found["name"] not in _COMMON:
            raise UnsupportedGrammar(f"imports common.{found['name']}, which is unknown; define it")
        return f"{found['alias'] or found['name']}: {_escape_regex(_COMMON[found['name']][1:-1])}"
    if found["unclosed"] is not None:  # also so that the rest is not searched for its end again and again
        rest = found.string[found.start() :].partition("\n")[0]
        raise UnsupportedGrammar(f"contains {rest!r:.80}, which is not closed by {'>' if item == '<' else item}")
    raise UnsupportedGrammar(f"contains {item!r:.80}, which is not supported ({kind})")


def _text(string: str) -> str:
    """The value of a string of the grammar, with its quotes."""
    try:
        return str(json.loads(string))
    except ValueError:
        raise UnsupportedGrammar(
            f"contains the string {string:.80}, which has escapes that are not valid in JSON"
        ) from None


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escape_regex(regex: str) -> str:
    """The terminal for the escaped texts of a regular expression."""
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):  # of the parser; not those of objects freed meanwhile
                warnings.simplefilter("error", category)
            parsed = sre_parser.parse(regex)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise UnsupportedGrammar(f"contains /{regex:.80}/, which is not a valid regular expression: {error}") from None
    try:
        written = _sequence(parsed, parsed.state.flags)
    except RecursionError:
        raise UnsupportedGrammar(f"contains /{regex:.80}/, which is nested too deeply") from None
    return "/" + written.replace("/", r"\/") + "/"


def _sequence(parsed: Any, flags: int) -> str:
    return "".join(_node(op, argument, flags) for op, argument in parsed)


def _node(op: Any, argument: Any, flags: int) -> str:
    """One node of Python's syntax tree of a regular expression, rewritten."""
    if op is sre.LITERAL and not flags & re.IGNORECASE:
        return re.escape(_escape(chr(argument)))
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        return _characters(op, argument, flags)
    if op is sre.BRANCH:
        return f"(?:{'|'.join(_sequence(each, flags) for each in argument[1])})"
    if op is sre.SUBPATTERN:
        _, added, removed, parsed = argument
        return f"(?:{_sequence(parsed, (flags | added) & ~removed)})"
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, parsed = argument
        upper, lazy = "" if most is sre.MAXREPEAT else most, "?" if op is sre.MIN_REPEAT else ""
        return f"(?:{_sequence(parsed, flags)}){{{least},{upper}}}{lazy}"
    raise UnsupportedGrammar(f"contains a regular expression with {op}, which is not supported in a grammar")


def _characters(op: Any, argument: Any, flags: int) -> str:
    """A set of characters: unescaped ones as a class, the others as their escapes."""
    if op is sre.ANY:
        source = r"[\s\S]" if flags & re.DOTALL else r"[^\n]"
    elif op is sre.IN:
        source = f"[{''.join(_member(*each) for each in argument)}]"
    else:
        source = f"[{'^' if op is sre.NOT_LITERAL else ''}{_class_character(argument)}]"
    return _escapable(source, flags & re.IGNORECASE)


@functools.lru_cache(1024)
def _escapable(source: str, flags: int) -> str:
    """One of these characters, possibly as its escape. `source`: a class; `flags`: `re.IGNORECASE` or 0."""
    matcher = re.compile(source, flags)
    escapes = [re.escape(_escape(character)) for character in _SPECIAL[:-1] if matcher.fullmatch(character)]
    ignore_case = "(?i)" if flags else ""
    return f"(?:{'|'.join([f'{ignore_case}[{source}&&{_SAFE}]', *escapes])})"


def _member(op: Any, argument: Any) -> str:
    """A member of a class, written as Python and Rust read it."""
    if op is sre.NEGATE:
        return "^"
    if op is sre.LITERAL:
        return _class_character(argument)
    if op is sre.RANGE:
        return f"{_class_character(argument[0])}-{_class_character(argument[1])}"
    if op is sre.CATEGORY and argument in _CATEGORIES:
        return _CATEGORIES[argument]
    raise UnsupportedGrammar(f"contains a character class with {op}, which is not supported")


def _class_character(code: int) -> str:
    character = chr(code)
    if character.isalnum() or code > 127:
        return character
    return rf"\x{code:02x}"


_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
