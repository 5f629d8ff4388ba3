"""The Jobs tab: a file is checked, started, watched, cancelled and downloaded, also while workers and servers end."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import BrowserContext, Download, Page, expect

from tests.browser.conftest import PageErrors, StartServer
from tests.browser.page_checks import axe_violations, dark, focused, hasten, open_tab, overflow, phone
from tests.support.batch_files import client_of, make_batch, wait_until
from tests.support.server_process import ServerProcess

N_LINES = 80  # 2 seconds of the paced server
WORDS = ("stone", "river", "lamp", "horse", "cloud")
SLOW: dict[str, Any] = {"ignore_eos": True, "temperature": 0}


@pytest.fixture
def page(page: Page) -> Page:
    hasten(page)
    return page


def rows(n: int) -> bytes:
    """A CSV file."""
    lines = [f'{i},"{WORDS[i % 5]}, number {i}"' for i in range(n)]
    return "\n".join(["key,word", *lines, ""]).encode()


def slow_requests(n: int, max_tokens: int = 300) -> bytes:
    """In OpenAI's form. The first of several is short, so that the first result arrives soon on any machine."""
    fields = {"method": "POST", "url": "/v1/completions"}
    body = {"prompt": "Once upon a time", **SLOW, "max_tokens": max_tokens}
    bodies = [body | {"max_tokens": 3} if i == 0 else body for i in range(n)]
    return b"".join(json.dumps({"custom_id": f"r-{i}", **fields, "body": bodies[i]}).encode() + b"\n" for i in range(n))


def choose(page: Page, name: str, data: bytes) -> None:
    page.get_by_label("Drop prompt files").set_input_files([{"name": name, "mimeType": "", "buffer": data}])


def drop(page: Page, files: dict[str, str]) -> None:
    page.locator(".drop").wait_for()
    page.evaluate(
        """(files) => {
          const dataTransfer = new DataTransfer()
          for (const [name, text] of Object.entries(files)) dataTransfer.items.add(new File([text], name))
          const event = new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true})
          document.querySelector('.drop').dispatchEvent(event)
        }""",
        files,
    )


def limit_tokens(page: Page, n: int) -> None:
    page.locator(".jobs").get_by_text("Sampling settings").click()
    page.locator(".jobs").get_by_label("Maximum tokens").fill(str(n))


def start(page: Page, n: int) -> None:
    page.get_by_role("button", name=re.compile(rf"^Start {n} line")).click()
    expect(page).to_have_url(re.compile("#jobs/batch_"))


def start_slow_job(page: Page, url: str, n: int, max_tokens: int = 300) -> str:
    """Starts a job and waits for its first results. Returns its id."""
    open_tab(page, url, "jobs")
    choose(page, "slow.jsonl", slow_requests(n, max_tokens))
    start(page, n)
    expect(page.get_by_role("region", name="Results")).to_be_visible()
    return page.url.rpartition("/")[2]


def wait_status(page: Page, status: str, seconds: float = 90) -> None:
    expect(page.locator(".jobs h1 + .badge")).to_have_text(status, timeout=seconds * 1000)


def save(page: Page, item: str) -> str:
    """What a download contains."""
    page.get_by_role("button", name="Download").click()
    with page.expect_download() as waiting:
        page.get_by_role("menuitem", name=item).click()
    saved: Download = waiting.value
    return Path(saved.path()).read_text()


def content(server: ServerProcess, file_id: str) -> bytes:
    return client_of(server).files.content(file_id).content


def evaluated(page: Page, module: str, script: str, *args: object) -> Any:
    """The result of a script that gets a module of the tab as `m`."""
    return page.evaluate(f"async ([args]) => {{ const m = await import('/page/jobs/{module}.js'); {script} }}", [args])


RECORDS = """
  const found = [];
  for await (const group of m.recordGroups(new Blob([args[0]]), args[1])) found.push(...group);
  return found;
"""


