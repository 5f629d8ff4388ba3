"""Images and audio in messages of the Chat tab."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, Route, expect

from tests.browser.page_checks import axe_violations, dark, open_tab, overflow, phone, wait_ready
from tests.browser.test_chat import CHAT, answer_with, ask, exported, messages, send
from tests.support import tiny_models, tiny_projectors
from tests.support.batch_files import wait_until
from tests.support.pdf_files import pdf, scanned_pdf
from tests.support.server_process import ServerProcess


def png(width: int = 8, height: int = 8) -> bytes:
    """A red image."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff\0\0" * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav(seconds: float = 0.1, rate: int = 8000) -> bytes:
    """Silence."""
    data = b"\0\0" * int(seconds * rate)
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + head + b"data" + struct.pack("<I", len(data)) + data


def file(name: str, media_type: str, content: bytes) -> Any:
    return {"name": name, "mimeType": media_type, "buffer": content}


@pytest.fixture
def chat(page: Page, url: str) -> Page:
    """The Chat tab of a server that accepts images and audio, according to `/props`."""
    return open_chat(page, url)


def open_chat(page: Page, url: str) -> Page:
    takes(page, vision=True, audio=True)
    open_tab(page, url)
    wait_ready(page)
    expect(attach(page)).to_be_visible()
    return page


def takes(page: Page, **modalities: bool) -> None:
    def answer(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "modalities": modalities})

    page.route("**/props", answer)


def attach(page: Page) -> Locator:
    return page.get_by_role("button", name="Attach files")


def choose(page: Page, *files: Any) -> None:
    with page.expect_file_chooser() as chooser:
        attach(page).click()
    chooser.value.set_files(list(files))


def attached(page: Page) -> Locator:
    return page.locator(".composer").get_by_role("listitem")


def sent_content(page: Page, text: str) -> Any:
    with page.expect_request(CHAT) as sent:
        send(page, text)
    return sent.value.post_data_json["messages"][-1]["content"]


def test_images_and_audio_are_attached_shown_sent_and_kept(chat: Page) -> None:
    answer_with(chat, "A red square.")
    choose(chat, file("red.png", "image/png", png()), file("silence.wav", "audio/wav", wav()))
    expect(attached(chat)).to_have_count(2)
    expect(chat.get_by_role("img", name="red.png")).to_be_visible()
    content = sent_content(chat, "What is this?")
    assert content == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}},
        {"type": "text", "text": "What is this?"},
    ]
    expect(attached(chat)).to_have_count(0)
    expect(messages(chat, "assistant")).to_contain_text("A red square.")
    chat.reload()
    expect(messages(chat, "user").get_by_role("img", name="red.png")).to_be_visible()
    assert messages(chat, "user").locator("audio").evaluate("(one) => one.readyState >= 0 && !one.error")
    with chat.expect_request(CHAT) as sent:
        messages(chat, "assistant").get_by_role("button", name="Regenerate answer").click()
    assert sent.value.post_data_json["messages"][0]["content"] == content


def test_an_image_alone_is_a_message_and_can_be_removed_before_sending(chat: Page) -> None:
    answer_with(chat, "Red.")
    button = chat.get_by_role("button", name="Send", exact=True)
    choose(chat, file("a.png", "image/png", png()), file("b.png", "image/png", png(4, 4)))
    expect(button).to_be_enabled()
    chat.get_by_role("button", name="Remove a.png").click()
    expect(attached(chat)).to_have_count(1)
    with chat.expect_request(CHAT) as sent:
        button.click()
    assert [part["type"] for part in sent.value.post_data_json["messages"][0]["content"]] == ["image_url"]
    expect(chat.locator(".conversation")).to_have_text("b.png")


CODE = b"print('hi')\n```\nend\n"


