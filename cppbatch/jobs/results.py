"""How results are written: OpenAI's lines, and short ones for mere prompts."""

from __future__ import annotations

from typing import Any

import msgspec

from cppbatch.jobs.job_request import JobRequest, JobResponse, Json, RejectedLine

_IF_THERE = ("reasoning_content", "tool_calls", "logprobs")
"""What a short result has beside its text."""


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is written of one line of the input."""

    line: int
    is_good: bool
    data: bytes
    """A line of JSON, with its end."""
    numbers: dict[str, int] = {}
    """Tokens, to be added up."""


def response_line(item: JobRequest, answer: JobResponse) -> ResultLine:
    """The result of an item that its endpoint has answered, with an error or without."""
    told = _short(item, answer) if item.is_plain and answer.is_good else _openai(item, answer)
    tokens = {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
    }
    return ResultLine(line=item.line, is_good=answer.is_good, data=_encoded(told), numbers=tokens)


def rejection_line(line: RejectedLine) -> ResultLine:
    """The result of a line that no endpoint has seen."""
    error = {"code": line.code, "message": line.message, "line": line.line}
    told = {"id": _id(line.line), "custom_id": line.custom_id, "line": line.line, "response": None, "error": error}
    return ResultLine(line=line.line, is_good=False, data=_encoded(told))


def _openai(item: JobRequest, answer: JobResponse) -> Json:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    place = {} if answer.is_good else {"line": item.line}
    return {"id": _id(item.line), "custom_id": item.custom_id, **place, "response": response, "error": None}


def _short(item: JobRequest, answer: JobResponse) -> Json:
    body: Json = msgspec.to_builtins(answer.body)
    told: Json = {"custom_id": item.custom_id, "line": item.line}
    if "choices" in body:
        choices = body["choices"]
        told |= _of_choice(choices[0]) if len(choices) == 1 else {"choices": [_of_choice(each) for each in choices]}
    else:
        vectors = [each["embedding"] for each in body["data"]]
        told |= {"embedding": vectors[0]} if len(vectors) == 1 else {"embeddings": vectors}
    return told | {"usage": body["usage"]}


def _of_choice(choice: Json) -> Json:
    message: dict[str, Any] = choice.get("message") or {"content": choice.get("text")}
    told = {"text": message["content"], "finish_reason": choice["finish_reason"]}
    more = {**message, "logprobs": choice.get("logprobs")}
    return told | {name: more[name] for name in _IF_THERE if more.get(name)}


def _id(line: int) -> str:
    return f"batch_req_{line}"


def _encoded(told: Json) -> bytes:
    return msgspec.json.encode(told) + b"\n"
