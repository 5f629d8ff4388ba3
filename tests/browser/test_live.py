"""The Live tab: the batch, its shared KV cells, a worker that dies, a server that is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PageErrors
from tests.browser.gate import Gate
from tests.browser.page_checks import axe_violations, dark, open_tab, overflow, phone
from tests.support.batch_files import wait_until
from tests.support.server_process import ServerProcess

SHARED = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def batch_server(server: ServerProcess) -> Iterator[ServerProcess]:
    """16 sequences at once in one set of cells. Nothing runs; streams that a failed test leaves behind end with it."""
    server.wait_idle()
    yield server
    for stream in Streams.open:
        stream.stop()
    Streams.open.clear()


class Streams(threading.Thread):
    """16 streaming requests with one shared prompt, in one request. `finish_reasons`: of the choices that ended.

    With `LONG` tokens, over three minutes of the paced server, they do not end while a test looks at the page, and the
    test stops them.
    """

    LONG = 20_000
    open: ClassVar[list[Streams]] = []

    def __init__(self, server: ServerProcess, max_tokens: int = 60) -> None:
        super().__init__(daemon=True)
        prompts = [f"{SHARED}Number {i}:" for i in range(16)]
        body = {"prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{server.url}/v1/completions", data, headers)
        self.finish_reasons: list[str] = []
        self._stopped = threading.Event()
        self.open.append(self)
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=150) as answer:
            for line in answer:
                if self._stopped.is_set():
                    return
                if line.startswith(b"data: {"):
                    reasons = [choice["finish_reason"] for choice in json.loads(line[6:])["choices"]]
                    self.finish_reasons += filter(None, reasons)

    def stop(self) -> None:
        """Closes the connection, which ends the request."""
        self._stopped.set()
        self.join(60)


def rows(page: Page) -> Locator:
    return page.locator("tr[data-state]")


def cells(page: Page) -> Locator:
    return page.get_by_role("list", name="Segments of KV cells")


def test_16_streams_are_16_rows_and_their_shared_prompt_is_one_block(page: Page, batch_server: ServerProcess) -> None:
    open_tab(page, f"{batch_server.url}/", "live")
    streams = Streams(batch_server, Streams.LONG)
    expect(rows(page)).to_have_count(16)
    expect(page.locator("tr[data-state=decode]")).to_have_count(16)
    shared = cells(page).locator("button.shared[title*='held by 16:'], button.shared[title*='held by 17:']")
    expect(shared).to_have_count(1)
    expect(shared).to_have_attribute("title", re.compile(r"stored once, held by 1[67]: #\d+(, #\d+){15}"))
    own = cells(page).locator("button.own")  # without a text where a long cached prefix makes it narrow
    expect(own).to_have_count(16)

    shared.click()
    expect(page.locator("tr.picked")).to_have_count(16)
    shared.click()
    expect(page.locator("tr.picked")).to_have_count(0)
    first = rows(page).nth(0).get_by_role("button")
    number = first.inner_text()
    first.press("Enter")
    expect(shared).to_have_attribute("aria-pressed", "true")
    expect(own.and_(page.locator(f"[aria-pressed=true][title$=' {number}']"))).to_have_count(1)
    streams.stop()
    expect(rows(page)).to_have_count(0)


def test_rows_keep_their_positions_until_their_sequences_end(page: Page, batch_server: ServerProcess) -> None:
    open_tab(page, f"{batch_server.url}/", "live")
    page.evaluate("""() => {
      window.seen = []
      const look = () => {
        window.seen.push([...document.querySelectorAll('tr[data-state]')].map((row) => row.dataset.number))
        requestAnimationFrame(look)
      }
      look()
    }""")
    streams = Streams(batch_server)
    streams.join(150)
    expect(rows(page)).to_have_count(0)
    seen = page.evaluate("window.seen")
    order = max(seen, key=len)
    assert len(order) == 16
    assert all(numbers == [each for each in order if each in numbers] for numbers in seen)


def test_a_killed_worker_is_shown_on_the_page_and_the_streams_continue(page: Page, batch_server: ServerProcess) -> None:
    open_tab(page, f"{batch_server.url}/", "live")
    streams = Streams(batch_server, Streams.LONG)
    expect(page.locator("tr[data-state=decode]")).to_have_count(16)
    worker = batch_server.get("/stats")["workers"][0]
    os.kill(worker["pid"], signal.SIGKILL)
    workers = page.get_by_role("list", name="Workers")
    expect(workers).to_contain_text("its requests continue")
    expect(workers).to_contain_text(re.compile(r"restarted .* ago: its requests continue"))
    expect(page.locator("tr[data-state=decode]")).to_have_count(16)
    assert streams.finish_reasons == []
    streams.stop()
    expect(workers).to_contain_text(f"{worker['restarts'] + 1} restart")


def test_nothing_runs_and_a_button_shows_a_batch(page: Page, batch_server: ServerProcess) -> None:
    tab = open_tab(page, f"{batch_server.url}/", "live")
    expect(tab.get_by_role("heading", name="Nothing is running")).to_be_visible()
    tab.get_by_role("button", name="Copy the command").click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl {batch_server.url}/v1/completions ")
    tab.get_by_role("button", name="Send 16 sample requests").click()
    expect(rows(page)).to_have_count(16)
    expect(cells(page).get_by_role("button", name="shared by 16")).to_have_count(1)
    expect(page.get_by_text(re.compile("16 samples: .* tokens in"))).to_be_visible(timeout=60_000)
    expect(tab.get_by_role("heading", name="Nothing is running")).to_be_visible()


def example(page: Page, url: str, change: Callable[[dict[str, Any]], None]) -> Locator:
    """The tab with a snapshot that is an example with changes."""
    snapshot = json.loads((Path(__file__).parents[1] / "live_example.json").read_text())["full"]
    snapshot["workers"] = snapshot["workers"][:1]
    change(snapshot)
    event = f"data: {json.dumps(snapshot)}\n\n"
    page.route("**/live", lambda route: route.fulfill(content_type="text/event-stream", body=event))
    return open_tab(page, url, "live")


def test_requests_that_are_not_in_the_batch_yet_or_any_more_are_named(page: Page, url: str) -> None:
    def none_runs(snapshot: dict[str, Any]) -> None:
        worker = snapshot["workers"][0]
        worker["in_flight"] = 16
        worker["engine"] |= {"rows": [], "queue": [], "waiting": 2}

    tab = example(page, url, none_runs)
    workers = tab.get_by_role("list", name="Workers")
    expect(workers).to_contain_text("16 unfinished requests (14 being tokenised or finished)")


@pytest.mark.parametrize(("is_idle", "shown"), [(True, "–"), (False, "39%")])
def test_the_share_of_the_ideal_speed_is_explained_and_shown_only_while_something_runs(
    page: Page, url: str, is_idle: bool, shown: str
) -> None:
    def change(snapshot: dict[str, Any]) -> None:
        engine = snapshot["workers"][0]["engine"]
        engine["of_ideal"] = 0.39
        if is_idle:
            engine |= {"rows": [], "queue": [], "waiting": 0}

    tab = example(page, url, change)
    figure = tab.locator("dl > div", has_text="of ideal speed")
    expect(figure.locator("dd")).to_have_text(shown)
    expect(figure).to_have_attribute("title", re.compile("the time that its tokens need"))


def test_the_stream_is_closed_while_the_live_tab_is_hidden(page: Page, gate: Gate) -> None:
    started: list[str] = []
    ended: list[str] = []
    page.on("request", lambda request: started.append(request.url))
    page.on("requestfailed", lambda request: ended.append(request.url))
    open_tab(page, f"{gate.url}/", "chat")
    tab = open_tab(page, f"{gate.url}/", "live")
    expect(tab.get_by_role("heading", name="KV cells")).to_be_visible()
    live, before = f"{gate.url}/live", gate.n_connections
    assert (started.count(live), ended.count(live)) == (1, 0)

    with page.expect_event("requestfailed", lambda request: request.url == live):  # another tab of the page
        page.get_by_role("link", name="Chat").click()
    wait_until(lambda: gate.n_connections < before)
    with page.expect_request(live):
        page.get_by_role("link", name="Live").click()
    with page.expect_event("requestfailed", lambda request: request.url == live):  # another tab of the browser
        page.evaluate(_HIDE, True)
    wait_until(lambda: gate.n_connections < before)
    with page.expect_request(live):
        page.evaluate(_HIDE, False)
    assert (started.count(live), ended.count(live)) == (3, 2)


_HIDE = """(hidden) => {
    Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_server_that_is_gone_and_comes_back(page: Page, gate: Gate, errors: PageErrors) -> None:
    errors.allow("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")
    tab = open_tab(page, f"{gate.url}/", "live")
    expect(tab.get_by_role("heading", name="KV cells")).to_be_visible()
    gate.close()
    expect(tab.get_by_role("alert")).to_have_text(
        re.compile(r"^Lost the server\. [^.]+\. Retrying in [\d.]+ m?s\. Showing the last known state\.$")
    )
    gate.open()
    expect(tab.get_by_role("alert")).to_have_count(0)


def test_times_of_the_charts_are_chosen_by_keyboard(page: Page, batch_server: ServerProcess) -> None:
    open_tab(page, f"{batch_server.url}/", "live")
    streams = Streams(batch_server, max_tokens=20)
    streams.join(150)
    chart = page.get_by_role("slider", name="Batch size: time")
    expect(chart).to_have_attribute("aria-valuetext", re.compile("^now: "))
    chart.focus()
    chart.press("PageDown")
    assert re.match(r"0 s ago|now", chart.get_attribute("aria-valuetext") or "")
    for _ in range(3):
        chart.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuetext", re.compile("^3 s ago: "))
    other = page.get_by_role("slider", name="Generated tokens: time")
    expect(other).to_have_attribute("aria-valuetext", re.compile("^3 s ago: generated .* tokens/s"))
    chart.press("Escape")
    expect(chart).to_have_attribute("aria-valuetext", re.compile("^now: "))


def test_the_view_is_paused(page: Page, batch_server: ServerProcess) -> None:
    open_tab(page, f"{batch_server.url}/", "live")
    streams = Streams(batch_server, Streams.LONG)
    expect(page.locator("tr[data-state=decode]")).to_have_count(16)
    pause = page.get_by_role("button", name="Pause")
    pause.press("Space")
    expect(pause).to_have_attribute("aria-pressed", "true")
    before = page.locator("main").inner_text()
    streams.stop()
    batch_server.wait_idle()
    assert page.locator("main").inner_text() == before
    pause.press("Space")
    expect(rows(page)).to_have_count(0)


def test_a_full_tab_on_a_phone_and_in_both_themes(page: Page, batch_server: ServerProcess) -> None:
    phone(page)
    open_tab(page, f"{batch_server.url}/", "live")
    assert axe_violations(page) == []
    streams = [Streams(batch_server, Streams.LONG) for _ in range(2)]
    expect(rows(page)).to_have_count(16)
    expect(page.get_by_text("16 waiting")).to_be_visible()
    page.get_by_role("button", name="Pause").click()  # the view stays as it is
    for each in streams:
        each.stop()
    assert overflow(page) == []
    assert axe_violations(page) == []
    dark(page)
    assert axe_violations(page) == []
    expect(rows(page)).to_have_count(16)


def in_page(modules: Page, module: str, function: str) -> Any:
    """What a JavaScript function returns for the exports of a module of the tab."""
    return modules.evaluate(f"import('/page/live/{module}').then({function})")


def test_rows_of_the_table_are_kept_and_filled(modules: Page) -> None:
    function = (
        "({placeRows}) => [placeRows([7, 8, 9], [7, 9, 10]), placeRows([7, 8, 9], [8]), placeRows([null, 8], [])]"
    )
    assert in_page(modules, "live_layout.js", function) == [[7, 10, 9], [None, 8], []]


def test_holders_of_a_segment_are_neighbours(modules: Page) -> None:
    def segment(start: int, tokens: int, *sequences: int) -> dict[str, Any]:
        cached = not sequences
        return {"start": start, "tokens": tokens, "sequences": sequences, "prefixes": int(cached), "cached": cached}

    shared = [segment(0, 10, 1, 3), segment(10, 5, 1), segment(10, 2, 3)]
    segments = [*shared, segment(0, 7, 2), segment(0, 4), segment(4, 4)]
    function = f"""({{layoutCells}}) => {{
        const {{blocks, rows}} = layoutCells({json.dumps(segments)}, (id) => id);
        return [rows, blocks.map(({{segment, kind, row, rows}}) => [kind, segment.sequences, row, rows])];
    }}"""
    n_rows, blocks = in_page(modules, "live_layout.js", function)
    assert n_rows == 4
    assert blocks[:3] == [["shared", [1, 3], 0, 2], ["own", [1], 0, 1], ["own", [3], 1, 1]]
    assert blocks[3:] == [["own", [2], 2, 1], ["cached", [], 3, 1], ["cached", [], 3, 1]]


def test_axes_end_at_round_numbers(modules: Page) -> None:
    assert in_page(modules, "chart.js", "(m) => [0, 0.3, 7, 20, 501].map(m.axisEnd)") == [1, 0.5, 10, 20, 1000]


def test_a_broken_stream_is_opened_again_and_a_refused_one_is_not(modules: Page) -> None:
    function = """async ({follow}) => {
        let tries = 0;
        async function* open() {
            tries += 1;
            if (tries === 2 || tries === 3) throw new Error('cannot be reached');
            if (tries === 5) throw Object.assign(new Error('wrong key'), {status: 401});
            yield tries;
        }
        const seen = [];
        const state = ({message, pause}) => message && seen.push(`${message}, ${pause ?? 'for good'}`);
        const onEvent = (event) => seen.push(event);
        await follow({open, silence: () => 60, onEvent, onState: state, pauses: [0]}, new AbortController().signal);
        return seen;
    }"""
    gone = "cannot be reached, 0"
    assert in_page(modules, "follow.js", function) == [1, gone, gone, 4, "wrong key, for good"]


def test_a_silent_stream_is_given_up_and_opened_again(modules: Page) -> None:
    """Any data, including a comment, shows that the connection is alive."""
    function = """async ({follow}) => {
        const sleep = (ms, signal) => new Promise((done, fail) => {
            setTimeout(done, ms);
            signal.addEventListener('abort', () => fail(signal.reason), {once: true});
        });
        const all = new AbortController();
        let tries = 0;
        async function* open(signal, alive) {
            tries += 1;
            yield `event ${tries}`;
            if (tries === 2) return all.abort();
            for (let i = 0; i < 4; i += 1) {
                await sleep(150, signal);
                alive();
            }
            seen.push('still there');
            await sleep(5000, signal);
        }
        const seen = [];
        const onState = ({message, pause}) => message && seen.push(`${message} ${pause}`);
        const onEvent = (event) => seen.push(event);
        await follow({open, silence: () => 0.4, onEvent, onState, pauses: [0]}, all.signal);
        return seen;
    }"""
    silent = "No data for 0.4 seconds. 0"
    assert in_page(modules, "follow.js", function) == ["event 1", "still there", silent, "event 2"]


def test_a_server_that_stops_sending_in_the_middle_of_a_batch_is_detected(
    page: Page, batch_server: ServerProcess
) -> None:
    """Its process is stopped: the connection stays open, and no data arrives."""
    tab = open_tab(page, f"{batch_server.url}/", "live")
    streams = Streams(batch_server, Streams.LONG)
    expect(rows(page)).to_have_count(16)
    pid = batch_server.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        expect(tab.get_by_role("alert")).to_contain_text("No data for 5 seconds.")
    finally:
        os.kill(pid, signal.SIGCONT)
    expect(tab.get_by_role("alert")).to_have_count(0)
    streams.stop()


def test_times_of_a_second_without_a_whole_step_are_missing(modules: Page) -> None:
    """They were infinite, and the chart had no numbers."""
    example = (Path(__file__).parents[1] / "live_example.json").read_text()
    function = f"""({{LiveHistory}}) => {{
        const history = new LiveHistory();
        const next = structuredClone({example}.full);
        for (const {{interval}} of next.workers) if (interval) interval.steps = 0;
        history.add(next);
        const {{decode, batch}} = history.samples[0];
        return [decode === undefined, Number.isNaN(decode), batch];
    }}"""
    assert in_page(modules, "live_history.js", function) == [False, True, 0]


def test_rates_are_means_of_a_second_and_a_silence_is_a_gap(modules: Page) -> None:
    example = (Path(__file__).parents[1] / "live_example.json").read_text()
    function = f"""({{LiveHistory}}) => {{
        const history = new LiveHistory();
        const speeds = [];
        for (const [time, tokens] of [[1000, 10], [1000.5, 20], [1000.95, 30], [1010, 30]]) {{
            const next = structuredClone({example}.full);
            Object.assign(next, {{time, tokens_per_second: tokens * 10}});
            next.workers[0].engine.clock = time;
            next.workers[0].engine.rows[0].generated_tokens = tokens;
            next.workers[1].restarts = time > 1000 ? 3 : 2;
            history.add(next);
            speeds.push(history.view().speeds[0].get(101) || null);
        }}
        return [history.samples.map(({{generated}}) => generated ?? null), speeds, history.view().restarted[1]];
    }}"""
    generated, speeds, restarted = in_page(modules, "live_history.js", function)
    assert generated == [100, 200, None, 300]
    assert speeds == [None, pytest.approx(20), pytest.approx(20 / 0.95), None]
    assert restarted == pytest.approx(9.5)