def test_tables_are_read_with_quotes_and_line_ends_and_wrong_records_are_named(modules: Page) -> None:
    text = (
        '\ufeffid,text\r\n1,"a ""q"", b"\r\n2,"two\r\nlines"\r\n\r\n3\r\n4,x,y\r\n5,"a"b\r\n6,"open\r\n7,ok\r\n8,"ends'
    )
    header, *records = evaluated(modules, "records", RECORDS, text, "csv")
    assert header == {"columns": ["id", "text"]}
    assert {record["line"]: record["row"] for record in records if "row" in record} == {
        2: {"id": "1", "text": 'a "q", b'},
        3: {"id": "2", "text": "two\nlines"},
        10: {"id": "7", "text": "ok"},
    }
    wrong = {record["line"]: record["error"] for record in records if "error" in record}
    assert sorted(wrong) == [6, 7, 8, 9, 11]
    assert wrong[6] == "has 1 fields, but the first line names 2"
    assert "has 3 fields, but the first line names 2" in wrong[7]
    assert "text after a closing quote" in wrong[8]
    assert "quote" in wrong[9]
    assert wrong[11] == "has a quote that is not closed"
    assert evaluated(modules, "records", RECORDS, "a;b\n1;2", "csv")[1]["row"] == {"a": "1", "b": "2"}
    assert evaluated(modules, "records", RECORDS, "a\tb\n1\t", "tsv")[1]["row"] == {"a": "1", "b": ""}


def test_lines_of_json_are_requests_or_rows(modules: Page) -> None:
    request = '{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}'
    text = f'{{"a": 1}}\n\n"hi"\n[1]\n{{bad\n{request}\n[\nx\0y'
    first, second, *wrong = evaluated(modules, "records", RECORDS, text, "jsonl")
    assert (first, second) == ({"line": 1, "row": {"a": 1}}, {"line": 3, "row": {"prompt": "hi"}})
    assert wrong.pop(2) == {"line": 6, "text": request, "request": json.loads(request)}
    assert [each["line"] for each in wrong] == [4, 5, 7, 8]
    for each, says in zip(
        wrong, ("neither an object", "is not valid JSON", "without [ ] around", "not UTF-8 text"), strict=True
    ):
        assert says in each["error"]


SETTINGS = {"endpoint": "/v1/chat/completions", "template": "", "system": "", "id_column": "", "sampling": {}}
MAKE = """
  const maker = new m.RequestMaker(args[0]);
  return args[1].map((record) => {
    try { return JSON.parse(maker.lineOf(record)) } catch (error) { return error.message }
  });
"""


def test_rows_become_requests_and_invalid_ones_get_a_remedy(modules: Page) -> None:
    sampling = {"max_tokens": 8, "json_schema": '{"type":"object"}'}
    settings = SETTINGS | {"template": "Say {{x}} {text}", "system": "s", "sampling": sampling}
    embedding = {"custom_id": "z", "url": "/v1/embeddings", "body": {"input": "a"}}
    stream = {"custom_id": "y", "url": "/v1/chat/completions", "body": {"messages": [{}], "stream": True}}
    records = [
        {"line": 2, "row": {"text": "hi", "id": 7}},
        {"line": 3, "row": {"text": "hi", "id": "7"}},
        {"line": 4, "row": {"x": 1}},
        {"line": 5, "row": {"text": None}},
        {"line": 6, "text": "", "request": embedding},
        {"line": 7, "text": "", "request": {"custom_id": "z", "url": "/v1/x"}},
        {"line": 8, "text": "", "request": {"url": "/v1/embeddings"}},
        {"line": 9, "text": "", "request": {"custom_id": "z", "url": "/v1/chat/completions", "body": {}}},
        {"line": 10, "text": "", "request": stream},
    ]
    made, *wrong = evaluated(modules, "requests", MAKE, settings, records)
    assert made["body"] == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Say {x} hi"}],
        "max_tokens": 8,
        "json_schema": {"type": "object"},
    }
    assert (made["custom_id"], made["row"]) == ("7", {"text": "hi", "id": 7})
    expected = (
        "as line 2",
        "has no text; it has x",
        "has no text; it has nothing",
        "as in the first line",
        "must be one of",
        "custom_id is missing",
        "body has no messages",
        "stream is true",
    )
    for message, says in zip(wrong, expected, strict=True):
        assert says in message
    messages = [{"role": "user", "content": "c"}]
    own = [{"line": 2, "row": {"id": "b", "messages": messages}}, {"line": 3, "row": {"text": "d"}}]
    chat, without = evaluated(modules, "requests", MAKE, SETTINGS, own)
    assert (chat["custom_id"], chat["body"]) == ("b", {"messages": messages})
    assert "give a list, or use a template" in without
    embeddings = SETTINGS | {"endpoint": "/v1/embeddings", "sampling": {"max_tokens": 8}, "template": "{text}"}
    assert evaluated(modules, "requests", MAKE, embeddings, own[1:])[0]["body"] == {"input": "d"}


