"""Unknown fields of a request: refused if they would change the answer, otherwise reported.

A field would change the answer if another API keeps state under this name, if another server uses it for sampling or
constraints, if its name implies so (`my_grammar`), or if it resembles the name of a field of this server
(`temprature`). All other fields are listed in the response header `X-Ignored-Fields`.
"""

from __future__ import annotations

import difflib
import functools
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.server.fields.structured import StructuredFields

HEADER = "X-Ignored-Fields"
IGNORED = web.RequestKey("ignored_fields", tuple)
"""The names of a request's fields without effect."""

_MOST_LISTED, _LONGEST_NAME = 20, 64
_MOST_UNKNOWN = 100


class _Refused(NamedTuple):
    """A field that is refused."""

    reason: str
    """Why, or what to do instead."""
    without_effect: tuple[object, ...] = ()
    """Values without effect on the other server, in addition to null, false and empty ones."""
    is_given_empty: bool = False
    """Whether false and an empty object have an effect too."""
    same: frozenset[str] = frozenset()
    """Equivalent fields of this server, which clients for several servers send as well."""


_STATE = dict.fromkeys(
    ("previous_response_id", "conversation", "conversation_id", "thread_id", "parent_message_id", "thread"),
    "send the whole conversation each time; the prefix cache makes this cheap",
) | {
    "store": "leave it out, or send false",
    "background": "wait for the answer, or stream it",
    "container": "run code on the client, as a tool",
    "context_management": "shorten the conversation on the client",
    "compaction": "shorten the conversation on the client",
    "cached_content": "send the text itself; the prefix cache makes this cheap",
    "cache_id": "send the text itself; the prefix cache makes this cheap",
    "session_params": "send the whole text each time; the prefix cache makes this cheap",
    "context": "send the whole text as the prompt",
}
"""Names under which other APIs keep state between requests, and what to do instead."""

_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"})
"""This server's fields for the maximum completion length."""

