"""llama-server's metrics: what its names mean, from the counters of the server and its workers."""

from __future__ import annotations

from collections.abc import Sequence

from cppbatch.cluster.engine_client import WorkerState
from cppbatch.server.server_stats import CompletionSums

_GAUGE, _COUNTER = "gauge", "counter"


def llama_metrics(sums: CompletionSums, recent: CompletionSums, workers: Sequence[WorkerState]) -> bytes:
    """The metrics in Prometheus' text format. `sums`: since the start. `recent`: since these metrics were last
    asked for, as in llama-server."""
    stats = [worker.stats for worker in workers if worker.stats]
    decode_steps = sum(each.decode_steps for each in stats)
    busy = sum(each.decode_rows for each in stats) / decode_steps if decode_steps else 0.0
    metrics: list[tuple[str, str, float, str]] = [
        ("prompt_tokens_total", _COUNTER, sums.prompt_tokens, "Prompt tokens computed"),
        ("prompt_tokens_cached_total", _COUNTER, sums.cached_tokens, "Prompt tokens taken from the prefix cache"),
        ("prompt_seconds_total", _COUNTER, sums.prompt_seconds, "Time until the first token, summed over requests"),
        ("tokens_predicted_total", _COUNTER, sums.generated_tokens, "Generated tokens"),
        (
            "tokens_predicted_seconds_total", _COUNTER, sums.generation_seconds,
            "Time from the first token to the last, summed over requests",
        ),
        ("n_decode_total", _COUNTER, sum(each.steps for each in stats), "Calls of llama_decode"),
        ("n_tokens_max", _COUNTER, sums.longest, "Maximum tokens of a prompt and its completion"),
        (
            "spec_decode_num_draft_tokens_total", _COUNTER, sum(each.drafted_tokens for each in stats),
            "Verified draft tokens",
        ),
        (
            "spec_decode_num_accepted_tokens_total", _COUNTER, sum(each.accepted_tokens for each in stats),
            "Accepted draft tokens",
        ),
        (
            "spec_decode_num_drafts_total", _COUNTER, sum(each.draft_steps for each in stats),
            "Steps that verified drafts",
        ),
        (
            "prompt_tokens_seconds", _GAUGE, _rate(recent.prompt_tokens, recent.prompt_seconds),
            "Prompt tokens per second and request, over the completions since the last scrape",
        ),
        (
            "predicted_tokens_seconds", _GAUGE, _rate(recent.generated_tokens, recent.generation_seconds),
            "Generated tokens per second and request, over the completions since the last scrape",
        ),
        ("requests_processing", _GAUGE, sum(each.running for each in stats), "Running requests"),
        ("requests_deferred", _GAUGE, sum(each.waiting for each in stats), "Waiting requests"),
        ("n_busy_slots_per_decode", _GAUGE, busy, "Average number of decoding sequences per step"),
    ]  # fmt: skip
    return "".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.10g}\n"
        for name, kind, value, text in metrics
    ).encode()


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds else 0.0
