"""What somebody who reads the figures of a server must know besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cppbatch.bench.load.results import Run

_BUSY = 0.5  # of a core, by the client
_MERGED = 0.9  # pieces a token


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """Sentences about one server's runs."""
    label, server = runs[0].server.label, runs[0].server
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    done = [outcome for outcome in outcomes if not outcome.failure]
    if not runs[-1].is_whole:
        ended = f"{len(outcomes)} of {runs[-1].n_requests} requests had ended"
        yield f"{label}: interrupted when {ended}; the others count for nothing"
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    for kind, n in Counter(failure.kind for failure in failures).most_common():
        first = next(failure for failure in failures if failure.kind == kind)
        yield f"{label}: {n} of {len(outcomes)} requests failed: {kind} ({first})"
    if any(not outcome.has_usage for outcome in done):
        yield f"{label} sends no usage, or too low a one: each piece of text counts as a token"
    elif sum(outcome.n_pieces for outcome in done) < _MERGED * sum(outcome.output_tokens for outcome in done):
        yield f"{label} sends several tokens in a piece of text: inter-token times are those between pieces"
    if server.unknown:
        yield f"{label} refuses {' and '.join(server.unknown)}: requests are sent without"
    if n_early := sum(outcome.ended_early for outcome in done):
        yield f"{label}: {n_early} of {len(done)} texts ended before their length"
    if n_again := sum(outcome.asked_again for outcome in outcomes):
        yield f"{label} closed kept-alive connections: {n_again} requests were sent twice"
    if any(run.client_seconds > _BUSY * run.seconds for run in runs):
        share = max(run.client_seconds / run.seconds for run in runs)
        yield f"{label}: the client took {100 * share:.0f}% of a core; it may be what is measured"
