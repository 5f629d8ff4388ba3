"""A line of JSON: a request in OpenAI's form, an object with a prompt, or a prompt alone."""

from __future__ import annotations

import msgspec

from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine
from cppbatch.jobs.request_builder import (
    LineError,
    RequestBuilder,
    check_custom_id,
    default_custom_id,
    describe_non_text,
    short_repr,
)
from cppbatch.json_bounds import excess

_PROMPTS = ("prompt", "messages", "input")
_decode = msgspec.json.Decoder().decode


def json_item(number: int, line: bytes, requests: RequestBuilder) -> JobRequest | RejectedLine:
    """What a line of JSON asks for."""
    content = hash64(line)
    custom_id: str | None = None
    try:
        record = _decoded(line)
        is_plain = "body" not in record and "url" not in record
        if is_plain:
            custom_id = _plain_id(record, number)
            url, body = _plain_request(record, requests)
        else:
            custom_id = _id(record)
            url, body = _request(record, requests)
    except LineError as wrong:
        return RejectedLine(line=number, code=wrong.code, message=str(wrong), custom_id=custom_id, content=content)
    return JobRequest(line=number, custom_id=custom_id, url=url, body=body, is_plain=is_plain, content=content)


def _decoded(line: bytes) -> Json:
    if too_much := excess(line):
        raise LineError("invalid_json", too_much)
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_json", _why_no_json(line, error)) from None
    if isinstance(record, str):
        return {"prompt": record}
    if not isinstance(record, dict):
        raise LineError("invalid_line", f"{short_repr(record)} is neither an object nor a string")
    return record


def _why_no_json(line: bytes, error: Exception) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return describe_non_text(line)
    if "\0" in text:
        return describe_non_text(line)
    return f"is not JSON: {error}: {short_repr(text)}"


def _id(record: Json) -> str:
    if "custom_id" not in record:
        raise LineError("missing_custom_id", "custom_id: is missing; by it the result is found")
    return check_custom_id("custom_id", record["custom_id"])


def _request(record: Json, requests: RequestBuilder) -> tuple[str, Json]:
    method = record.get("method", "POST")
    if not isinstance(method, str) or method.upper() != "POST":
        raise LineError("invalid_method", f"method: {short_repr(method)} must be POST")
    if "url" not in record:
        raise LineError("invalid_url", "url: is missing")
    url = requests.check_url(record["url"])
    if "body" not in record:
        raise LineError("missing_body", "body: is missing; it is what the endpoint is sent")
    body = record["body"]
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body: {short_repr(body)} is no object")
    return url, body


def _plain_id(record: Json, number: int) -> str:
    """A plain line may be named by a number too, as rows of data sets are."""
    for field in ("custom_id", "id"):
        value = record.get(field)
        if value is not None:
            is_number = isinstance(value, int) and not isinstance(value, bool)
            return check_custom_id(field, str(value) if is_number else value)
    return default_custom_id(number)


def _plain_request(record: Json, requests: RequestBuilder) -> tuple[str, Json]:
    kinds = [field for field in _PROMPTS if field in record]
    if len(kinds) != 1:
        found = " and ".join(kinds) or (f"only {', '.join(map(short_repr, list(record)[:8]))}" if record else "nothing")
        raise LineError("invalid_line", f"has {found}; it must have a url and a body, or one of {', '.join(_PROMPTS)}")
    others = {field: value for field, value in record.items() if field not in ("custom_id", "id")}
    if "messages" in record:
        return requests.check_url("/v1/chat/completions"), others
    if "input" in record:
        return requests.check_url("/v1/embeddings"), others
    prompt = others["prompt"]
    if isinstance(prompt, list):
        return requests.check_url("/v1/completions"), others
    if not isinstance(prompt, str):
        raise LineError("invalid_line", f"prompt: {short_repr(prompt)} is neither a string nor a list")
    del others["prompt"]
    return requests.of_prompt(prompt, others)
