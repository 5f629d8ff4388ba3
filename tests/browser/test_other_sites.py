"""Pages of other sites in a real browser: they read nothing of a server without keys, and change nothing."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import PageErrors
from tests.browser.page_checks import wait_ready
from tests.support.batch_files import client_of
from tests.support.server_process import ServerProcess

SECRET = "text that only its owner reads"
COMPLETION = {"prompt": "Hello", "max_tokens": 2}


class Site(http.server.BaseHTTPRequestHandler):
    """The same empty page at every address, under every name; at /sandbox without an origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.path == "/sandbox":
            self.send_header("Content-Security-Policy", "sandbox allow-scripts allow-forms")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Another site</title><link rel=icon href=data:,>")

    def log_message(self, *_args: object) -> None:
        """Nothing."""


class Machine(NamedTuple):
    """A server with a file of its owner, and the port of other sites."""

    server: ServerProcess
    port: int
    file: str

    def site(self, name: str) -> str:
        return f"http://{name}:{self.port}/"

    def state(self) -> dict[str, Any]:
        """What requests could have changed."""
        stats = self.server.wait_idle()
        kept = {name: stats[name] for name in ("steps", "prompt_tokens", "generated_tokens")}
        lists = {path: [each["id"] for each in self.server.get(path)["data"]] for path in ("/v1/files", "/v1/batches")}
        return kept | lists


@pytest.fixture(scope="module")
def machine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Of the other sites only http://app.test may use the server."""
    data, slots = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("slots")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as sites:
        port = sites.server_address[1]
        threading.Thread(target=sites.serve_forever, daemon=True).start()
        flags: list[str | Path] = ["-np", "2", "-c", "512", "--data-dir", data, "--slot-save-path", slots, "--props"]
        with ServerProcess("-m", tiny_llama, *flags, "--cors-origin", f"http://app.test:{port}") as server:
            server.wait_ready()
            yield Machine(server, port, upload(server))
        sites.shutdown()


def upload(server: ServerProcess) -> str:
    return client_of(server).files.create(file=("a.jsonl", SECRET.encode()), purpose="batch").id


FETCHES = """async ([url, file, completion]) => {
    const form = new FormData();
    form.append('purpose', 'batch');
    form.append('file', new File(['{}'], 'evil.jsonl'));
    const body = JSON.stringify(completion), json = {'Content-Type': 'application/json'};
    const batch = JSON.stringify({input_file_id: file, endpoint: '/v1/completions', completion_window: '24h'});
    const requests = {
        'read a list': ['/v1/files', {}],
        'read a file': [`/v1/files/${file}/content`, {}],
        'read the state': ['/slots', {}],
        'a GET without CORS': [`/v1/files/${file}/content`, {mode: 'no-cors'}],
        'JSON after a preflight': ['/v1/completions', {method: 'POST', headers: json, body}],
        'text': ['/v1/completions', {method: 'POST', body}],
        'text without CORS': ['/v1/completions', {method: 'POST', mode: 'no-cors', body}],
        'a blob without a type': ['/v1/completions', {method: 'POST', mode: 'no-cors', body: new Blob([body])}],
        'a form': ['/completion', {method: 'POST', mode: 'no-cors', body: new URLSearchParams(completion)}],
        'a batch': ['/v1/batches', {method: 'POST', mode: 'no-cors', body: batch}],
        'an upload': ['/v1/files', {method: 'POST', mode: 'no-cors', body: form}],
        'a slot': ['/slots/0?action=erase', {method: 'POST', mode: 'no-cors', body: '{}'}],
        'adapters': ['/lora-adapters', {method: 'POST', mode: 'no-cors', body: '[]'}],
        'a deletion': [`/v1/files/${file}`, {method: 'DELETE'}],
        'with credentials': ['/v1/files', {credentials: 'include'}],
    };
    const results = {};
    for (const [name, [path, options]] of Object.entries(requests)) {
        results[name] = await fetch(url + path, options).then(
            async (response) => (response.type === 'opaque' ? 'opaque' : `${response.status} ${await response.text()}`),
            (error) => error.name);
    }
    results['a beacon'] = String(navigator.sendBeacon(url + '/v1/completions', body));
    return results;
}"""

ELEMENTS = """([url, file]) => Promise.all(Object.entries({
    img: {src: `${url}/v1/files/${file}/content`},
    script: {src: `${url}/page/app.js`},
    link: {rel: 'stylesheet', href: `${url}/page/style.css`},
    video: {src: `${url}/stats`},
}).map(([name, attributes]) => new Promise((resolve) => {
    const element = Object.assign(document.createElement(name), attributes);
    element.onerror = () => resolve([name, 'refused']);
    element.onload = element.onloadeddata = () => resolve([name, 'loaded']);
    document.body.append(element);
}))).then(Object.fromEntries)"""

