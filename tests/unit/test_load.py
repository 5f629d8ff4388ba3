"""The parts of `cppbatch bench serve`: requests, when they are sent, how a stream is read, what comes of many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec
import pytest

from cppbatch.bench.load.client import RequestOutcome, TargetServer
from cppbatch.bench.load.compare_servers import poisson_arrivals, run_open_loop
from cppbatch.bench.load.completion_stream import CompletionStream, RequestFailure
from cppbatch.bench.load.results import LoadIdeal, ServerRun, server_row
from cppbatch.bench.load.workload import LoadRequest, Workload
from cppbatch.bench.prompts import Lengths
from cppbatch.bench.report import format_cell
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.engine.ideal import BareCosts
from cppbatch.errors import ConfigError

MIXED = Workload(kind="mixed", n_requests=24, prompt_tokens=Lengths(8, 128), output_tokens=Lengths(4, 32))

SHARED = Workload(
    kind="shared-prefix", n_requests=8, prompt_tokens=Lengths(5, 5), output_tokens=Lengths(4, 4), prefix_tokens=60
)


def fan_out(by: Any) -> Workload:
    sizes: dict[str, Any] = {"prompt_tokens": Lengths(20, 20), "output_tokens": Lengths(4, 4)}
    return Workload(kind="fan-out", n_requests=12, samples=4, samples_by=by, **sizes)


def test_a_seed_gives_the_same_requests_and_each_repeat_new_ones() -> None:
    assert MIXED.requests(1, 0) == MIXED.requests(1, 0)
    runs = [MIXED.requests(1, 0), MIXED.requests(1, 1), MIXED.requests(2, 0)]
    openings = {request.prompt[:40] for requests in runs for request in requests}
    assert len(openings) == 3 * 24
    for requests in runs:  # all runs have the same work
        assert sorted(request.max_tokens for request in requests) == MIXED.output_tokens.spread(24)
    assert (MIXED.output_tokens.spread(24)[0], MIXED.output_tokens.spread(24)[-1]) == (4, 32)


def test_a_shared_prefix_is_shared_within_a_repeat_only() -> None:
    prompts = [[request.prompt for request in SHARED.requests(1, repeat)] for repeat in (0, 1)]
    first = [{text[:250] for text in texts} for texts in prompts]
    assert [len(each) for each in first] == [1, 1]
    assert first[0] != first[1]
    assert len(set(prompts[0])) == 8


def test_a_prefix_with_a_seed_of_its_own_is_shared_by_all_repeats_and_runs() -> None:
    own = msgspec.structs.replace(SHARED, prefix_seed=5)
    prompts = [str(request.prompt) for seed in (1, 2) for repeat in (0, 1) for request in own.requests(seed, repeat)]
    assert len({prompt[:250] for prompt in prompts}) == 1
    assert len(set(prompts)) == 4 * 8


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_texts_are_as_long_as_the_model_makes_them(name: Any) -> None:
    workload = Workload(kind=name, n_requests=4, prompt_tokens=Lengths(1, 1), output_tokens=Lengths(50, 50))
    requests = workload.requests(1, 0)
    assert requests == workload.requests(1, 0)
    assert len({request.prompt for request in [*requests, *workload.requests(1, 1)]}) == 8
    assert {(request.max_tokens, request.ignore_eos) for request in requests} == {(50, False)}
    server = TargetServer(label="a", url="http://a", model="m", endpoint="chat")
    bodies = [msgspec.json.decode(server.body(request)) for request in requests]
    assert not any("ignore_eos" in body for body in bodies)
    assert all(("response_format" in body) == (name == "json") for body in bodies)
    sampled = [(body["temperature"], body.get("seed")) for body in bodies]
    assert sampled == ([(0.8, i) for i in range(4)] if name == "free" else [(0, None)] * 4)


def test_samples_of_a_prompt_differ_by_seed_or_are_one_request() -> None:
    apart, together = fan_out("requests").requests(1, 0), fan_out("n").requests(1, 0)
    assert len({request.prompt for request in apart}) == 3
    assert len({request.seed for request in apart}) == len(apart) == 12
    assert [request.n for request in together] == [4, 4, 4]
    assert [request.prompt for request in together] == [request.prompt for request in apart[::4]]


@pytest.mark.parametrize("sizes", [{"n_requests": 0}, {"prompt_tokens": Lengths(9, 3)}, {"samples": 0}])
def test_sizes_that_no_work_has_are_refused(sizes: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"n_requests": 1, "prompt_tokens": Lengths(1, 2)}
    with pytest.raises(ConfigError, match="--"):
        Workload(kind="mixed", output_tokens=Lengths(1, 1), **valid | sizes)


def test_poisson_arrivals_are_seeded_and_keep_to_the_rate() -> None:
    times = poisson_arrivals(2000, 50, seed=1, repeat=0)
    assert times == poisson_arrivals(2000, 50, seed=1, repeat=0) != poisson_arrivals(2000, 50, seed=1, repeat=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert 1900 / 50 < times[-1] < 2100 / 50


def hold_up() -> None:
    """Everybody."""
    time.sleep(0.05)


async def test_an_open_loop_waits_for_no_answer_and_counts_from_when_a_request_was_due() -> None:
    sent: list[tuple[float, float]] = []
    all_are_sent = asyncio.Event()

    async def send(_request: LoadRequest, due: float) -> None:
        sent.append((due, perf_counter() - due))
        hold_up()
        if len(sent) == 4:
            all_are_sent.set()
        await asyncio.wait_for(all_are_sent.wait(), 60)  # no answer comes before

    await run_open_loop([LoadRequest("a", 1)] * 4, send, [0, 0.01, 0.02, 0.03])
    assert [due - sent[0][0] for due, _ in sent] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert sent[3][1] > 0.1  # its lateness counts


def stream(*events: str) -> bytes:
    return "".join(f"data: {event}\r\n\r\n" for event in events).encode()


def test_times_are_those_of_the_texts_of_each_completion() -> None:
    reading = CompletionStream()
    reading.feed(stream('{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'), 1.0)
    reading.feed(stream('{"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}'), 2.0)
    reading.feed(stream('{"choices":[{"index":1,"delta":{"content":"b"}}]}'), 2.5)
    reading.feed(stream('{"choices":[{"index":0,"delta":{"content":"a"}}]}'), 4.0)
    reading.feed(stream('{"choices":[{"index":1,"delta":{"content":"b"}}]}'), 5.0)
    reading.feed(stream('{"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}', "[DONE]"), 6.0)
    reading.finish(6.0)
    assert (reading.first, reading.gaps, reading.n_chunks) == (2.0, [2.0, 2.5], 4)
    assert reading.texts == ["", "b", "a", "b"], "without reasoning"


def test_a_stream_reads_the_same_however_it_is_cut() -> None:
    data = b": a comment\n\n" + stream(
        '{"choices":[{"text":"é"}]}', '{"choices":[],"usage":{"completion_tokens":7}}', "[DONE]"
    )
    for size in range(1, 40):
        reading = CompletionStream()
        for i in range(0, len(data), size):
            reading.feed(data[i : i + size], float(i))
        reading.finish(0)
        assert reading.n_chunks == 1
        assert reading.usage
        assert reading.usage.completion_tokens == 7


def made_up(ttft: float, **fields: Any) -> RequestOutcome:
    return RequestOutcome(time_to_first_token=ttft, end_to_end=ttft + 1, gaps=[0.01, 0.03], output_tokens=3, **fields)


def a_run(outcomes: list[RequestOutcome], seconds: float = 10, costs: Sequence[BareCosts] = ()) -> ServerRun:
    return ServerRun(
        server=TargetServer(label="fake", url="http://someone:secret@127.0.0.1:1", model="fake"),
        repeat=0,
        n_requests=101,
        outcomes=outcomes,
        seconds=seconds,
        is_complete=True,
        costs=list(costs),
    )


def test_rates_percentiles_and_goodput_are_right() -> None:
    done = [made_up(i / 100, prompt_tokens=7, cached_tokens=i % 2) for i in range(101)]  # 0 to 1 s
    failed = RequestOutcome(failure=RequestFailure("HTTP 500", "full"))
    slow = a_run([*done, failed], seconds=20)
    figures = server_row([a_run([*done, failed]), slow, a_run([*done, failed])], bound_ms=250)
    for name, expected in {
        "requests": 306, "failed": 3, "failures": {"HTTP 500": 3}, "url": "http://127.0.0.1:1",
        "ttft_ms_p50": 500, "ttft_ms_p95": 950, "ttft_ms_p99": 990, "inter_token_ms_p50": 20, "tpot_ms_p50": 20,
        "end_to_end_s_p95": 1.95,
        "output_tokens_per_second": 30.3, "total_tokens_per_second": 101, "requests_per_second": 10.1,
        "goodput_per_second": 2.6, "cached_percent": 100 * 50 / 707,
    }.items():  # fmt: skip
        assert getattr(figures[name], "median", figures[name]) == (
            expected if isinstance(expected, (str, dict)) else pytest.approx(expected)
        )
    assert figures["requests_per_second"].low == pytest.approx(5.05)


def test_of_ideal_counts_what_was_answered_without_cached_prompts() -> None:
    costs = BareCosts.of([(1, 0.010), (2, 0.016)], [(64, 0.001)])
    answered = [
        made_up(1, due=5.0, prompt_tokens=500, cached_tokens=100),
        made_up(1, due=5.0, prompt_tokens=100, cached_tokens=0, samples=1),
        RequestOutcome(failure=RequestFailure("HTTP 500", "full")),
    ]
    closed = LoadIdeal(measure=lambda: costs, most_rows=16, clients=2)
    figures = server_row([a_run(answered, seconds=2, costs=[costs])], None, closed)
    needed = (400 + 100) * 0.001 + 2 * 0.016  # of 3 tokens each, the first comes from the prompt
    assert figures["of_ideal"].median == pytest.approx(needed / 2)
    twice = BareCosts.of([(1, 0.020), (2, 0.032)], [(64, 0.002)])  # the machine was slower after the run
    figures = server_row([a_run(answered, seconds=2, costs=[costs, twice])], None, closed)
    assert figures["of_ideal"].median == pytest.approx(1.5 * needed / 2)
    late = [made_up(1, due=5.0, prompt_tokens=100), made_up(1, due=6.0, prompt_tokens=100)]
    figures = server_row([a_run(late, seconds=2, costs=[costs])], None, LoadIdeal(closed.measure, 16, clients=None))
    assert figures["of_ideal"].median == pytest.approx((1 + 0.1 + 2 * 0.010) / 2)


def test_of_ideal_is_not_known_without_usage_or_costs() -> None:
    costs = BareCosts.of([(1, 0.010)], [(64, 0.001)])
    ideal = LoadIdeal(lambda: costs, 16, 2)
    assert server_row([a_run([made_up(1)], costs=[costs])], None, ideal)["of_ideal"] is None
    assert server_row([a_run([made_up(1, prompt_tokens=7)])], None, ideal)["of_ideal"] is None
    assert server_row([a_run([made_up(1, prompt_tokens=7)])], None)["of_ideal"] is None


def test_unmeasured_figures_are_none() -> None:
    figures = server_row([a_run([RequestOutcome(failure=RequestFailure("timeout"))])], bound_ms=None)
    assert figures["output_tokens_per_second"].median == 0
    assert [figures[name] for name in ("ttft_ms_p50", "total_tokens_per_second", "goodput_per_second")] == [None] * 3
    assert format_cell(figures["ttft_ms_p50"], 1) == "-"
