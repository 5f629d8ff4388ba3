"""Splits a job's input into chunks, and orders the requests of a chunk for throughput."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine
from cppbatch.models.attention_times import RequestSizes

_PREFIX_CHARS = 256
"""Requests are grouped if their prompts share a prefix of this many characters."""
_CHARS_PER_TOKEN = 4
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""The prompt fields of all endpoints, in the order in which they appear in a prompt."""
_MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SIZED_REQUESTS, _MAX_OUTPUT_TOKENS = 256, 1 << 20


def chunks(
    entries: Iterable[JobRequest | RejectedLine], *, max_requests: int = 2048, max_bytes: int = 32 << 20
) -> Iterator[list[JobRequest | RejectedLine]]:
    """Splits an input into non-empty lists, in order.

    A chunk ends when it has its number of requests, at most `max_requests`, or its entries take `max_bytes` of memory.
    """
    chunk: list[JobRequest | RejectedLine] = []
    n_bytes, n_requests = 0, min(64, max_requests)
    for entry in entries:
        chunk.append(entry)
        n_bytes += _memory_bytes(entry)
        if len(chunk) >= n_requests or n_bytes >= max_bytes:
            yield chunk
            chunk = []
            n_bytes, n_requests = 0, min(2 * n_requests, max_requests)
    if chunk:
        yield chunk


def order_requests(requests: list[JobRequest], *, longest_first: bool) -> list[JobRequest]:
    """The requests in the order in which to submit them.

    Requests whose prompts share a prefix are adjacent, so that the prefix is computed once and then found in the prefix
    cache. Otherwise the order is that of the file, or with `longest_first` by estimated tokens to compute, descending,
    so that no long request remains at the end when all others are done.
    """
    groups: dict[tuple[str, str] | int, list[tuple[int, JobRequest]]] = {}
    for index, request in enumerate(requests):
        prefix, n_chars = _prompt_prefix(request)
        group_key = (request.url, prefix) if n_chars >= _PREFIX_CHARS else index
        n_tokens = n_chars // _CHARS_PER_TOKEN + _output_tokens(request)
        groups.setdefault(group_key, []).append((n_tokens, request))
    if not longest_first:
        return [request for group in groups.values() for _, request in group]
    for group in groups.values():
        group.sort(key=itemgetter(0), reverse=True)
    by_longest = sorted(groups.values(), key=lambda group: group[0][0], reverse=True)
    return [request for group in by_longest for _, request in group]


def estimate_sizes(lines: Iterable[JobRequest | RejectedLine], defaults: Json) -> RequestSizes | None:
    """The estimated sizes of a job's first requests, with answers as long as allowed; None without requests.

    `defaults`: body fields for requests that do not set them.
    """
    first = [line for line in islice(lines, _SIZED_REQUESTS) if isinstance(line, JobRequest)]
    requests = [msgspec.structs.replace(request, body=defaults | request.body) for request in first]
    if not requests:
        return None
    prompt_tokens = sum(_prompt_prefix(request)[1] for request in requests) / _CHARS_PER_TOKEN
    output_tokens = sum(min(max(_output_tokens(request), 1), _MAX_OUTPUT_TOKENS) for request in requests)
    return RequestSizes(len(requests), prompt_tokens, prompt_tokens, output_tokens)


def _prompt_prefix(request: JobRequest) -> tuple[str, int]:
    """The first `_PREFIX_CHARS` characters of the prompt (fewer if it is shorter), and the prompt's total length."""
    prefix, n_chars = "", 0
    for field in _PROMPT_FIELDS:
        for text in _texts(request.body.get(field)):
            n_chars += len(text)
            if len(prefix) < _PREFIX_CHARS:
                prefix = (prefix + text[:_PREFIX_CHARS])[:_PREFIX_CHARS]
    return prefix, n_chars


def _texts(value: object) -> Iterator[str]:
    """All strings in a JSON value, in order. A token ID counts as four characters, the average length of a token."""
    if isinstance(value, str):
        yield value[:_PREFIX_CHARS] if value.startswith("data:") else value  # a file is not text
    elif isinstance(value, int):
        yield f"{value:04x}"
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)


def _output_tokens(request: JobRequest) -> int:
    for field in _MAX_TOKENS_FIELDS:
        value = request.body.get(field)
        if isinstance(value, int):
            return value
    return 256  # an estimate


def _memory_bytes(entry: JobRequest | RejectedLine) -> int:
    """The approximate memory of an entry."""
    if isinstance(entry, RejectedLine):
        return sys.getsizeof(entry.message)
    size, left = 0, [entry.custom_id, entry.body]
    while left:
        value: Any = left.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return size
