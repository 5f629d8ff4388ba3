#!/usr/bin/env python3
"""Takes the screenshots of docs/page.md: each tab of the web page, light and dark, while the server works.

Starts a server with the default model, gives it a conversation, a grid, 22 streams that share a prompt, and a job of
200 lines, and writes PNG files into docs/images/page/.

    .venv/bin/python scripts/page_screenshots.py [--only chat,live] [--to FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import running_server

from cppbatch.models.pull import choose_model
from tests.browser.chromium import find_chromium
from tests.browser.page_checks import PHONE, TABS, open_tab, wait_ready
from tests.support import tiny_models

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "page"
MAX_BYTES = 120_000
WIDE = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1240}  # of the Live tab, with its curves below the batch
SYSTEM = (
    "You are a guide who answers travellers' questions about cities in Europe. Answer in plain English, name places by "
    "their local names, mention how long a visit takes and what it costs, and do not repeat the question. "
) * 12
TOPICS = (
    "the harbour", "the old town", "the largest park", "the cathedral", "the food market", "the river", "trams",
    "the museum of art", "a day in the rain", "an evening with children", "the castle", "coffee houses",
)  # fmt: skip


def chat(page: Page, url: str) -> None:
    """A conversation with an answer that has formatted code."""
    section = open_tab(page, url, "chat")
    for question in ("Hello! What can you help me with?", "Write a Python function that adds two numbers."):
        box = section.get_by_role("textbox", name=re.compile("message", re.IGNORECASE))
        box.fill(question)
        box.press("Enter")
        expect(section.get_by_role("article", name="You").last).to_have_text(question)
        expect(section.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)


def playground(page: Page, url: str) -> None:
    """A grid of 12 answers."""
    section = open_tab(page, url, "playground")
    section.get_by_label("Prompt", exact=True).fill("Describe the sea in one sentence.")
    section.get_by_label("Values of temperature").fill("0.2, 0.7, 1.2")
    section.get_by_label("Samples of each").fill("4")
    section.get_by_role("button", name="Run", exact=True).click()
    expect(section.get_by_role("button", name="Stop all")).to_have_count(0, timeout=90_000)


def live(page: Page, url: str) -> None:
    """More streams than run at once, with a system prompt in common."""
    open_tab(page, url, "live")
    page.wait_for_timeout(30_000)


def jobs(page: Page, url: str) -> None:
    """A job of 200 lines, while it runs."""
    section = open_tab(page, url, "jobs")
    lines = "\n".join(f"{i},{TOPICS[i % len(TOPICS)]}" for i in range(200))
    table = {"name": "questions.csv", "mimeType": "text/csv", "buffer": f"id,topic\n{lines}\n".encode()}
    section.locator("input[type=file]").set_input_files(table)
    section.get_by_label("Template").fill("What should I know about {topic}?")
    section.get_by_text("Sampling settings").click()
    section.get_by_label("Maximum tokens").fill("48")
    section.get_by_role("button", name="Start 200 lines").click()
    expect(section.get_by_role("region", name="Results")).to_be_visible(timeout=60_000)
    page.wait_for_timeout(8000)


def models(page: Page, url: str) -> None:
    """Two models are loaded, two are not."""
    section = open_tab(page, url, "models")
    for name in ("SmolLM2", "small-vectors"):
        row = section.get_by_role("row").filter(has_text=name)
        row.get_by_role("button", name="Load").click()
        expect(row.get_by_text("loaded", exact=True)).to_be_visible(timeout=60_000)


def several(model: Path, folder: Path) -> list[str | Path]:
    """The flags of a server with this model, and small random ones."""
    (folder / model.name).symlink_to(model)
    for i, name in enumerate(("small-stories", "small-poems")):
        tiny_models.llama(folder / f"{name}.gguf", seed=i)
    tiny_models.encoder_only(folder / "small-vectors.gguf")
    return ["--models-dir", folder, "-np", "8", "-c", "8192"]


WORK: dict[str, Callable[[Page, str], None]] = {
    "chat": chat, "playground": playground, "live": live, "jobs": jobs, "models": models,
}  # fmt: skip
ON_PHONE = ("chat", "live")


@contextlib.contextmanager
def streams(url: str, n: int = 22) -> Iterator[None]:
    """Keeps this number of streams open, each with another question after the same system prompt."""
    stop = threading.Event()

    def ask(topic: str) -> None:
        body = {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Tell me about {topic}."}],
            "max_tokens": 400, "min_tokens": 200, "stream": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        while not stop.is_set():
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                for _ in answer:
                    if stop.is_set():
                        return

    threads = [threading.Thread(target=ask, args=[TOPICS[i % len(TOPICS)]], daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def shoot(page: Page, path: Path) -> None:
    """Writes a PNG; with 256 colours if it would be too large. Raises ValueError if it is still too large."""
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size >= MAX_BYTES:
        image.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size >= MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    print(path, path.stat().st_size)


def take(page: Page, tab: str, folder: Path) -> None:
    """The tab as it is, in both themes, and on a phone."""
    page.set_viewport_size(TALL if tab == "live" else WIDE)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.wait_for_timeout(300)
        shoot(page, folder / f"{tab}-{theme}.png")
    if tab in ON_PHONE:
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(500)
        shoot(page, folder / f"{tab}-phone.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--only", default=",".join(TABS), help="tabs, separated by commas")
    parser.add_argument("--to", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        model = choose_model(args.model)

        def start(*flags: str | Path) -> str:
            data = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "cppbatch", "serve", "--data-dir", data, *flags]
            return stack.enter_context(running_server(command)).url

        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        stack.callback(browser.close)
        page = browser.new_page(viewport=WIDE, locale="en-US")
        tabs = args.only.split(",")
        one = start("-m", model, "--kv-layout", "unified") if tabs != ["models"] else ""
        for tab in tabs:
            url = one
            if tab == "models":
                url = start(*several(model.resolve(), Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            with streams(url) if tab == "live" else contextlib.nullcontext():
                WORK[tab](page, f"{url}/")
                wait_ready(page)
                take(page, tab, args.to)


if __name__ == "__main__":
    main()
