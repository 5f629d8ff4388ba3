"""`cppbatch bench serve` counts what it receives, whatever a server does, and reports the problems of a server."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer

from cppbatch.bench.load.client import LoadClient, RequestOutcome, TargetServer
from cppbatch.bench.load.compare_servers import compare_servers, run_closed_loop
from cppbatch.bench.load.load_report import LoadReport
from cppbatch.bench.load.results import LoadIdeal
from cppbatch.bench.load.target import Target, probe_server
from cppbatch.bench.load.workload import LoadRequest, LoadSettings, Workload
from cppbatch.bench.prompts import Lengths
from cppbatch.cli.main import cli
from cppbatch.engine.ideal import BareCosts
from cppbatch.errors import ConfigError, UnusableServer
from tests.support.fake_openai import FakeOpenAI, on_a_thread

FIXED = Workload(kind="fixed", n_requests=6, prompt_tokens=Lengths(8, 8), output_tokens=Lengths(4, 4))


def nobody_looks(_label: str, _repeat: int, _n_done: int, _n_requests: int) -> None:
    pass


def server_at(url: object) -> TargetServer:
    return TargetServer(label="fake", url=str(url).rstrip("/"), model="fake")


async def send_all(fake: FakeOpenAI, n: int = 5, n_clients: int = 1, timeout: float = 10) -> list[RequestOutcome]:
    """`n` requests of 4 tokens, from some clients."""
    outcomes = []
    async with TestServer(fake.app()) as http, LoadClient(server_at(http.make_url("")), timeout) as client:

        async def send(request: LoadRequest, due: float) -> None:
            outcomes.append(await client.send(request, due))

        await run_closed_loop([LoadRequest("a b c", 4)] * n, send, n_clients)
    return outcomes


async def test_a_closed_loop_never_has_more_in_flight_than_clients() -> None:
    fake = FakeOpenAI(first_after=0.01)
    outcomes = await send_all(fake, n=24, n_clients=4)
    assert len(outcomes) == 24
    assert fake.most_running == 4


async def test_times_of_a_real_stream_fit_the_servers() -> None:
    (outcome,) = await send_all(FakeOpenAI(first_after=0.1, between=0.04), n=1)
    assert outcome.time_to_first_token >= 0.1
    assert len(outcome.gaps) == 3
    assert min(outcome.gaps) > 0.02
    assert outcome.end_to_end >= 0.1 + 4 * 0.04
    assert outcome.end_to_end >= outcome.time_to_first_token + sum(outcome.gaps)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.has_usage) == (3, 4, True)


FAULTS = [
    "HTTP 500", "no stream", "timeout", "empty answer", "connection closed", "stream cut short", "error in the stream",
    "unreadable answer",
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failed_request_is_counted_by_its_reason_and_the_others_continue(fault: str) -> None:
    outcomes = await send_all(FakeOpenAI(faults={1: fault}), n=3, timeout=0.5 if fault == "timeout" else 10)
    assert [outcome.failure.kind if outcome.failure else None for outcome in outcomes] == [None, fault, None]
    assert [outcome.output_tokens for outcome in outcomes] == [4, 0, 4]


async def test_a_kept_alive_connection_that_is_closed_is_not_a_failure() -> None:
    fake = FakeOpenAI(requests_per_connection=2)
    outcomes = await send_all(fake, n=7)
    assert not any(outcome.failure for outcome in outcomes)
    assert [outcome.resent for outcome in outcomes].count(True) == 2
    assert len(fake.bodies) == 7


async def test_a_new_connection_that_is_closed_is_a_failure() -> None:
    outcomes = await send_all(FakeOpenAI(requests_per_connection=0), n=2)
    assert [outcome.failure.kind for outcome in outcomes if outcome.failure] == ["connection closed"] * 2
    assert not any(outcome.resent for outcome in outcomes)


async def test_without_usage_pieces_of_text_are_counted() -> None:
    outcomes = await send_all(FakeOpenAI(has_usage=False), n=2)
    assert [(each.output_tokens, each.prompt_tokens, each.has_usage) for each in outcomes] == [(4, None, False)] * 2


async def test_usage_that_is_less_than_the_received_tokens_is_ignored() -> None:
    """llama-server reports the tokens of one text if `n` were requested."""
    outcomes = await send_all(FakeOpenAI(tokens_told=2), n=2)
    assert [(each.output_tokens, each.prompt_tokens, each.has_usage) for each in outcomes] == [(4, 3, False)] * 2


def a_load(workload: Workload = FIXED, **settings: Any) -> LoadSettings:
    defaults: dict[str, Any] = {"concurrency": 3, "warmup": 2, "repeats": 2, "seed": 7}
    return LoadSettings(workload=workload, **defaults | settings)


def shown(report: LoadReport) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(report.table())
    return capture.get()


def test_servers_are_measured_alternately_with_the_same_prompts_and_compared() -> None:
    quick, slow = FakeOpenAI(between=0.005), FakeOpenAI(between=0.02, has_usage=False)
    seen: list[tuple[str, int]] = []
    ends: set[tuple[int, int]] = set()

    def look(label: str, repeat: int, n_done: int, n_requests: int) -> None:
        seen.append((label, repeat))
        if n_done == n_requests:
            ends.add((repeat, n_done))

    with on_a_thread(quick.app()) as one, on_a_thread(slow.app()) as other:
        report = compare_servers(
            [Target("quick", one), Target("slow", other)],
            a_load(),
            look,
        )
    warm_up_then_each_repeat = [("quick", -1), ("slow", -1), ("quick", 0), ("slow", 0), ("slow", 1), ("quick", 1)]
    assert list(dict.fromkeys(seen)) == warm_up_then_each_repeat
    assert ends == {(-1, 2), (0, 6), (1, 6)}  # how many there are is known from the start
    assert len(quick.bodies) == 1 + 2 + 2 * 6  # a look, the warm-up, the repeats
    prompts = [sorted(body["prompt"] for body in fake.bodies[3:]) for fake in (quick, slow)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 12
    first, second = report.rows
    assert (first["requests"], first["failed"]) == (12, 0)
    ratio = report.ratios["slow"]["output_tokens_per_second"]
    assert 0 < ratio.low <= ratio.high < 1
    assert first["output_tokens_per_second"].median > second["output_tokens_per_second"].median
    table = shown(report)
    assert "slow / quick" in table
    assert f"{ratio.median:.2f}" in table
    assert "slow sends no usage, or one that is too low" in table


def test_the_costs_of_the_ideal_are_those_around_each_run() -> None:
    fake = FakeOpenAI()
    requests_before: list[int] = []

    def measure() -> BareCosts:  # each time twice as slow as before
        slower = 2 ** len(requests_before)
        requests_before.append(len(fake.bodies))
        return BareCosts.of([(1, 0.010 * slower)], [(8, 0.001 * slower)])

    with on_a_thread(fake.app()) as url:
        report = compare_servers(
            [Target("fake", url)], a_load(), nobody_looks, LoadIdeal(measure, most_rows=1, clients=None)
        )
    assert requests_before == [3, 9, 15]  # after the warm-up, and after each repeat of 6
    assert report.rows[0]["of_ideal"].low > 0
    assert "a prompt token 2 ms, a row 20 ms" in " ".join(report.notes)


def test_failures_and_early_ends_are_below_the_table() -> None:
    with on_a_thread(FakeOpenAI(faults={4: "HTTP 500"}).app()) as url:
        report = compare_servers([Target("fake", url)], a_load(repeats=1), nobody_looks)
    assert report.rows[0]["failures"] == {"HTTP 500": 1}
    assert "fake: 1 of 6 requests failed: HTTP 500 (out of luck)" in shown(report)


async def test_a_strict_server_gets_only_its_own_fields() -> None:
    fake = FakeOpenAI(known_fields={"model", "prompt", "max_tokens", "temperature", "stream"})
    async with TestServer(fake.app()) as http:
        server = await look_at(http)
    assert server.unknown == ("ignore_eos", "stream_options")


NOBODY = Target("nobody", "http://127.0.0.1:9")


async def look_at(http: BaseTestServer, **given: Any) -> TargetServer:
    settings: dict[str, Any] = {"model": None, "endpoint": "completions", "api_key": None, "timeout": 5} | given
    return await probe_server(Target("fake", str(http.make_url("")).rstrip("/")), **settings)


UNUSABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such model": ({}, {"model": "gpt-9"}, "model gpt-9 not found"),
    "no key": ({"api_key": "s3cret"}, {}, "requires an API key .* --api-key"),
    "another key": ({"api_key": "s3cret"}, {"api_key": "guess"}, "rejected this API key"),
    "no such endpoint": ({}, {"endpoint": "chat"}, "has no /v1/chat/completions; try --endpoint completions"),
    "it does not stream": ({"faults": {0: "no stream"}}, {}, "not a stream of events"),
    "it fails": ({"faults": {0: "HTTP 500"}}, {}, "HTTP 500: out of luck"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_a_server_that_cannot_be_measured_is_reported_before_the_load(case: str) -> None:
    settings, given, message = UNUSABLE[case]
    async with TestServer(FakeOpenAI(**settings).app()) as http:
        with pytest.raises(UnusableServer, match=message):
            await look_at(http, **given)


async def test_a_web_server_of_another_kind_is_reported_as_well() -> None:
    async with TestServer(web.Application()) as http:
        with pytest.raises(UnusableServer, match="not an OpenAI-compatible server: GET /v1/models returned status 404"):
            await look_at(http)
    with pytest.raises(UnusableServer, match=r"cannot connect to .*\(Connection refused\): start the server"):
        await probe_server(NOBODY, model=None, endpoint="completions", api_key=None, timeout=5)


def test_addresses_are_read_as_people_write_them() -> None:
    assert Target.read("http://127.0.0.1:8080/v1/") == Target("127.0.0.1:8080", "http://127.0.0.1:8080")
    assert Target.read("ours=https://host/openai/v1?a=b") == Target("ours", "https://host/openai/v1?a=b")
    assert Target.read("http://me:pw@host:1").label == "host:1"
    for wrong in ("127.0.0.1:8080", "ours=", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="--url"):
            Target.read(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--url http://127.0.0.1:9 --rate 2 --concurrency 2", "cannot be combined"),
        ("--url a=http://127.0.0.1:9 --url a=http://127.0.0.1:8", "the same name a"),
        ("--url a=http://127.0.0.1:9 --url b=http://127.0.0.1:9/", "the same address http://127.0.0.1:9"),
        ("--url http://127.0.0.1:9 --url http://127.0.0.1:8 --label x", "--label x"),
        ("--url http://127.0.0.1:9 --api-key sécret", "--api-key contains characters"),
        ("--url http://127.0.0.1:9 --rate 0", "--rate is 0"),
        ("--url http://127.0.0.1:9 --repeats 0", "--repeats is 0"),
        ("--url http://127.0.0.1:9 --workload quote --prompt-tokens 9", "--prompt-tokens does not apply to"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli(["bench", "serve", *arguments.split()], standalone_mode=False)


def test_texts_are_sent_as_chats() -> None:
    fake = FakeOpenAI(has_chat=True)
    with on_a_thread(fake.app()) as url:
        few = "--requests 2 --repeats 1 --warmup 1 --output-tokens 5".split()
        cli(["bench", "serve", "--url", url, "--workload", "json", *few], standalone_mode=False)
    assert all("orders" in body["messages"][0]["content"] for body in fake.bodies[1:])  # the first is a look
    assert len(fake.bodies) == 1 + 1 + 2
