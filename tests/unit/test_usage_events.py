"""`GenerationRequest.usage_events`: which events of a request report its counts and times."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cppbatch import FinishReason, GenerationEvent, InvalidRequest
from cppbatch.cluster.engines.in_flight import InFlightRequest
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.link import Submit
from cppbatch.cluster.worker.threads import StepLoop
from cppbatch.engine.core import EngineCore
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.request import GenerationRequest, RequestUsage
from tests.support.fakes import EOG, drain, fake_engine, greedy

PROMPT = list(range(1, 41))


def engine() -> BatchInferenceEngine:
    """Its steps compute at most 16 tokens of a prompt."""
    return fake_engine(n_batch=16, n_ctx=256, sharing="cells")


def events_of(engine: BatchInferenceEngine, usage_events: Any) -> list[GenerationEvent]:
    engine.add_request(PROMPT, greedy(4, ignore_eos=True), usage_events=usage_events)
    return drain(engine)


def prefilled(events: list[GenerationEvent]) -> list[int]:
    return [event.usage.prefilled_tokens for event in events if event.usage]


def test_without_it_only_the_last_event_has_usage() -> None:
    events = events_of(engine(), "end")
    assert [bool(event.usage) for event in events] == [False] * 3 + [True]
    assert prefilled(events) == [40]


def test_the_admission_and_each_step_of_the_prefill_are_reported() -> None:
    events = events_of(engine(), "prefill")
    assert [len(event.tokens) for event in events] == [0, 0, 0, 1, 1, 1, 1]
    assert prefilled(events) == [0, 16, 32, 40, 40]  # the last two: with the first token, and at the end
    first = events[0].usage
    assert first
    assert (first.prompt_tokens, first.completion_tokens) == (40, 0)
    assert first.total_seconds == first.queue_seconds  # nothing is computed yet
    times = [event.usage.total_seconds for event in events if event.usage]
    assert times == sorted(times)


def test_a_cached_prefix_is_reported_at_admission() -> None:
    used = engine()
    events_of(used, "end")
    first = events_of(used, "prefill")[0].usage
    assert first
    assert first.cached_tokens == first.prefilled_tokens > 0


def test_a_request_that_ends_in_its_prefill_reports_the_tokens_computed_so_far() -> None:
    used = engine()
    events_of(used, "end")
    used.add_request([*PROMPT, *PROMPT], greedy(4), request_id="a")
    used.step()
    used.cancel("a")
    last = drain(used)[-1].usage
    assert last
    assert (last.cached_tokens, last.prefilled_tokens) == (40, 56)


def test_the_progress_of_a_preempted_request_does_not_go_back() -> None:
    used = engine()
    used.add_request(PROMPT, greedy(1), usage_events="prefill")
    events = [*used.step(), *used.step()]
    used.core.scheduler.preempt_all()
    used.core.kv.apply()
    used.core.restart()
    used.cancel("request-1")
    assert prefilled([*events, *drain(used)]) == [0, 16, 32, 32]


def test_all_events_count_the_tokens_so_far() -> None:
    events = events_of(engine(), "all")
    assert [event.usage.completion_tokens for event in events if event.usage] == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("usage_events", ["prefill", "all"])
def test_nothing_follows_the_last_event_of_a_text_that_ends_at_once(usage_events: Any) -> None:
    its = engine()
    its.add_request(PROMPT, greedy(4, logit_bias={min(EOG): 100.0}), usage_events=usage_events)
    events = drain(its)
    assert events[-1].finish_reason is FinishReason.STOP
    assert prefilled(events) == [0, 16, 32, 40]
    assert not its.has_work


def test_other_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="usage_events: is 'some'; it must be one of end, prefill, all"):
        GenerationRequest(id="x", prompt="x", usage_events="some")  # type: ignore[arg-type]


def test_an_admission_is_reported_before_the_prompt_is_computed() -> None:
    """The output thread sends the report while the first step of the prefill computes."""
    computing, reported = threading.Event(), threading.Event()
    events: list[GenerationEvent] = []
    used = engine()
    decode = used.core.runtime.context.decode

    def slow_decode(batch: Any) -> None:
        computing.set()
        assert reported.wait(10), "nothing is reported while the prompt is computed"
        decode(batch)

    used.core.runtime.context.decode = slow_decode  # type: ignore[method-assign]

    def send(new: list[GenerationEvent]) -> None:
        events.extend(new)
        assert computing.wait(10)
        reported.set()
        if new[-1].finish_reason:
            loop.stop()

    loop = StepLoop(send)
    core = EngineCore(used.config, runtime=used.core.runtime, on_admitted=loop.output_thread.put)
    core.add(core.make_sequence(GenerationRequest(id="a", prompt=PROMPT, params=greedy(1), usage_events="prefill")))
    loop.run(core)
    assert prefilled(events)[0] == 0
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_a_slow_reader_gets_the_latest_usage_of_merged_events() -> None:
    collector = OutputCollector("a")
    usage = RequestUsage(
        prompt_tokens=3, completion_tokens=1, queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0
    )
    collector.put(GenerationEvent(request_id="a", tokens=[1], usage=usage))
    collector.put(GenerationEvent(request_id="a", tokens=[2]))
    assert (await collector.get()).usage == usage


async def test_reports_come_one_by_one_and_before_tokens() -> None:
    collector = OutputCollector("a")
    reports = [GenerationEvent(request_id="7", usage=usage_at(n)) for n in (0, 16, 32)]
    tokens = [GenerationEvent(request_id="7", tokens=[n], text=str(n)) for n in (1, 2)]
    for event in [*reports, *tokens]:
        collector.put(event)
    read = [await collector.get() for _ in range(4)]
    assert prefilled(read) == [0, 16, 32]
    assert {event.request_id for event in read} == {"a"}
    assert (read[3].tokens, read[3].text) == ([1, 2], "12")


async def test_a_report_is_not_a_token() -> None:
    """Otherwise a request that always crashes its worker while its prompt is computed would never be blamed."""
    request = InFlightRequest("0", GenerationRequest(id="a", prompt="x"))
    report = GenerationEvent(request_id="0", usage=usage_at(16))
    assert report.is_report
    request.put(report)
    message = request.message()
    assert isinstance(message, Submit)
    assert (message.resume.tokens, message.resume.first_token_seconds) == ([], 0)
    assert not GenerationEvent(request_id="0", tokens=[1], usage=usage_at(16)).is_report
    assert not GenerationEvent(request_id="0", finish_reason=FinishReason.STOP, usage=usage_at(16)).is_report


def usage_at(n: int) -> RequestUsage:
    """An event of a request with its prompt computed up to token `n`."""
    return RequestUsage(
        prompt_tokens=40,
        prefilled_tokens=n,
        completion_tokens=0,
        queue_seconds=0.0,
        first_token_seconds=0.0,
        total_seconds=0.0,
    )