def test_a_text_file_is_a_chip_with_its_tokens_and_is_sent_in_a_fence_with_its_name(chat: Page) -> None:
    answer_with(chat, "A program.")
    choose(chat, file("a.py", "text/x-python", CODE), file("b.csv", "text/csv", b"a,b\n1,2\n"))
    expect(attached(chat)).to_have_count(2)
    expect(attached(chat).first).to_contain_text(re.compile(r"a\.py \d+ tokens"))
    assert sent_content(chat, "What is this?") == (
        "a.py:\n````py\nprint('hi')\n```\nend\n````\n\nb.csv:\n```csv\na,b\n1,2\n```\n\nWhat is this?"
    )
    chip = messages(chat, "user").locator(".chip").first
    expect(chip.locator("pre")).to_be_hidden()
    chip.locator("summary").click()
    expect(chip.locator("pre")).to_contain_text("print('hi')")
    assert axe_violations(chat) == []
    assert "a.py:\n````py" in exported(chat, "This conversation", "Export as Markdown").read_text()
    chat.reload()
    expect(messages(chat, "user").locator(".chip")).to_have_count(2)


def test_a_pdf_of_20_pages_is_a_chip_with_its_tokens_and_is_sent_as_its_text(chat: Page, server: ServerProcess) -> None:
    answer_with(chat, "A report.")
    pages = [f"Page {i} of the report" for i in range(1, 21)]
    n_tokens = len(server.post("/tokenize", {"content": "\n\n".join(pages)})["tokens"])
    choose(chat, file("report.pdf", "application/pdf", pdf(pages)))
    expect(attached(chat)).to_contain_text(f"report.pdf {n_tokens} tokens")
    meter = chat.locator(".context-meter")
    expect(meter).to_be_visible()
    assert n_tokens < used(meter) < n_tokens + 100  # with the template
    content = sent_content(chat, "What is this?")
    assert content.startswith("report.pdf:\n```pdf\nPage 1 of the report\n\nPage 2 of the report\n")
    assert content.endswith("Page 20 of the report\n```\n\nWhat is this?")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            scanned_pdf(1),
            "it contains no text, perhaps because its pages are images; run text recognition (OCR) first.",
        ),
        (b"%PDF-1.4 damaged", "it is not a valid PDF: "),
    ],
)
def test_a_pdf_without_a_text_is_not_attached(chat: Page, data: bytes, why: str) -> None:
    choose(chat, file("report.pdf", "application/pdf", data))
    expect(chat.get_by_text(f"report.pdf was not attached: {why}")).to_be_visible()
    expect(attached(chat)).to_have_count(0)


def test_a_file_that_is_dropped_beside_the_field_is_attached_and_does_not_replace_the_page(chat: Page) -> None:
    drop = """([tab, selector]) => {
      const transfer = new DataTransfer()
      transfer.items.add(new File(['Some notes'], 'notes.md', {type: 'text/markdown'}))
      const event = new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true})
      document.querySelector(selector).dispatchEvent(event)
      return event.defaultPrevented
    }"""
    assert chat.evaluate(drop, ["chat", ".chat-bar"])
    expect(attached(chat)).to_contain_text("notes.md")
    chat.get_by_role("link", name="Models").click()
    expect(chat.locator("main > section.models")).to_be_visible()
    assert chat.evaluate(drop, ["models", "section.models"])
    chat.get_by_role("link", name="Chat").click()
    expect(attached(chat)).to_have_count(1)


def used(meter: Locator) -> int:
    return int(meter.inner_text().split(" of ")[0].replace(",", ""))


@pytest.mark.parametrize(
    ("keep", "said"), [(64, "the oldest {half} tokens after the first 64"), (-1, "the older half of the answer")]
)
def test_what_a_full_context_forgets_is_said_with_context_shift(page: Page, url: str, keep: int, said: str) -> None:
    def answer(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "n_keep": keep})

    page.route("**/props", answer)
    open_tab(page, url)
    wait_ready(page)
    page.get_by_role("textbox", name="Message").fill("one two three")
    meter = page.locator(".context-meter")
    expect(meter).to_contain_text("; when it is full, the model forgets ")
    limit = int(meter.inner_text().split(" of ")[1].split()[0].replace(",", ""))
    expect(meter).to_contain_text(said.format(half=f"{(limit - 64) // 2:,}"))


