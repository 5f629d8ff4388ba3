"""llama-server's metrics: what its names mean, from the counters of the server and its workers."""

from __future__ import annotations

from collections.abc import Sequence

from cppbatch.cluster.engine_client import WorkerState
from cppbatch.engine.metrics import EngineStats, add_up
from cppbatch.server.server_stats import CompletionSums
from cppbatch.statistic import statistics_of

_OF_ENGINES = {
    "n_decode_total": ("steps", "Calls of llama_decode"),
    "spec_decode_num_draft_tokens_total": ("drafted_tokens", ""),
    "spec_decode_num_accepted_tokens_total": ("accepted_tokens", ""),
    "spec_decode_num_drafts_total": ("draft_steps", "Steps that verified drafts"),
    "requests_processing": ("running", ""),
    "requests_deferred": ("waiting", "Waiting requests"),
    "n_busy_slots_per_decode": ("mean_decode_batch", "Average number of decoding sequences per step"),
}
"""By llama-server's name: the field of `EngineStats`, and the help; empty: that of the field."""


def llama_metrics(sums: CompletionSums, recent: CompletionSums, workers: Sequence[WorkerState]) -> bytes:
    """The metrics in Prometheus' text format. `sums`: since the start. `recent`: since these metrics were last
    asked for, as in llama-server."""
    stats = [worker.stats for worker in workers if worker.stats]
    total, of_engine = add_up(stats) if stats else None, statistics_of(EngineStats)
    metrics = [
        *(
            (each.name, each.kind, getattr(sums, field), each.help)
            for field, each in statistics_of(CompletionSums).items()
        ),
        *(
            (name, of_engine[field].kind or "gauge", getattr(total, field, 0), text or of_engine[field].help)
            for name, (field, text) in _OF_ENGINES.items()
        ),
        (
            "prompt_tokens_seconds", "gauge", _rate(recent.prompt_tokens, recent.prompt_seconds),
            "Prompt tokens per second and request, over the completions since the last scrape",
        ),
        (
            "predicted_tokens_seconds", "gauge", _rate(recent.generated_tokens, recent.generation_seconds),
            "Generated tokens per second and request, over the completions since the last scrape",
        ),
    ]  # fmt: skip
    return "".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.10g}\n"
        for name, kind, value, text in metrics
    ).encode()


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds else 0.0