def test_prompts_are_chats_unless_the_model_has_no_chat_template(page: Page, url: str) -> None:
    """As in `cppbatch batch`."""
    for has_template, task in ((True, "/v1/chat/completions"), (False, "/v1/completions")):
        if not has_template:
            page.route(
                "**/props*", lambda route: route.fulfill(json=route.fetch().json() | {"has_chat_template": False})
            )
        open_tab(page, url, "jobs")
        page.reload()
        choose(page, "rows.csv", b"id,review\n1,The bread was warm.\n")
        expect(page.get_by_label("Task")).to_have_value(task)
        assert page.get_by_label("Maximum tokens").input_value() == "4096"


def test_the_text_column_is_guessed_and_the_first_prompt_is_shown_before_the_start(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "rows.csv", b"id,review,stars\n1001,The bread was warm.,5\n1002,Nobody answered the door.,1\n")
    expect(page.get_by_label("Template")).to_have_value("{review}")
    expect(page.get_by_role("group", name="First prompt")).to_contain_text("The bread was warm.")


def test_results_of_all_endpoints_are_read(modules: Page) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}

    def result(**body: object) -> str:
        return json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None})

    refused = {
        "custom_id": None,
        "line": 4,
        "response": None,
        "error": {"code": "invalid_json", "message": "no JSON", "line": 4},
    }
    failed = {"custom_id": "b", "line": 5, "response": {"status_code": 400, "body": {"error": {"message": "too long"}}}}
    lines = [
        result(choices=[{"message": {"content": "x"}, "finish_reason": "stop"}], usage=usage),
        result(choices=[{"text": "x"}, {"text": "y"}], usage=usage),
        result(output=[{"content": [{"text": "x"}]}], usage={"input_tokens": 3, "output_tokens": 2}),
        result(data=[{"embedding": [1, 2]}]),
        json.dumps({"custom_id": "line-1", "line": 1, "text": "x", "finish_reason": "length", "usage": usage}),
        json.dumps(refused),
        json.dumps(failed),
    ]
    found = evaluated(modules, "results", "return args[0].map(m.resultOf)", lines)
    assert [each.get("answer") for each in found] == ["x", '["x","y"]', "x", "[1,2]", "x", None, None]
    assert [each.get("error") for each in found[5:]] == ["no JSON", "too long"]
    assert (found[0]["finish_reason"], found[2]["completion_tokens"], found[5]["line"]) == ("stop", 2, 4)


def test_the_time_that_is_left_follows_the_last_minute(modules: Page) -> None:
    script = """
      const rate = new m.Rate();
      for (const [n, now] of args[0]) rate.add(n, now);
      return rate.value;
    """
    assert evaluated(modules, "results", script, [[0, 0]]) is None
    assert evaluated(modules, "results", script, [[0, 0], [10, 10]]) == 1
    slower = [[0, 0], [600, 60], *[[600 + i, 60 + 10 * i] for i in range(1, 10)]]
    assert evaluated(modules, "results", script, slower) == pytest.approx(0.1)