def test_how_full_the_context_is_is_shown_before_a_message_is_sent(
    new_context: Callable[..., BrowserContext], url: str
) -> None:
    chat = open_chat(new_context().new_page(), url)
    meter = chat.locator(".context-meter")
    expect(meter).to_have_count(0)
    field = chat.get_by_role("textbox", name="Message")
    field.fill("one two three")
    expect(meter).to_contain_text(re.compile(r"^\s*\d\d of [\d,]+ tokens \(0%\)$"))  # the chat template's too
    short = used(meter)
    assert short > 20
    asked: list[str] = []
    chat.on("request", lambda request: asked.append(request.url) if request.url.endswith("/input_tokens") else None)
    chat.clock.install()
    chat.clock.pause_at(chat.evaluate("Date.now() / 1000 + 1"))
    field.press_sequentially(" four five six")
    chat.clock.run_for(1000)
    chat.clock.resume()
    expect(meter).to_contain_text(f"{short + 3} of")
    assert len(asked) == 1, "not at each key"
    chat.get_by_role("button", name="Conversation settings").click()
    chat.get_by_label("System prompt").fill("You are a pirate. " * 20)
    chat.keyboard.press("Escape")
    field.press_sequentially(" seven")
    wait_until(lambda: used(meter) > short + 100)  # with the system prompt
    field.fill("word " * 20_000)
    expect(meter).to_contain_text("too long; shorten it")
    assert axe_violations(chat) == []


GIVE = """([name, type, data, kind]) => {
  const transfer = new DataTransfer()
  transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, {type}))
  const input = document.querySelector('.composer textarea')
  const fields = {clipboardData: transfer, dataTransfer: transfer, bubbles: true, cancelable: true}
  input.dispatchEvent(kind === 'paste' ? new ClipboardEvent(kind, fields) : new DragEvent(kind, fields))
}"""


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_an_image_is_pasted_or_dropped(chat: Page, kind: str) -> None:
    chat.evaluate(GIVE, ["shot.png", "image/png", base64.b64encode(png()).decode(), kind])
    expect(chat.locator(".composer").get_by_role("img", name="shot.png")).to_be_visible()
    chat.evaluate(GIVE, ["notes.pdf", "application/pdf", "AAAA", kind])
    expect(chat.locator(".toasts")).to_have_text(
        "notes.pdf was not attached: it is neither UTF-8 text nor a PDF nor an image nor a WAV, MP3 or FLAC file."
    )


def test_a_large_image_is_scaled_down_before_it_is_sent(chat: Page) -> None:
    answer_with(chat, "Red.")
    choose(chat, file("large.png", "image/png", png(3000, 1500)))
    expect(attached(chat)).to_have_count(1)
    [picture, _] = sent_content(chat, "Which colour?")
    data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
    assert struct.unpack(">II", data[16:24]) == (1536, 768)


def test_an_image_in_a_format_that_the_server_cannot_read_is_converted(chat: Page) -> None:
    answer_with(chat, "Red.")
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"><rect width="20" height="10"/></svg>'
    choose(chat, file("drawing.svg", "image/svg+xml", drawing), file("broken.png", "image/png", b"no picture"))
    expect(chat.locator(".toasts")).to_contain_text(
        "broken.png was not attached: the browser cannot decode this image."
    )
    for each in attached(chat).all():
        assert (each.get_by_role("img").get_attribute("src") or "").startswith("data:image/png;base64,")


@pytest.mark.parametrize("modalities", [{}, {"vision": False, "audio": False}])
def test_a_text_only_model_rejects_an_image_with_a_message(page: Page, url: str, modalities: dict[str, bool]) -> None:
    takes(page, **modalities)
    open_tab(page, url)
    wait_ready(page)
    page.evaluate(GIVE, ["shot.png", "image/png", base64.b64encode(png()).decode(), "paste"])
    expect(page.locator(".toasts")).to_have_text("shot.png was not attached: this model does not accept images.")