_TEXT_FIELDS = {
    # objects that contain this API's fields in other APIs
    "extra_body": _Refused("put its fields directly into the body; OpenAI's client does this with extra_body"),
    "options": _Refused("put its fields directly into the body"),
    "parameters": _Refused("put its fields directly into the body"),
    "sampling_params": _Refused("put its fields directly into the body"),
    "generation_config": _Refused("put its fields directly into the body"),
    "gen_kwargs": _Refused("put its fields directly into the body"),
    "inputs": _Refused("use prompt or messages"),
    "system": _Refused("use a message with role system"),
    "system_prompt": _Refused("use a message with role system"),
    "history": _Refused("send all messages"),
    "chat_history": _Refused("send all messages"),
    "documents": _Refused("put them in a message"),
    "template": _Refused("start the server with --chat-template"),
    "chat_template": _Refused("start the server with --chat-template"),
    "format": _Refused("use response_format"),
    "enable_thinking": _Refused('use chat_template_kwargs: {"enable_thinking": ...}', is_given_empty=True),
    "think": _Refused('use chat_template_kwargs: {"enable_thinking": ...}', is_given_empty=True),
    "thinking": _Refused('use chat_template_kwargs: {"enable_thinking": ...}', is_given_empty=True),
    "reasoning": _Refused("use reasoning_effort"),
    "thinking_budget": _Refused("it is supported only by the chat endpoints; max_tokens limits the whole text", (-1,)),
    "thinking_budget_tokens": _Refused("use thinking_budget, a field of the chat endpoints", (-1,)),
    "reasoning_budget_tokens": _Refused("use thinking_budget, a field of the chat endpoints", (-1,)),
    "thinking_token_budget": _Refused("use thinking_budget, a field of the chat endpoints", (-1,)),
    "lora_path": _Refused("use lora with the names of the server's adapters"),
    "lora_request": _Refused("use lora with the names of the server's adapters"),
    "adapter_id": _Refused("use lora with the names of the server's adapters"),
    "function_call": _Refused("use tools and tool_choice", ("auto", "none")),
    # lengths
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_length", "max_new_tokens", "max_output_tokens", "max_completion_tokens"),
        _Refused("use max_tokens", (-1,), same=_LENGTHS),
    ),
    "truncate": _Refused("shorten the prompt on the client"),
    "truncate_prompt_tokens": _Refused("shorten the prompt on the client"),
    "transforms": _Refused("shorten the conversation on the client"),
    # sampling
    "do_sample": _Refused("use temperature 0 for greedy decoding", (True,), is_given_empty=True),
    "num_beams": _Refused("use best_of", (1,)),
    "num_return_sequences": _Refused("give n", (1,)),
    "use_beam_search": _Refused("use best_of"),
    "length_penalty": _Refused("it belongs to beam search, which is not supported", (1, 0)),
    "early_stopping": _Refused("it belongs to beam search, which is not supported"),
    "no_repeat_ngram_size": _Refused("use dry_multiplier or repetition_penalty", (0,)),
    "repetition_detection": _Refused("use dry_multiplier or repetition_penalty"),
    "top_a": _Refused("use min_p", (0,)),
    "tfs_z": _Refused("use min_p", (1,)),
    "guidance_scale": _Refused("classifier-free guidance is not supported", (1,)),
    "negative_prompt": _Refused("classifier-free guidance is not supported"),
    "watermark": _Refused("leave it out"),
    "watermarking": _Refused("leave it out"),
    "bad_words": _Refused("use suppress_tokens (token ids), or logit_bias with strings"),
    "bad_words_ids": _Refused("use suppress_tokens"),
    "banned_tokens": _Refused("use suppress_tokens"),
    "banned_strings": _Refused("use suppress_tokens (token ids), or logit_bias with strings"),
    "allowed_token_ids": _Refused("use guided_choice or guided_regex"),
    "logits_processors": _Refused("they are functions, which are supported only by the Python API"),
    "no_stop_trim": _Refused("use include_stop"),
    "include_stop_str_in_output": _Refused("use include_stop"),
    "vllm_xargs": _Refused("such extensions are not supported"),
    # features of other servers
    "echo": _Refused("it is supported only by /v1/completions"),
    "suffix": _Refused("it is supported only by /v1/completions"),
    "images": _Refused("use messages with parts of type image_url"),
    "image_data": _Refused("use messages with parts of type image_url"),
    "prompt_embeds": _Refused("use text or token ids"),
    "modalities": _Refused("the output is always text", (["text"],)),
    "audio": _Refused("the output is always text", is_given_empty=True),
    "web_search_options": _Refused(
        "this server cannot search the web; provide a function that does", is_given_empty=True
    ),
    "enable_search": _Refused("this server cannot search the web; provide a function that does"),
    "plugins": _Refused("provide functions as tools"),
    "mcp_servers": _Refused("provide their tools as functions, and call them on the client"),
    "moderation": _Refused("check the text on the client", is_given_empty=True),
    "verbosity": _Refused("put it in a message", ("medium",)),
}
"""Names in other APIs of fields that would change the answer."""

_HARMLESS = frozenset(
    {
        "guided_decoding_backend", "stop_reason", "truncation_side", "spaces_between_special_tokens",
        "backend_sampling", "schema_version",
    }
)  # fmt: skip
"""Names that only seem to change the answer."""

_TEXT_WORDS = re.compile(
    r"guided|grammar|g?bnf$|ebnf|regex|schema|structur|constrain|penalt|temperature|sampler|sampling|bias|stop|banned"
    r"|max.*tok"
)
"""Parts of names of fields that would change the answer, in lower case without separators."""

_NO_TEXT = frozenset(
    {
        "model", "user", "metadata", "stream", "stream_options", "priority", "timeout", "queue_timeout", "cache_prompt",
        "cache_salt", "id_slot", "service_tier", "timings_per_token", "return_tokens", "response_fields", "speculate",
        "speculative.n_max",
    }
)  # fmt: skip
"""Fields of this server that do not change the answer: misspelling them does not matter."""