FORM = """([action, enctype, body]) => {
    const form = Object.assign(document.createElement('form'), {action, enctype, method: 'POST'});
    const [name, value] = [body.slice(0, -2), ''];
    form.append(Object.assign(document.createElement('input'), {name, value}));
    document.body.append(form);
    form.submit();
}"""


@pytest.mark.parametrize("name", ["127.0.0.1", "evil.test"])
def test_a_page_on_another_port_or_of_another_site_reads_nothing_and_changes_nothing(
    page: Page, machine: Machine, errors: PageErrors, name: str
) -> None:
    errors.allow(".")  # whatever headers the browser sends
    url, before = machine.server.url, machine.state()
    assert before["/v1/files"] == [machine.file]
    page.goto(machine.site(name))
    with page.expect_request_finished(lambda request: request.resource_type == "ping"):  # the beacon
        results = page.evaluate(FETCHES, [url, machine.file, COMPLETION])
    assert len(results) > 12
    assert {result for what, result in results.items() if what != "a beacon"} == {"TypeError", "opaque"}
    assert page.evaluate(ELEMENTS, [url, machine.file]) == dict.fromkeys(("img", "script", "link", "video"), "refused")
    assert machine.state() == before


@pytest.mark.each_value
@pytest.mark.parametrize("enctype", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("site", ["http://127.0.0.1:{}/", "http://evil.test:{}/", "http://evil.test:{}/sandbox"])
def test_a_form_that_submits_itself_is_refused(
    page: Page, machine: Machine, errors: PageErrors, site: str, enctype: str
) -> None:
    errors.allow("status of 403|request to another host|favicon")
    site, before = site.format(machine.port), machine.state()
    for action in ("/v1/completions", "/v1/files", "/lora-adapters", "/slots/0?action=erase"):
        page.goto(site)
        with page.expect_navigation(url=machine.server.url + action) as answer:
            page.evaluate(FORM, [machine.server.url + action, enctype, json.dumps(COMPLETION)])
        headers = answer.value.request.all_headers()
        assert headers["origin"] == ("null" if site.endswith("sandbox") else site.rstrip("/"))
        assert headers["content-type"].startswith(enctype)
        assert answer.value.status == 403
    assert machine.state() == before


def test_a_name_that_resolves_to_the_server_opens_nothing(page: Page, machine: Machine, errors: PageErrors) -> None:
    errors.allow("status of 403|request to another host")
    rebound = f"http://evil.test:{urlsplit(machine.server.url).port}"
    before = machine.state()
    answer = page.goto(f"{rebound}/")
    assert answer
    assert (answer.status, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts evil.test" in answer.json()["error"]["message"]
    results = page.evaluate(FETCHES, [rebound, machine.file, COMPLETION])  # of its own origin, as the browser sees it
    assert {result[:4] for what, result in results.items() if what != "a beacon"} == {"403 "}
    assert SECRET not in json.dumps(results)
    assert machine.state() == before


def test_a_link_of_another_site_opens_the_page(page: Page, machine: Machine, errors: PageErrors) -> None:
    errors.allow("request to another host")
    page.goto(machine.site("evil.test"))
    page.evaluate("(url) => { location.href = url }", f"{machine.server.url}/")
    page.wait_for_url(f"{machine.server.url}/**")
    wait_ready(page)


def test_a_page_that_cors_allows_and_the_own_page_read_and_change(
    page: Page, machine: Machine, errors: PageErrors
) -> None:
    errors.allow("request to another host|status of 415|status of 403")
    for site in (machine.site("app.test"), f"{machine.server.url}/"):
        before = machine.state()
        page.goto(site)
        results = page.evaluate(FETCHES, [machine.server.url, upload(machine.server), COMPLETION])
        assert SECRET in results["read a file"]
        for what in ("read a list", "read the state", "JSON after a preflight", "a deletion", "with credentials"):
            assert results[what].startswith("200 "), what
        assert results["text"].startswith("415 "), "a page sends JSON as JSON"
        after = machine.state()
        assert after["generated_tokens"] > before["generated_tokens"]
        assert len(after["/v1/files"]) == len(before["/v1/files"]) + 1, "its upload; the other file is deleted"
    wait_ready(page)