def test_conversations_with_media_are_exported_and_imported(chat: Page) -> None:
    answer_with(chat, "Red.")
    choose(chat, file("red.png", "image/png", png()), file("silence.wav", "audio/wav", wav()))
    expect(attached(chat)).to_have_count(2)
    ask(chat, "Which colour?")
    path = exported(chat, "This conversation", "Export as JSON")
    assert "(image: red.png)" in exported(chat, "This conversation", "Export as Markdown").read_text()
    [conversation] = json.loads(path.read_text())["conversations"]
    asked = {"role": "user", "content": [
        {"type": "text", "text": "And this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "mp3"}},
    ]}  # fmt: skip
    beacon = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}
    [first] = [one for one in conversation["messages"].values() if one["role"] == "user"]
    first["media"][0]["url"] = "https://example.org/a.png"
    changed = {"format": "cppbatch-chat", "conversations": [conversation]}
    for name, content, toast in (
        ("remote.json", {"messages": [beacon]}, "remote.json could not be imported: Only text"),
        ("changed.json", changed, "changed.json could not be imported: A conversation in the file is damaged"),
        ("own.json", json.loads(path.read_text()), "1 conversation imported"),
        ("openai.json", {"messages": [asked]}, "1 conversation imported"),
    ):
        data = file(name, "application/json", json.dumps(content).encode())
        chat.get_by_label("File to import").set_input_files(data)
        expect(chat.locator(".toast").last).to_contain_text(toast)
    expect(messages(chat, "user").get_by_role("img")).to_have_count(1)
    with chat.expect_request(CHAT) as sent:
        send(chat, "Again")
    assert sorted(map(str, sent.value.post_data_json["messages"][0]["content"])) == sorted(map(str, asked["content"]))


def test_attached_media_are_accessible_and_fit_a_phone(chat: Page) -> None:
    phone(chat)
    answer_with(chat, "Red.")
    wide, sound = file("wide" * 30 + ".png", "image/png", png(900, 20)), file("tone.wav", "audio/wav", wav())
    for _ in range(2):
        choose(chat, wide, sound)
        expect(attached(chat)).to_have_count(2)
        assert overflow(chat) == []
        assert axe_violations(chat) == []
        dark(chat)
        assert axe_violations(chat) == []
        ask(chat, "Which colour?")
    assert overflow(chat) == []
    assert axe_violations(chat) == []


def test_a_model_with_a_projector_answers_about_an_image(
    page: Page, fresh_server: Callable[..., ServerProcess], tiny_llama: Path, tmp_path: Path
) -> None:
    """The server accepts what the page sends: 16 tokens of the prompt are the image."""
    projector = tiny_projectors.vision(tmp_path / "mmproj.gguf", n_embd=tiny_models.N_EMBD)
    server = fresh_server("-m", tiny_llama, "--mmproj", projector, "-np", "2", "-c", "1024", "-n", "8", "--ignore-eos")
    open_tab(page, f"{server.url}/")
    wait_ready(page)
    prompts = []
    for picture in (None, file("red.png", "image/png", png(64, 64))):
        page.get_by_role("button", name="New conversation").click()
        if picture:
            choose(page, picture)
            expect(attached(page)).to_have_count(1)
        ask(page, "What is this?")
        shown = messages(page, "assistant").locator(".stats").inner_text()
        found = re.search(r"prompt (\d+)", shown)
        assert found, shown
        prompts.append(int(found[1]))
    assert prompts[1] - prompts[0] >= tiny_projectors.IMAGE_TOKENS
    open_tab(page, f"{server.url}/", "models")
    expect(page.get_by_role("row").last).to_contain_text("takes text, image")
    open_tab(page, f"{server.url}/")
    choose(page, file("broken.gif", "image/gif", b"GIF89a"))
    expect(page.locator(".toasts")).to_contain_text("broken.gif was not attached")