def refuse_unknown(fields: Mapping[str, Any], kind: type) -> tuple[str, ...]:
    """The names of unknown fields without effect.

    `fields`: decoded JSON, or `msgspec.Raw` values. For a text request, raises `InvalidRequest` for unknown fields that
    would change the answer or require state on the server.
    """
    known = known_fields(kind)
    if len(fields) > len(known) + _MOST_UNKNOWN:  # each is compared with all known names
        name = next(name for name in fields if name not in known)
        message = f"is one of more than {_MOST_UNKNOWN} unknown fields; leave them out"
        raise InvalidRequest(name[:_LONGEST_NAME], message)
    ignored = []
    for name, value in fields.items():
        if name not in known:
            if issubclass(kind, StructuredFields) and (reason := _reason(name, value, known, fields)):
                raise InvalidRequest(name[:_LONGEST_NAME], reason)
            ignored.append(name)
    return tuple(ignored)


def with_unknown(error: InvalidRequest, fields: Mapping[str, Any], kind: type) -> InvalidRequest | None:
    """The error about a field that is missing, with the unknown one that may stand for it; None: it is another error,
    or no field is unknown. `fields` and `kind`: as in `refuse_unknown`."""
    known = known_fields(kind)
    unknown = [name for name in fields if name not in known][:_MOST_UNKNOWN]
    if not unknown or error.field in fields or error.field not in known:
        return None
    name = next((name for name in unknown if _similar(_squeeze(name), {error.field})), unknown[0])
    if issubclass(kind, StructuredFields) and (refused := _find_refused(name, known)):
        reason = refused.reason
    else:
        similar = _similar(_squeeze(name), known - fields.keys())
        reason = _unknown(similar) if similar else "is an unknown field"
    return InvalidRequest(error.field, f"{error.message}; {name[:_LONGEST_NAME]} {reason}", error.overflow)


@functools.cache
def known_fields(kind: type) -> frozenset[str]:
    """The JSON names of a type's fields."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _reason(name: str, value: object, known: frozenset[str], fields: Mapping[str, Any]) -> str | None:
    """Why an unknown field is refused; None: it has no effect, or an equivalent field is given too."""
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    is_empty = value is None or value is False or value in ("", [], {})
    if refused := _find_refused(name, known):
        has_effect = value is not None and value not in refused.without_effect and not fields.keys() & refused.same
        return refused.reason if has_effect and (refused.is_given_empty or not is_empty) else None
    if is_empty or name in _HARMLESS:
        return None
    if similar := _similar(_squeeze(name), known - _NO_TEXT):
        return None if similar in fields else _unknown(similar)
    if _TEXT_WORDS.search(_squeeze(name)):
        return "is an unknown field that might change the output; see docs/api.md for the supported fields"
    return None


def _find_refused(name: str, known: frozenset[str]) -> _Refused | None:
    """The entry for a field of other APIs."""
    if name in _STATE:
        return _Refused(f"is not supported: this server keeps no state between requests; {_STATE[name]}")
    if name == "add_special_tokens":  # defaults to false for messages, which have their own
        reason = "is not supported; use /v1/completions with a prompt of token ids"
        return _Refused(reason, ("messages" not in known or "prompt" in known,), is_given_empty=True)
    refused = _TEXT_FIELDS.get(name)
    return refused._replace(reason=f"is not supported; {refused.reason}") if refused else None


def _unknown(similar: str) -> str:
    return f"is an unknown field; did you mean {similar}?"


def _similar(squeezed: str, known: Set[str]) -> str | None:
    """The field that a name means, as `topP` means `top_p` and `temprature` means `temperature`."""
    names = {_squeeze_known(name): name for name in sorted(known)}
    if squeezed in names:
        return names[squeezed]
    found = difflib.get_close_matches(squeezed[:_LONGEST_NAME], names, n=1, cutoff=0.85)
    return names[found[0]] if found else None


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_squeeze_known = functools.cache(_squeeze)


async def add_ignored_fields(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: lists the request's fields without effect."""
    if names := request.get(IGNORED):
        response.headers[HEADER] = format_names(names)


def format_names(names: Iterable[str]) -> str:
    """The names as the value of a header."""
    shown = [urllib.parse.quote(name[:_LONGEST_NAME], safe="") for name in names]
    return ", ".join(shown[:_MOST_LISTED] + (["..."] if len(shown) > _MOST_LISTED else []))