@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_large_file_does_not_hold_up_the_page(modules: Page, megabytes: int) -> None:
    script = """
      const line = JSON.stringify({prompt: 'word '.repeat(80)}) + '\\n';
      const blob = new Blob(Array(args[1]).fill(line.repeat(Math.ceil(2 ** 20 / line.length))));
      let [most, seen, good, isRunning] = [0, 0, 0, true];
      const takeTurn = () => {
        [most, seen] = [Math.max(most, good - seen), good];
        if (isRunning) setTimeout(takeTurn);
      };
      takeTurn();
      const progress = (counts) => { good = counts.good; return true };
      const found = await m.checkFile(blob, 'jsonl', args[0], new Map(), progress);
      isRunning = false;
      takeTurn();
      return {size: blob.size, good: found.good, made: found.file.size, most};
    """
    found = evaluated(modules, "requests", script, SETTINGS | {"template": "{prompt}"}, megabytes)
    assert found["size"] > megabytes * 1e6
    assert found["made"] > found["size"]
    assert found["good"] > 2000 * megabytes
    assert found["most"] < 10_000, "lines between two turns of the page"


def kill_when_busy(server: ServerProcess, worker: psutil.Process) -> None:
    """On a thread: lines may be answered before the page shows that the job has been started."""
    wait_until(lambda: server.get("/stats")["running"])
    worker.kill()


def test_a_job_does_not_start_with_what_was_checked_before_the_last_change(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "words.csv", rows(3))
    expect(page.get_by_role("button", name="Start 3 lines")).to_be_enabled()
    page.evaluate("window.requestAnimationFrame = () => 0")  # a busy machine: the check begins long after the change
    is_disabled = page.get_by_label("Template").evaluate("""async (field) => {
        field.value = 'A {word} is';
        field.dispatchEvent(new Event('input', {bubbles: true}));
        await new Promise((done) => setTimeout(done));
        return [...document.querySelectorAll('button')].find((each) => each.textContent.includes('Start')).disabled;
    }""")
    assert is_disabled
    expect(page.get_by_role("button", name="Start 3 lines")).to_be_enabled()


def test_lines_are_uploaded_watched_and_downloaded_while_a_worker_is_killed(
    page: Page, url: str, server: ServerProcess
) -> None:
    open_tab(page, url, "jobs")
    choose(page, "words.csv", rows(N_LINES))
    expect(page.get_by_label("Template")).to_have_value("{word}")
    page.get_by_label("Template").fill("A {word} is")
    page.get_by_label("Column that identifies the results").select_option("key")
    limit_tokens(page, 40)
    page.get_by_text("The first requests").click()
    expect(page.get_by_label("Request of line 2")).to_have_value(re.compile("A stone, number 0 is"))
    edited = {
        "custom_id": "0",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    }
    page.get_by_label("Request of line 2").fill(json.dumps(edited))
    page.get_by_label("Request of line 2").blur()
    expect(page.get_by_text(f"{N_LINES} lines ready, 0 invalid")).to_be_visible()
    (worker,) = server.workers
    killer = threading.Thread(target=kill_when_busy, args=(server, worker))
    killer.start()
    start(page, N_LINES)
    killer.join()
    wait_until(lambda: not psutil.pid_exists(worker.pid))
    expect(page.get_by_role("region", name="Results")).to_be_visible()
    wait_status(page, "completed")
    expect(page.get_by_text(f"{N_LINES} of {N_LINES} lines")).to_be_visible()
    batch = server.get(f"/v1/batches/{page.url.rpartition('/')[2]}")
    assert batch["request_counts"] == {"total": N_LINES, "completed": N_LINES, "failed": 0}
    assert batch["metadata"] == {
        "name": "words.csv",
        "template": "A {word} is",
        "id_column": "key",
        "settings": '{"max_tokens":40}',
    }
    output = content(server, batch["output_file_id"]).decode()
    assert save(page, "Results (JSONL)") == output
    answers = {}
    for line in output.splitlines():
        result = json.loads(line)
        answers[result["custom_id"]] = result["response"]["body"]["choices"][0]["message"]["content"]
    table = list(csv.DictReader(io.StringIO(save(page, "Table with answers"))))
    assert [row["key"] for row in table[1:]] == [str(i) for i in range(1, N_LINES)]
    assert [row["word"] for row in table[1:3]] == ["river, number 1", "lamp, number 2"]
    assert [row["answer"] for row in table[1:]] == [answers[str(i)] for i in range(1, N_LINES)]
    sent = content(server, batch["input_file_id"]).splitlines()
    assert json.loads(sent[0]) == edited


