"""Ollama's request fields in the server's terms: names of models, options, formats, durations."""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

import msgspec

from cppbatch.chat.reasoning import effort_variables
from cppbatch.engine.params import RANGES, SWITCHES, UNLIMITED
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.ollama.types import GenerationFields, Json, ModelFields
from cppbatch.server.fields.sampling import SamplingFields, SingleChoiceFields
from cppbatch.server.fields.structured import Schema
from cppbatch.server.models.served import ServedModels
from cppbatch.server.models.serving import Serving
from cppbatch.typed_json import convert

log = logging.getLogger("cppbatch.server")

# --- names ----------------------------------------------------------------------------------------------------------

_LATEST = ":latest"
_HOSTS = ("hf.co/", "huggingface.co/")


def name_of(served: ServedModels, given: str) -> str:
    """The name of a model in this server for a name in Ollama's form: `:latest` may be left out or added, and
    `NAME:TYPE` is also the file `NAME-TYPE` or `NAME.TYPE`. An unknown name is returned without `:latest`."""
    name = plain_name(given)
    own, _, tag = name.rpartition(":")
    candidates = [given, name, *((f"{own}-{tag}", f"{own}.{tag}") if own else ())]
    return next((each for each in candidates if served.knows(each)), name)


def plain_name(given: str) -> str:
    """The name without `:latest` and without the address of the hub."""
    host = next((each for each in _HOSTS if given.startswith(each)), "")
    return given.removeprefix(host).removesuffix(_LATEST)


# --- options --------------------------------------------------------------------------------------------------------


class Options(SingleChoiceFields, kw_only=True):
    """`options`, and the request's fields for log-probabilities."""

    _ALIASES: ClassVar[dict[str, str]] = {
        **SamplingFields._ALIASES,
        "max_tokens": "num_predict",
        "logprobs": "top_logprobs",
    }

    num_predict: int | None = None
    num_keep: int | None = None
    wants_logprobs: bool | None = None
    top_logprobs: int | None = None

    def options(self) -> Json:
        """The given fields of `GenerationRequest`, with `num_keep` as `n_keep`."""
        return super().options() | ({} if self.num_keep is None else {"n_keep": self.num_keep})

    @property
    def field_names(self) -> dict[str, str]:
        """The client's names, which belong to `options`."""
        own = super().field_names | {"n_keep": "num_keep"}
        inside = {ours: f"options.{own.get(ours, ours)}" for ours in {*_KNOWN, *own}}
        return inside | {"logprobs": "top_logprobs"}


_KNOWN = frozenset(
    {*RANGES, *SWITCHES, "top_k", "repeat_penalty", "repeat_last_n", "seed", "stop", "num_predict", "num_keep"}
) & set(Options.__struct_fields__)
"""The options with an effect."""
_OF_RUNNER = frozenset({"num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict"})
"""Ollama's options for loading a model, which is the server's matter."""


def sampling_of(body: GenerationFields, serving: Serving) -> Options:
    """The options of a request. Unknown ones have no effect, and each is a line in the log once.

    Raises `InvalidRequest`.
    """
    given = {name: value for name, value in (body.options or {}).items() if value is not None}
    if unknown := sorted(name[:40] for name in given.keys() - _KNOWN - _OF_RUNNER):
        _log_once(f"options without effect in Ollama's API: {', '.join(unknown)[:400]}")
    _check_context(given.get("num_ctx"), serving)
    fields = {name: _whole(given[name]) for name in sorted(given.keys() & _KNOWN)}
    options = convert(fields, Options, "options")
    # num_predict -1: no limit; -2: until the context is full, which is the same here
    if options.num_predict is not None and options.num_predict < 1:
        options = msgspec.structs.replace(options, num_predict=UNLIMITED)
    return msgspec.structs.replace(
        options,
        model=body.model,
        stream=body.streams,
        wants_logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
    )


def _whole(value: Any) -> Any:
    """An integer for 42.0, which clients send that have no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_context(wanted: Any, serving: Serving) -> None:
    """A longer context than the server's is a line in the log: Ollama would load the model again."""
    if isinstance(wanted, int | float) and wanted > serving.info.max_sequence:
        _log_once(
            f"num_ctx {wanted!r:.20} has no effect: {serving.name} has a context of {serving.info.max_sequence} tokens "
            "(-c); longer prompts lose their oldest messages"
        )


_logged: set[str] = set()


def _log_once(line: str) -> None:
    if line not in _logged and len(_logged) < 1000:
        _logged.add(line)
        log.warning("%s", line)


# --- format and reasoning -------------------------------------------------------------------------------------------


def schema_of(body: GenerationFields) -> Schema | None:
    """The JSON schema of `format`; None: free text. Raises `InvalidRequest`."""
    if body.format in (None, ""):
        return None
    if body.format == "json":
        return {"type": "object"}
    if isinstance(body.format, str):
        raise InvalidRequest("format", f'is {body.format!r:.80}; it must be "json" or a JSON schema')
    return body.format


async def thinking_variables(body: GenerationFields, serving: Serving) -> Json:
    """The chat template's variables for `think`.

    Raises `InvalidRequest` for a value that is not known, and for a model that is not known to reason.
    """
    wanted = body.think
    if wanted is None or wanted == "":
        return {}
    if wanted is False:
        return effort_variables("think", "none")
    forms = await serving.learn_chat_forms()
    if forms is not None and forms.thoughts is None:
        raise InvalidRequest("think", f'"{body.model:.200}" does not support thinking; leave it out, or send false')
    levels = {} if wanted is True else effort_variables("think", str(wanted))
    return {"enable_thinking": True, **levels}


# --- durations ------------------------------------------------------------------------------------------------------

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
FOREVER = -1.0


def keep_alive_of(body: ModelFields) -> float | None:
    """`keep_alive` in seconds: `FOREVER` for a negative one; None: not given. Raises `InvalidRequest`."""
    given = body.keep_alive
    if given is None or given == "":
        return None
    if isinstance(given, str):
        text = given.strip()
        digits = text.removeprefix("-").removeprefix("+")
        parts = _PART.findall(digits)
        if digits != "0" and (not parts or "".join(number + unit for number, unit in parts) != digits):
            message = 'it must be seconds, or a duration with a unit such as "5m"'
            raise InvalidRequest("keep_alive", f"is {given!r:.80}; {message}")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        given = -seconds if text.startswith("-") else seconds
    return FOREVER if given < 0 else float(given)
