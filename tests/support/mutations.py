"""Valid requests made wrong in a random way, as bytes for a socket."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Json = dict[str, Any]

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

VALID: list[tuple[str, Json]] = [
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 4}),
    (COMPLETIONS, {"prompt": ["abc", "de"], "max_tokens": 3, "n": 2, "best_of": 3, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "stop": ["z"], "ignore_eos": True}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "stream_options": {}}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "logit_bias": {"5": 3.5, "ab": -10}, "suppress_tokens": [1, 2]}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "mirostat": 2, "mirostat_tau": 4.0, "seed": 3}),
    (
        COMPLETIONS,
        {
            "prompt": "abc", "max_tokens": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9,
            "top_n_sigma": 2, "xtc_probability": 0.5, "dynatemp_range": 0.5, "dry_multiplier": 0.8,
            "dry_sequence_breakers": ["x"], "repeat_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": -1,
            "samplers": ["top_k", "temperature"], "min_tokens": 2, "stop_token_ids": [3],
        },
    ),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "priority": 5, "timeout": 9, "cache_salt": "s"}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "guided_regex": "[a-z]{1,4}"}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "guided_choice": ["yes", "no"]}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "grammar": 'root ::= "a" [0-9]+'}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "json_schema": SCHEMA}),
    (CHAT, {"messages": [USER], "max_tokens": 4}),
    (CHAT, {"messages": [{"role": "system", "content": "be"}, USER], "max_completion_tokens": 4, "stream": True}),
    (CHAT, {"messages": [USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 3, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4}),
    (
        CHAT,
        {
            "messages": [USER], "max_tokens": 6,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    (MESSAGES, {"model": "tiny-llama", "messages": [USER], "max_tokens": 4, "system": "be", "stop_sequences": ["z"]}),
    (
        MESSAGES,
        {
            "model": "tiny-llama", "max_tokens": 4, "stream": True, "tools": [{"name": "f", "input_schema": SCHEMA}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]},
            ],
        },
    ),
    (RESPONSES, {"input": "abc", "max_output_tokens": 4, "instructions": "be", "top_logprobs": 2, "metadata": {}}),
    (
        RESPONSES,
        {
            "max_output_tokens": 4, "stream": True, "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "input": [
                USER,
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "b"},
            ],
        },
    ),
]  # fmt: skip

NUMBERS = [0, -1, 1, 2, 0.5, -0.0, 127, 129, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e-320]
TEXTS = [
    "", "x", "5", "\x00", "\x1b[2J\r\n", "\ud800", "a\udfffb", "\U0001f600", "\ufffe", "é日", "\u202e", "{{ 7 * 7 }}",
    "<|im_end|>", "<|im_start|>system", "x" * 3000, "y" * 50_000, "-" * 40, "999999", "0x10", "1e5", "text",
    "json_object", "json_schema",
]  # fmt: skip
NONSENSE = [
    "root ::= root", "root ::= ", "start: start", "start: /[/", "root ::= [", "%%", "(" * 200, "[a-z]{1,100000}",
    "(a|b)*c" * 50, "(?<=x)y", "\\", "a{5,2}", 'root ::= "' + "\x00" + '"', "start: \"a\" | %json {", "(?i)é+", "$^",
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"type": "nothing"}, {"$ref": "#"}, {"$ref": "http://nowhere/x"}, {"enum": []}, {"const": 1e999}, {"type": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"minLength": -1}, {"maxItems": 10**9, "type": "array"},
    {"pattern": "("}, {"properties": 5}, {"anyOf": [{}] * 200}, {"required": ["a"], "additionalProperties": False},
    {"type": "integer", "minimum": 5, "maximum": 4}, {"type": "number", "multipleOf": 0}, True, False, "{", 5,
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]  # fmt: skip
HEADERS = [
    "Content-Type: text/plain", "Content-Type: a/xml; charset=utf-16", "Content-Type: ;;;", "Content-Type:",
    "Content-Type: multipart/form-data", "Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Encoding: br",
    "Content-Encoding: nothing", "Accept: image/png", "Expect: 100-continue", "Expect: a miracle",
    "Authorization: Bearer \xff", "X-Request-Id: \x01", "Range: bytes=5-", "If-None-Match: *", "Upgrade: websocket",
    "Cookie: a=b; =;", "Origin: null", "Accept-Encoding: gzip", "Content-Length: 5", "Host: other",
]  # fmt: skip
PATHS = [
    "/", "//", "/v1", "/v1/completions/", "/v1/models/x", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/../../etc",
    "/stats?x=" + "y" * 2000, "/metrics?format=%zz", "/health?%", "/ready", "/openapi.json?a[]=b",
    "/v1/models?limit=-1",
    "/%2e%2e/", "/v1/chat/completions?stream=true", "*", "http://elsewhere/health", "/é".encode().decode("latin-1"),
]  # fmt: skip
METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "FROB", "get"]


class Mutant(NamedTuple):
    """A request to be sent. `whole`: no byte of it is missing, so that there must be an answer."""

    name: str
    data: bytes
    method: str
    whole: bool = True


def mutant(rng: random.Random) -> Mutant:
    """A request with one to three things wrong (or, by luck, none)."""
    path, fields = rng.choice(VALID)
    fields = json.loads(json.dumps(fields))
    names = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        change = rng.choice(OF_FIELDS)
        change(rng, fields)
        names.append(change.__name__)
    body = _dumped(rng, fields)
    if rng.random() < 0.3:
        change_bytes = rng.choice(OF_BYTES)
        body = change_bytes(rng, body)
        names.append(change_bytes.__name__)
    return _request(rng, path, body, names)


def _request(rng: random.Random, path: str, body: bytes, names: list[str]) -> Mutant:
    method, headers = "POST", ["Content-Type: application/json"]
    luck = rng.random()
    if luck < 0.05:
        method = rng.choice(METHODS)
    elif luck < 0.1:
        path = rng.choice(PATHS)
        method = rng.choice(["GET", "POST"])
    elif luck < 0.2:
        headers = [rng.choice(HEADERS)]
    names += [method, path[:40], *headers]
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    if rng.random() < 0.1:
        head.append("Transfer-Encoding: chunked")
        body = _chunked(rng, body)
        names.append("chunked")
    else:
        head.append(f"Content-Length: {len(body)}")
    data = "\r\n".join([*head, "", ""]).encode("latin-1") + body
    whole = rng.random() >= 0.02 and "Content-Length: 5" not in headers
    if not whole:
        data = data[: rng.randrange(len(data))]
        names.append("cut off")
    return Mutant(" | ".join(names), data, method, whole)


def _dumped(rng: random.Random, fields: Json) -> bytes:
    """As JSON; sometimes with lone surrogates as bytes, which is not valid UTF-8."""
    if rng.random() < 0.5:
        return json.dumps(fields).encode()
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _chunked(rng: random.Random, body: bytes) -> bytes:
    size = max(rng.choice([1, 7, 1000]), len(body) // 1000)
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def drop(rng: random.Random, fields: Json) -> None:
    fields.pop(rng.choice(list(fields)), None) if fields else None


def other_value(rng: random.Random, fields: Json) -> None:
    fields[_name(rng, fields)] = _value(rng)


def other_value_inside(rng: random.Random, fields: Json) -> None:
    inner = rng.choice([fields, *fields.values()])
    if isinstance(inner, dict):
        inner[rng.choice([*inner, "x"])] = _value(rng)
    elif isinstance(inner, list):
        inner.insert(rng.randrange(len(inner) + 1), _value(rng))


def number(rng: random.Random, fields: Json) -> None:
    fields[_name(rng, fields)] = rng.choice([*NUMBERS, float("nan"), float("inf"), float("-inf")])


def text(rng: random.Random, fields: Json) -> None:
    fields[rng.choice(["prompt", "stop", "cache_salt", "model", _name(rng, fields)])] = rng.choice(TEXTS)


def message(rng: random.Random, fields: Json) -> None:
    fields["messages"] = [{"role": rng.choice(["user", "tool", "king", ""]), "content": rng.choice([*TEXTS, None, []])}]


def grammar(rng: random.Random, fields: Json) -> None:
    name = rng.choice(["grammar", "guided_regex", "guided_choice"])
    fields[name] = [rng.choice(NONSENSE)] if name == "guided_choice" else rng.choice(NONSENSE)


def schema(rng: random.Random, fields: Json) -> None:
    wanted = rng.choice(SCHEMAS)
    if rng.random() < 0.5:
        fields["json_schema"] = wanted
    else:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted, "name": "x"}}


def token_ids(rng: random.Random, fields: Json) -> None:
    ids = [rng.choice([-1, 0, 5, 255, 258, 259, 300, 10**6, 2**31, 2**63, True, 1.5, "5"]) for _ in range(4)]
    fields[rng.choice(["prompt", "stop_token_ids", "suppress_tokens"])] = ids


def all_tokens_banned(rng: random.Random, fields: Json) -> None:
    fields[rng.choice(["suppress_tokens", "stop_token_ids"])] = list(range(rng.choice([257, 258, 259, 260, 300, 400])))


def biases(rng: random.Random, fields: Json) -> None:
    fields["logit_bias"] = {rng.choice([*TEXTS, "3"]): rng.choice([*NUMBERS, -100, 100, None]) for _ in range(3)}


def nested(rng: random.Random, fields: Json) -> None:
    value: Any = 1
    for _ in range(rng.choice([10, 200, 900])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    fields[rng.choice(["json_schema", "unknown", "tools", "prompt", _name(rng, fields)])] = value


def many(rng: random.Random, fields: Json) -> None:
    fields[rng.choice(["prompt", "stop", "messages", "guided_choice"])] = [rng.choice(["a", USER])] * 1500


def choices(rng: random.Random, fields: Json) -> None:
    fields |= {"n": rng.choice([0, 1, 3, 4, 5, 128]), "best_of": rng.choice([None, 1, 4, 200]), "stream": _value(rng)}


OF_FIELDS: list[Callable[[random.Random, Json], None]] = [
    drop, other_value, other_value, other_value_inside, number, number, text, message, grammar, schema, token_ids,
    all_tokens_banned, biases, nested, many, choices,
]  # fmt: skip


def _name(rng: random.Random, fields: Json) -> str:
    known = {name for _, valid in VALID for name in valid}
    return rng.choice(sorted(known) if rng.random() < 0.5 or not fields else list(fields))


def _value(rng: random.Random) -> Any:
    plain: list[Any] = [None, True, False, [], {}, [[]], {"a": 1}, [None], [1, "a"], {"": {}}, list(range(300))]
    return rng.choice([rng.choice(plain), rng.choice(NUMBERS), rng.choice(TEXTS)])


def cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def flipped(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice([1, 5])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def inserted(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body) + 1)
    piece = rng.choice(
        [b",", b"}", b'"', b"\x00", b"\xff", b"NaN", b"\xed\xa0\x80", b"1e999", b"\xef\xbb\xbf", b"//", b"-"]
    )
    return body[:at] + piece + body[at:]


def key_twice(rng: random.Random, body: bytes) -> bytes:
    again = rng.choice([b'"prompt": 5', b'"max_tokens": 2', b'"prompt": "b"', b'"messages": []', b'"stream": true'])
    return body[:-1] + b", " + again + b"}"


def deep_brackets(rng: random.Random, body: bytes) -> bytes:
    n = rng.choice([500, 5_000, 100_000])
    opened, closed = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")])
    return b'{"prompt": "x", "json_schema": ' + opened * n + b"1" + closed * n + b"}"


def random_bytes(rng: random.Random, body: bytes) -> bytes:
    return rng.randbytes(len(body))


def in_list(rng: random.Random, body: bytes) -> bytes:
    return rng.choice([b"[" + body + b"]", b"", b"null", b"5", body + body, b" " * 1000 + body])


OF_BYTES: list[Callable[[random.Random, bytes], bytes]] = [
    cut, flipped, inserted, key_twice, deep_brackets, random_bytes, in_list,
]  # fmt: skip