def test_invalid_lines_are_reported_and_left_out(page: Page, url: str, server: ServerProcess) -> None:
    open_tab(page, url, "jobs")
    choose(page, "few.csv", b'id,text\n1,"What, now?"\n2,a,b\n3,"is"it"\n\n1,again\n5,Hello\n')
    expect(page.get_by_text("2 lines ready, 3 invalid")).to_be_visible()
    wrong = page.get_by_role("region", name="Invalid lines")
    for line, what in ((3, "has 3 fields"), (4, "after a closing quote"), (6, 'has the same custom_id as line 2, "1"')):
        expect(wrong.get_by_role("row", name=re.compile(rf"^{line} .*{what}"))).to_be_visible()
    limit_tokens(page, 4)
    page.get_by_role("button", name="Start 2 lines").click()
    wait_status(page, "completed")
    expect(page.get_by_text("2 of 2 lines")).to_be_visible()


DOCX = b"PK\x03\x04\x14\x00\x06\x00\x08\x00\xff\xfe" * 50


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "letter.docx",
            "unknown input format '.docx'; the extension must be one of .jsonl, .ndjson, .json, .csv, .tsv, .txt.",
        ),
        ("letter.txt", "it is not UTF-8 text; save it as UTF-8."),
    ],
)
def test_a_binary_file_is_refused_in_one_sentence(page: Page, url: str, name: str, why: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, name, DOCX)
    expect(page.get_by_role("alert")).to_have_text(f"{name} was refused: {why}")
    expect(page.get_by_role("button", name="Start")).to_have_count(0)
    expect(page.get_by_label("Drop prompt files")).to_be_visible()
    choose(page, "good.txt", b"Say A\n")
    expect(page.get_by_role("button", name="Start 1 line")).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_file_without_a_line_that_can_be_sent_cannot_be_started(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "wrong.jsonl", b"[1]\n{bad\n")
    expect(page.get_by_text("0 lines ready, 2 invalid")).to_be_visible()
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    assert "Start 0" not in page.locator("main").inner_text()
    assert "Columns: ." not in page.locator("main").inner_text()


