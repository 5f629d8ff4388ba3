"""llama-server's answer objects, whole and streamed."""

from __future__ import annotations

from time import perf_counter

from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, RequestUsage, TokenPiece
from cppbatch.server.llama_server.schemas import LlamaFields
from cppbatch.server.llama_server.tokens import text_of
from cppbatch.server.llama_server.translate import RANDOM_SEED, sampler_names
from cppbatch.server.response import Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.response_logprobs import logprob_entries

NO_SLOT = -1
"""As an `id_slot`: any. Requests here are not tied to one."""


class LlamaReply(ResponseBuilder):
    """`/completion` and `/infill`."""

    def __init__(
        self, body: LlamaFields, requests: list[GenerationRequest], prompts: list[list[TokenPiece]], info: ModelInfo
    ) -> None:
        super().__init__(n_candidates=body.n_candidates)
        self._body = body
        self._params = [request.params for request in requests]
        self._prompts = prompts
        self._info = info
        self._is_silent = body.n_predict == 0  # what comes is the prompt
        self._n_predicted = [0] * len(requests)
        self._has_new_line = [False] * len(requests)
        self._first_at = [0.0] * len(requests)

    def record(self, index: int, event: GenerationEvent) -> None:
        """As in `ResponseBuilder`."""
        super().record(index, event)
        if not self._is_silent:
            self._first_at[index] = self._first_at[index] or perf_counter()
            self._n_predicted[index] += len(event.tokens)
            self._has_new_line[index] |= "\n" in event.text

    def build(self, completions: list[list[GenerationEvent]]) -> Json | list[Json]:
        """As in `ResponseBuilder`: an object, or of several texts a list."""
        answers = [self._whole(index, events) for index, events in enumerate(completions)]
        return answers[0] if len(answers) == 1 else answers

    def _whole(self, index: int, events: list[GenerationEvent]) -> Json:
        content, tokens, logprobs = "", [], []
        if not self._is_silent:
            content = "".join(event.text for event in events)
            logprobs = [entry for event in events for entry in event.logprobs]
            tokens = [token for event in events for token in event.tokens] if self._body.return_tokens else []
        return self._final(index, content, tokens, {"completion_probabilities": logprob_entries(logprobs)})

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        frames = []
        if not self._is_silent and (event.text or event.tokens or event.logprobs):
            frames.append(ServerSentEvent(self._chunk(index, event)))
        if event.finish_reason:
            frames.append(ServerSentEvent(self._final(index, "", [], {})))
        return frames

    def _chunk(self, index: int, event: GenerationEvent) -> Json:
        chunk = {
            "index": index,
            "content": event.text,
            "tokens": event.tokens,
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._n_predicted[index],
            "tokens_evaluated": len(self._prompts[index // self.n_candidates]),
        }
        if self._body.timings_per_token:
            n, seconds = self._n_predicted[index], perf_counter() - self._first_at[index]
            chunk["timings"] = _speed("predicted", n, seconds, n_steps=max(0, n - 1))
        if event.logprobs:
            chunk["completion_probabilities"] = logprob_entries(event.logprobs)
        return chunk

    def _final(self, index: int, content: str, tokens: list[int], more: Json) -> Json:
        last, params = self.last_events[index], self._params[index]
        assert last.usage
        n_prompt, n_predicted = last.usage.prompt_tokens, self._n_predicted[index]
        stop_type = _stop_type(last)
        n_known = n_prompt + n_predicted
        answer = {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._info.name,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": n_prompt,
            "generation_settings": generation_settings(params, self._body, last.seed),
            "prompt": text_of(self._prompts[index // self.n_candidates]),
            "has_new_line": self._has_new_line[index],
            "truncated": n_known >= self._info.max_sequence and n_predicted != params.max_tokens,
            "stop_type": stop_type,
            "stopping_word": last.stop or "",
            "tokens_cached": n_known - (n_predicted > 0 and stop_type != "eos"),  # the last one is not computed
            "timings": _timings(last.usage, n_predicted),
            **{name: value for name, value in more.items() if value},
        }
        return answer if self._body.response_fields is None else _only(self._body.response_fields, answer)


def _stop_type(last: GenerationEvent) -> str:
    if last.finish_reason is not FinishReason.STOP:
        return "limit"
    return "eos" if last.stop is None else "word"


def _timings(usage: RequestUsage, n_predicted: int) -> Json:
    begun = usage.first_token_seconds or usage.total_seconds
    n_computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_speed("prompt", n_computed, begun - usage.queue_seconds, n_steps=n_computed),
        **_speed("predicted", n_predicted, usage.total_seconds - begun, n_steps=max(0, n_predicted - 1)),
    }


def _speed(name: str, n: int, seconds: float, *, n_steps: int) -> Json:
    """`n_steps`: the tokens that took this time. The first of a text comes with the prompt, and takes none."""
    return {
        f"{name}_n": n,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / n_steps if n_steps else 0.0,
        f"{name}_per_second": n_steps / seconds if seconds > 0 else 0.0,
    }


def _only(paths: list[str], answer: Json) -> Json:
    """The fields that are there, by their paths."""
    found: Json = {}
    for path in paths:
        value: object = answer
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


_MISSING = object()

_SAME_NAMES = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "ignore_eos", "stop",
)  # fmt: skip


def generation_settings(params: SamplingParams, body: LlamaFields, seed: int | None = None) -> Json:
    """How a text is generated, by llama-server's names."""
    n_predict = -1 if params.max_tokens is None else params.max_tokens
    return {
        "seed": RANDOM_SEED if seed is None else seed,
        **{name: getattr(params, name) for name in _SAME_NAMES},
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": params.penalty_last_n,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "stream": bool(body.stream),
        "logit_bias": [{"token": int(token), "bias": bias} for token, bias in params.logit_bias.items()],
        "n_probs": params.logprobs or 0,
        "min_keep": 0,
        "grammar": params.grammar or "",
        "samplers": sampler_names(params),
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": False,
    }