def test_settings_of_a_job_are_rows(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    choose(page, "one.txt", b"Say A\n")
    limit_tokens(page, 3)
    page.locator(".jobs").get_by_label("Temperature").fill("0")
    start(page, 1)
    facts = page.locator(".facts")
    expect(facts.locator("div", has_text=re.compile(r"^max tokens3$"))).to_be_visible()
    expect(facts.locator("div", has_text=re.compile(r"^temperature0$"))).to_be_visible()
    expect(facts).not_to_contain_text('{"')


def test_requests_in_openais_form_go_up_as_they_are_and_failures_give_their_reason(
    page: Page, errors: PageErrors, url: str, server: ServerProcess
) -> None:
    errors.allow("status of 404")  # of the files that are deleted
    good = slow_requests(1, 3)
    bad = good.replace(b"r-0", b"r-1").replace(b'"temperature": 0', b'"temperature": -3')
    open_tab(page, url, "jobs")
    choose(page, "requests.jsonl", good + b"\r\n" + bad)
    expect(page.get_by_text("are sent unchanged")).to_be_visible()
    page.get_by_role("button", name="Start 2 lines").click()
    wait_status(page, "completed")
    failures = page.get_by_role("region", name="Failures by reason")
    expect(failures.get_by_role("row", name=re.compile("temperature: .*3"))).to_be_visible()
    batch = server.get(f"/v1/batches/{page.url.rpartition('/')[2]}")
    assert content(server, batch["input_file_id"]) == good + b"\r\n" + bad
    assert json.loads(save(page, "Failures (JSONL)"))["custom_id"] == "r-1"
    page.get_by_role("button", name="Delete files").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("link", name="requests.jsonl").first.click()
    expect(page.get_by_text("The files of this job have been deleted")).to_be_visible()


def test_a_job_is_cancelled_and_keeps_its_finished_results(page: Page, url: str, server: ServerProcess) -> None:
    batch_id = start_slow_job(page, url, 400)
    page.get_by_role("button", name="Cancel job").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("are kept. The other lines will not be answered")
    dialog.get_by_role("button", name="Cancel job").click()
    wait_status(page, "cancelled")
    n_completed = server.get(f"/v1/batches/{batch_id}")["request_counts"]["completed"]
    assert 0 < n_completed < 400
    assert len(save(page, "Results (JSONL)").splitlines()) == n_completed


def test_a_job_is_watched_after_a_reload_and_a_restart_of_the_server(
    page: Page, errors: PageErrors, page_model: Path, fresh_server: StartServer, tmp_path: Path
) -> None:
    errors.allow("CONNECTION_REFUSED|Failed to load resource|CONNECTION_RESET|EMPTY_RESPONSE|INCOMPLETE_CHUNKED")
    flags = ("-m", page_model, "-np", "4", "--data-dir", tmp_path / "data")
    server = fresh_server(*flags)
    url = f"{server.url}/"
    start_slow_job(page, url, 20)
    page.reload()
    expect(page.get_by_role("region", name="Results")).to_be_visible()
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("link", name="slow.jsonl")).to_be_visible()
    page.go_back()
    server.interrupt()
    server.wait()
    expect(page.get_by_text("Cannot reach the server").first).to_be_visible()
    fresh_server(*flags, "--port", server.url.rpartition(":")[2], module="cppbatch")  # not paced
    expect(page.get_by_text("Cannot reach the server")).to_have_count(0)
    wait_status(page, "completed", 120)
    expect(page.get_by_text("20 of 20 lines")).to_be_visible()


def test_older_jobs_come_page_by_page(page: Page, url: str, server: ServerProcess) -> None:
    client = client_of(server)
    for i in range(23):
        make_batch(client, b'{"prompt": "Hi", "max_tokens": 1}\n', metadata={"name": f"job {i}"})
    open_tab(page, url, "jobs")
    expect(page.get_by_role("link", name="job 22", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="job 0", exact=True)).to_have_count(0)
    page.get_by_role("button", name="Show older jobs").click()
    expect(page.get_by_role("link", name="job 0", exact=True)).to_be_visible()


def test_nothing_is_polled_while_no_job_runs_or_the_tab_is_hidden(
    new_context: Callable[..., BrowserContext], url: str
) -> None:
    page = new_context().new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/v1/batches" in request.url else None)

    def asked_within(milliseconds: int) -> list[str]:
        """By the page's clock, which stands still otherwise."""
        asked.clear()
        page.clock.run_for(milliseconds)
        page.evaluate("fetch('health').then(() => 0)")  # earlier requests have been reported when this one ends
        return asked

    page.clock.install()
    start_slow_job(page, url, 400)
    page.clock.pause_at(page.evaluate("Date.now() / 1000 + 10"))
    for _ in range(2):
        with page.expect_response("**/v1/batches/*"):
            page.clock.run_for(2000)
        assert not asked_within(1500), "every 2 seconds while a job runs"
    page.get_by_role("link", name="Chat").click()
    expect(page.locator("main > section.jobs")).to_be_hidden()
    page.clock.run_for(100)
    assert not asked_within(60_000)
    page.clock.resume()
    page.go_back()
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    wait_status(page, "cancelled")
    page.clock.pause_at(page.evaluate("Date.now() / 1000 + 10"))
    asked_within(3000)  # the list of jobs may be asked for once more
    assert not asked_within(60_000)


def test_a_job_is_started_by_keyboard_alone(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")

    def tab_to(name: str) -> None:
        reached = []
        for _ in range(100):
            page.keyboard.press("Tab")
            here = focused(page)
            reached.append(here.name if here else None)
            if here and name in here.name:
                assert here.visible
                assert here.outlined
                return
        raise AssertionError(f"the Tab key does not reach {name!r}, but {reached}")

    tab_to("Drop prompt files")
    tab_to("Paste text instead")
    page.keyboard.press("Enter")
    tab_to("Text")
    page.keyboard.type("Name a colour.\nName a fruit.\n")
    tab_to("Check text")
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 lines ready, 0 invalid")).to_be_visible()
    tab_to("Sampling settings")
    page.keyboard.press("Enter")
    tab_to("Maximum tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("5")
    expect(page.get_by_label("Request of line 1")).to_have_value(re.compile(r'"max_tokens": 5\b'))  # checked again
    expect(page.get_by_role("button", name="Start 2 lines")).to_be_enabled()
    tab_to("Start 2 lines")
    page.keyboard.press("Enter")
    wait_status(page, "completed")
    tab_to("Download")
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    with page.expect_download() as saved:
        page.keyboard.press("Enter")
    assert Path(saved.value.path()).read_text().startswith("custom_id,prompt,answer")


def test_errors_are_one_sentence(page: Page, errors: PageErrors, small_server: ServerProcess) -> None:
    errors.allow("status of 413|ERR_CONNECTION|Failed to load")
    open_tab(page, f"{small_server.url}/", "jobs")
    choose(page, "large.txt", b"word " * 400_000)
    page.get_by_role("button", name="Start 1 line").click()
    expect(page.get_by_role("alert")).to_contain_text("--max-file-mb")
    page.get_by_role("button", name="Back").click()
    choose(page, "a.csv", b"a,b\n1,2\n")
    page.get_by_label("Template").fill("{a")
    expect(page.get_by_role("alert")).to_contain_text("Unmatched {")


def test_a_server_without_storage_says_so(
    page: Page, errors: PageErrors, page_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors.allow("status of 503")
    (tmp_path / "cppbatch").write_text("the default data folder cannot be one")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with ServerProcess("-m", page_model) as without:
        open_tab(page, f"{without.wait_ready().url}/", "jobs")
        expect(page.get_by_text("this server does not store files")).to_be_visible()


def test_long_words_fit_a_phone_and_axe_finds_nothing(page: Page, url: str) -> None:
    word = "Donaudampfschifffahrtsgesellschaftskapitän" * 6
    phone(page)
    open_tab(page, url, "jobs")
    for theme in ("light", "dark"):
        if theme == "dark":
            dark(page)
        assert not overflow(page)
        assert not axe_violations(page)
    choose(page, f"{word[:180]}.csv", f"id,{word}\n1,{word}\n2\n3,{word}\n".encode())
    expect(page.get_by_text("2 lines ready, 1 invalid")).to_be_visible()
    page.get_by_text("The first requests").click()
    limit_tokens(page, 3)
    expect(page.get_by_text("2 lines ready, 1 invalid")).to_be_visible()
    assert not overflow(page)
    assert not axe_violations(page)
    page.get_by_role("button", name="Start 2 lines").click()
    wait_status(page, "completed")
    expect(page.get_by_role("region", name="Results")).to_be_visible()
    assert not overflow(page)
    assert not axe_violations(page)
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("button", name="Start")).to_have_count(0)
    assert not overflow(page)
    assert not axe_violations(page)


def test_several_dropped_files_are_checked_and_started_one_after_the_other(page: Page, url: str) -> None:
    open_tab(page, url, "jobs")
    drop(page, {"one.txt": "Say A\nSay B\n", "two.txt": "Say C\n", "three.txt": "Say D\n"})
    form = page.get_by_role("region", name="New job")
    form.get_by_role("button", name="Read each line as a prompt").click()
    expect(form.get_by_role("heading")).to_have_text("one.txt")
    expect(form).to_contain_text("2 more files to check: two.txt, three.txt")
    form.get_by_role("button", name="Skip this file").click()
    expect(form.get_by_role("heading")).to_have_text("two.txt")
    limit_tokens(page, 2)
    form.get_by_role("button", name="Start 1 line").click()
    expect(form.get_by_role("heading")).to_have_text("three.txt")
    expect(page.get_by_role("link", name="two")).to_be_visible()
    start(page, 1)
    wait_status(page, "completed")
