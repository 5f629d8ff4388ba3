"""The Chat tab: streaming, stopping, versions of messages, settings, thoughts and tools, storage, and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, Route, expect

from tests.browser.hostile import LONG_WORD, MARKS, UNMARKED
from tests.browser.page_checks import axe_violations, dark, open_tab, overflow, phone, wait_ready
from tests.support.batch_files import wait_until
from tests.support.scripted_chat import ENDS, SCRIPT, ChatServer, ScriptedFormat
from tests.support.server_process import ServerProcess

CHAT = "**/v1/chat/completions"
ANSWERED = 60_000  # milliseconds
GROW = "(one) => { one.firstElementChild.style.paddingBottom = '500px'; one.dispatchEvent(new Event('scroll')) }"
"""The scroll event arrives after more text has arrived."""
FROM_END = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight"


@pytest.fixture
def chat(page: Page, url: str) -> Page:
    """The page at the Chat tab, with a ready server and no conversations."""
    open_tab(page, url)
    wait_ready(page)
    return page


def settings(page: Page, **values: str) -> None:
    """Fills fields of the conversation's settings, by their labels."""
    page.get_by_role("button", name="Conversation settings").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for summary in dialog.locator("summary").all():
        if summary.locator("..").get_attribute("open") is None:
            summary.click()
    for label, value in values.items():
        dialog.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def send(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def send_without_end(page: Page, text: str = "Count from one to five hundred, in words.") -> None:
    """Sends a message with an answer that ends only when it is stopped."""

    def endless(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    page.route(CHAT, endless)
    settings(page, Temperature="0")
    send(page, text)


def messages(page: Page, role: str = "") -> Locator:
    return page.locator(f".message{'.' + role if role else ''}")


def answered(page: Page) -> str:
    """The text of the last answer, once it has ended."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it has begun
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=ANSWERED)
    return messages(page, "assistant").last.locator(".markdown").last.inner_text()


def ask(page: Page, text: str) -> str:
    send(page, text)
    return answered(page)


def sse(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page: Page, text: str) -> None:
    """The next answers are this text, regardless of the model."""
    delta = {"choices": [{"index": 0, "delta": {"content": text}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=sse(delta, last)))


# --- the stream -----------------------------------------------------------------------------------------------------


def test_an_answer_streams_and_stops(chat: Page, server: ServerProcess) -> None:
    send_without_end(chat)
    answer = messages(chat, "assistant").locator(".markdown")
    expect(answer).not_to_be_empty(timeout=ANSWERED)
    early = answer.inner_text()
    expect(answer).not_to_have_text(early, timeout=ANSWERED)
    assert answer.inner_text().startswith(early.rstrip()[: len(early) // 2])
    chat.get_by_role("button", name="Stop").click()
    expect(messages(chat, "assistant")).to_contain_text("Stopped.")
    stopped = answered(chat)
    server.wait_idle()
    assert answered(chat) == stopped
    chat.get_by_role("button", name="Continue").click()
    expect(answer).not_to_have_text(stopped, timeout=ANSWERED)
    assert answer.inner_text().startswith(stopped.rstrip()[: len(stopped) // 2])
    chat.keyboard.press("Escape")  # in the field for messages, which has the focus
    chat.get_by_role("textbox", name="Message").press("Escape")
    expect(messages(chat, "assistant")).to_contain_text("Stopped.")


def test_an_answer_shows_its_tokens_speed_and_time_to_the_first_token(chat: Page) -> None:
    settings(chat, Maximum_tokens="12")
    ask(chat, "Tell a long story about a lighthouse.")
    figures = messages(chat, "assistant").locator(".stats").inner_text()
    assert re.match(r"12 tokens · [\d,.]+ tokens/s · TTFT [\d.]+ m?s · prompt \d+", figures), figures
    expect(messages(chat, "assistant")).to_contain_text("Reached the maximum number of tokens.")


def test_enter_sends_and_shift_enter_starts_a_line(chat: Page) -> None:
    answer_with(chat, "Yes.")
    field = chat.get_by_role("textbox", name="Message")
    expect(field).to_be_focused()
    chat.keyboard.type("one")
    chat.keyboard.press("Shift+Enter")
    chat.keyboard.type("two")
    assert field.input_value() == "one\ntwo"
    chat.keyboard.press("Enter")
    expect(messages(chat, "user")).to_have_text("one\ntwo")
    expect(field).to_have_value("")


def test_an_answer_continues_while_another_tab_or_conversation_is_shown(chat: Page) -> None:
    answer = messages(chat, "assistant").last.locator(".markdown")
    early = {}
    for topic in ("sea", "hills"):
        chat.get_by_role("button", name="New conversation").click()
        send_without_end(chat, f"Tell me about the {topic}.")
        expect(answer).not_to_be_empty(timeout=ANSWERED)
        early[topic] = len(answer.inner_text())
    expect(chat.locator(".conversation .pulse")).to_have_count(2)
    chat.evaluate("location.hash = 'models'")
    expect(chat.locator("main > section.chat")).to_be_hidden()
    chat.evaluate("location.hash = 'chat'")
    for topic in reversed(early):
        chat.get_by_role("button", name=f"Tell me about the {topic}.").click()
        wait_until(lambda topic=topic: len(answer.inner_text()) > early[topic] + 20)  # type: ignore[misc]
        chat.get_by_role("button", name="Stop").click()
        assert answered(chat)


def test_a_worker_that_is_killed_is_not_seen_in_the_stream(chat: Page, server: ServerProcess) -> None:
    settings(chat, Temperature="0", Maximum_tokens="300")
    send(chat, "Write a story about a mill.")
    expect(messages(chat, "assistant").locator(".markdown")).not_to_be_empty(timeout=ANSWERED)
    (worker,) = server.workers
    worker.kill()
    assert answered(chat)
    expect(messages(chat, "assistant").locator(".stats")).to_contain_text("300 tokens")
    expect(chat.locator(".notice")).to_have_count(0)


# --- versions -------------------------------------------------------------------------------------------------------


def test_an_edited_message_is_answered_again_and_its_earlier_version_can_be_shown(chat: Page) -> None:
    settings(chat, Maximum_tokens="8")
    first = ask(chat, "Name a fruit.")
    messages(chat, "user").get_by_role("button", name="Edit").click()
    editor = chat.get_by_role("textbox", name="Message text")
    expect(editor).to_be_focused()
    editor.fill("Name a town.")
    chat.locator(".editor").get_by_role("button", name="Send").click()
    expect(messages(chat, "user")).to_contain_text("Name a town.")
    answered(chat)
    expect(messages(chat)).to_have_count(2)
    expect(messages(chat, "user").locator(".versions")).to_have_text("2/2")
    chat.get_by_role("button", name="Previous version").click()
    expect(messages(chat, "user")).to_contain_text("Name a fruit.")
    assert answered(chat) == first


def test_an_answer_can_be_made_again_edited_and_deleted(chat: Page) -> None:
    settings(chat, Maximum_tokens="8")
    first = ask(chat, "Name a fruit.")
    chat.get_by_role("button", name="Regenerate answer").click()
    expect(messages(chat, "assistant").locator(".versions")).to_have_text("2/2", timeout=ANSWERED)
    messages(chat, "assistant").get_by_role("button", name="Edit").click()
    chat.get_by_role("textbox", name="Message text").fill("A quince.")
    chat.get_by_role("button", name="Save as new version").click()
    assert answered(chat) == "A quince."
    expect(messages(chat, "assistant").locator(".versions")).to_have_text("3/3")
    messages(chat, "assistant").get_by_role("button", name="Delete").click()
    expect(messages(chat, "assistant").locator(".versions")).to_have_text("2/2")
    chat.get_by_role("button", name="Previous version").click()
    assert answered(chat) == first
    chat.get_by_role("button", name="Undo").click()
    expect(messages(chat, "assistant").locator(".versions")).to_have_text("3/3")


# --- settings -------------------------------------------------------------------------------------------------------


def test_system_prompt_and_settings_are_sent_and_new_conversations_start_with_them(chat: Page) -> None:
    answer_with(chat, "Ahoy.")
    settings(
        chat, System_prompt="You are a pirate.", Temperature="0.25", Stop_strings="END\nSTOP", JSON_schema='{"a": 1}'
    )
    for new in (False, True):
        if new:
            expect(messages(chat, "assistant")).to_contain_text("Ahoy.")
            chat.get_by_role("button", name="New conversation").click()
            expect(messages(chat)).to_have_count(0)
        with chat.expect_request(CHAT) as sent:
            send(chat, "Hello")
        body = sent.value.post_data_json
        assert body["messages"][0] == {"role": "system", "content": "You are a pirate."}
        assert (body["temperature"], body["stop"], body["json_schema"]) == (0.25, ["END", "STOP"], {"a": 1})
        assert not {"top_p", "top_k", "seed"} & body.keys()  # the server's
        assert body["max_tokens"] == 4096  # the text of a model that repeats itself ends


def test_settings_show_their_meaning_the_servers_default_and_errors(chat: Page) -> None:
    chat.get_by_role("button", name="Conversation settings").click()
    dialog = chat.get_by_role("dialog")
    expect(dialog.get_by_label("Temperature")).to_have_attribute("placeholder", "0.8")
    expect(dialog).to_contain_text("Higher values pick less likely tokens more often.")
    dialog.get_by_label("Top-p").fill("1.5")
    expect(dialog.get_by_role("alert")).to_have_text("It must be from 0 to 1; the value is ignored.")
    dialog.get_by_role("button", name="Reset to server settings").click()
    expect(dialog.get_by_role("alert")).to_have_count(0)
    dialog.get_by_text("More settings").click()
    dialog.get_by_label("JSON schema").fill("{")
    expect(dialog.get_by_role("alert")).to_contain_text("This is not valid JSON")
    assert axe_violations(chat) == []


# --- thoughts, tools, and what is never run -------------------------------------------------------------------------


@pytest.fixture
def scripted(tiny_llama: Path) -> Iterator[ChatServer]:
    server = ChatServer(tiny_llama)
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    yield server
    server.stop()


def test_thoughts_are_folded_and_the_results_of_tool_calls_are_sent(page: Page, scripted: ChatServer) -> None:
    open_tab(page, f"{scripted.url}/")
    wait_ready(page)
    ask(page, "What is the weather in Paris?")
    thoughts = page.locator(".thoughts")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.get_by_text("Let me think.")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.get_by_text("Let me think.")).to_be_visible()
    expect(page.locator(".call")).to_have_count(2)
    expect(page.locator(".call").first).to_contain_text('"city": "Paris"')
    assert axe_violations(page) == []
    page.locator(".call").nth(0).get_by_label("Result").fill("18 degrees")
    page.locator(".call").nth(1).get_by_label("Result").fill("noon")
    with page.expect_request(CHAT) as sent:
        page.get_by_role("button", name="Send results").click()
    *_, call, first, second = sent.value.post_data_json["messages"]
    assert [each["function"]["name"] for each in call["tool_calls"]] == ["weather", "time"]
    assert (first["role"], first["tool_call_id"], first["content"]) == (
        "tool",
        call["tool_calls"][0]["id"],
        "18 degrees",
    )
    assert second["content"] == "noon"
    assert "reasoning" not in json.dumps(sent.value.post_data_json["messages"])


DEEP = (f"{'>' * 5000} quoted", f"{'> ' * 80}quoted", f"{'- ' * 80}item")  # deeper than the page reads


def test_text_that_is_nested_too_deep_is_shown_as_it_was_written(chat: Page) -> None:
    for text in DEEP:
        answer_with(chat, f"{text}\n\n**after**")
        ask(chat, "Quote")
        answer = messages(chat, "assistant").last
        expect(answer.locator(".markdown .plain")).to_have_text(text)
        expect(answer.locator("strong")).to_have_text("after")
    answer_with(chat, f"{'> ' * 15}**quoted**")
    ask(chat, "Again")
    expect(messages(chat, "assistant").last.locator("blockquote")).to_have_count(15)


def test_a_link_with_a_later_target_is_rendered_when_the_answer_is_complete_and_after_a_reload(chat: Page) -> None:
    answer_with(chat, "See [this][1].\n\nMore.\n\n[1]: https://example.org/a")
    ask(chat, "Where?")
    for _ in range(2):
        expect(chat.get_by_role("link", name="this")).to_have_attribute("href", "https://example.org/a")
        chat.reload()


def test_arguments_of_a_call_that_are_nested_deep_are_shown_as_they_are(chat: Page) -> None:
    """Indented, 20 KB of them would be 100 MB."""
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "[" * 10_000 + "]" * 10_000}}
    delta = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    chat.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=sse(delta, last)))
    send(chat, "Call")
    expect(chat.locator(".call pre")).to_have_text("[" * 10_000 + "]" * 10_000)


def test_model_output_is_shown_and_never_run(page: Page, hostile_server: ServerProcess) -> None:
    phone(page)
    open_tab(page, f"{hostile_server.url}/")
    wait_ready(page)
    settings(page, Maximum_tokens="300")
    ask(page, "<img src=x onerror='window.hacked = true'>")
    expect(messages(page, "user")).to_contain_text("<img src=x onerror=")
    expect(messages(page, "assistant").locator(".markdown")).to_contain_text("<script>window.hacked = true</script>")
    assert page.evaluate(MARKS) == UNMARKED
    assert overflow(page) == []
    assert page.evaluate(
        "[...document.querySelectorAll('main a[href]')].every(({protocol, rel, target}) => "
        "['http:', 'https:', 'mailto:'].includes(protocol) && rel.includes('noopener'))"
    )


MARKDOWN = """Some *emphasis*, a [link](https://example.org/a), &lt;b&gt; &amp; &#169; &unknown; and `code &amp;`.

```python
def add(a, b):
    return a + b
```

| left | right |
|---|--:|
| 1 | 2 |

- [x] done

# Heading

Setext
------

> quoted **strong** ~~deleted~~
> second line

3. third
   1. inner

4. fourth

[reference][r], ![picture](https://example.org/b.png), [unsafe](javascript:alert), <b>inline</b> \\*no emphasis\\*

[r]: https://example.org/r

***

<div>
block
</div>

    indented
"""


def test_markdown_is_rendered_and_code_is_highlighted_and_copied(chat: Page) -> None:
    answer_with(chat, MARKDOWN)
    ask(chat, "Show me")
    answer = messages(chat, "assistant")
    expect(answer.locator("em")).to_have_text("emphasis")
    expect(answer.locator("a").first).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("td").last).to_have_css("text-align", "right")
    expect(answer.locator(".code-kwd").first).to_have_text("def")
    assert "☑ done" in answer.inner_text()
    expect(answer.locator("p").first).to_have_text("Some emphasis, a link, <b> & © &unknown; and code &amp;.")
    expect(answer.locator("h1")).to_have_text("Heading")
    expect(answer.locator("h2")).to_have_text("Setext")
    expect(answer.locator("blockquote")).to_have_text("quoted strong deletedsecond line")
    assert answer.locator("blockquote").inner_html().count("<br>") == 1
    expect(answer.locator("ol").first).to_have_attribute("start", "3")
    expect(answer.locator("li ol li")).to_have_text("inner")
    expect(answer.locator("p", has_text="reference")).to_have_text(
        "reference, picture, unsafe, <b>inline</b> *no emphasis*"
    )
    links = answer.locator("a").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))")
    assert links == [f"https://example.org/{name}" for name in ("a", "r", "b.png")]
    expect(answer.locator("hr")).to_have_count(1)
    expect(answer.locator(".markdown")).to_contain_text("<div>\nblock\n</div>")
    expect(answer.locator("pre").last).to_have_text("indented")
    answer.get_by_role("button", name="Copy", exact=True).first.click()
    assert chat.evaluate("navigator.clipboard.readText()") == "def add(a, b):\n    return a + b"
    assert axe_violations(chat) == []
    dark(chat)
    assert axe_violations(chat) == []


# --- storage --------------------------------------------------------------------------------------------------------


def test_conversations_are_kept_renamed_and_deleted(chat: Page) -> None:
    answer_with(chat, "Yes.")
    for text in ("First question", "Second question"):
        chat.get_by_role("button", name="New conversation").click()
        ask(chat, text)
    chat.reload()
    listed = chat.locator(".conversation")
    expect(listed).to_have_text(["Second question", "First question"])
    expect(messages(chat)).to_have_count(2)
    listed.nth(1).click()
    expect(messages(chat, "user")).to_have_text("First question")
    chat.get_by_role("button", name="This conversation", exact=True).click()
    chat.get_by_role("menuitem", name="Rename").click()
    chat.get_by_role("dialog").get_by_label("Title").fill("Another name")
    chat.keyboard.press("Enter")
    expect(listed).to_have_text(["Second question", "Another name"])
    chat.get_by_role("button", name="This conversation", exact=True).click()
    chat.get_by_role("menuitem", name="Delete").click()
    expect(listed).to_have_text(["Second question"])
    chat.get_by_role("button", name="Undo").click()
    expect(listed).to_have_count(2)
    chat.get_by_role("button", name="All conversations").click()
    chat.get_by_role("menuitem", name="Delete all").click()
    chat.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    expect(listed).to_have_count(0)
    chat.reload()
    wait_ready(chat)
    expect(listed).to_have_count(0)


def test_a_conversation_that_cannot_be_deleted_from_the_browser_stays_in_the_list(chat: Page) -> None:
    answer_with(chat, "Yes.")
    ask(chat, "A question")
    chat.evaluate("() => { IDBObjectStore.prototype.delete = () => { throw new Error('the disk is full'); }; }")
    chat.get_by_role("button", name="This conversation", exact=True).click()
    chat.get_by_role("menuitem", name="Delete").click()
    expect(chat.get_by_text("The conversation could not be deleted: the disk is full")).to_be_visible()
    expect(chat.locator(".conversation")).to_have_text(["A question"])


def exported(page: Page, menu: str, item: str) -> Path:
    page.get_by_role("button", name=menu, exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name=item).click()
    return download.value.path()


def test_a_message_typed_right_after_new_conversation_is_sent(chat: Page) -> None:
    """Within the frame in which the new conversation is not yet shown."""
    answer_with(chat, "Yes.")
    texts = [f"Question {i}" for i in range(12)]
    for text in texts:
        chat.get_by_role("button", name="New conversation").click()
        send(chat, text)
    expect(chat.locator(".conversation")).to_have_text(texts[::-1])


def test_a_message_that_is_sent_before_the_kept_conversations_are_read_is_kept_too(chat: Page) -> None:
    answer_with(chat, "Yes.")
    ask(chat, "First")
    chat.evaluate("sessionStorage.clear()")
    held: list[Route] = []
    chat.route("**/conversation_store.js", lambda route: held.append(route))  # noqa: PLW0108  # Playwright marks its handlers
    chat.reload()
    ask(chat, "Second")
    held.pop().continue_()
    expect(chat.locator(".conversation")).to_have_text(["Second", "First"])
    expect(messages(chat)).to_have_count(2)
    chat.unroute("**/conversation_store.js")
    chat.reload()
    expect(chat.locator(".conversation")).to_have_text(["Second", "First"])


def test_two_browser_tabs_write_in_one_conversation(chat: Page, url: str) -> None:
    other = chat.context.new_page()
    for page in (chat, other):
        answer_with(page, "Yes.")
    texts = ["From the first tab", "From the second tab", "And again from the first"]
    ask(chat, texts[0])
    open_tab(other, url)
    other.locator(".conversation").click()
    expect(messages(other)).to_have_count(2)
    ask(other, texts[1])
    expect(messages(chat)).to_have_count(4)
    ask(chat, texts[2])
    for page in (chat, other):
        expect(messages(page, "user").locator(".plain")).to_have_text(texts)
    messages(other).last.get_by_role("button", name="Delete").click()
    expect(messages(chat)).to_have_count(5)
    chat.get_by_role("button", name="This conversation", exact=True).click()
    chat.get_by_role("menuitem", name="Rename").click()
    chat.get_by_label("Title").fill("Shared")
    chat.get_by_role("button", name="Save", exact=True).click()
    expect(other.locator(".conversation")).to_have_text("Shared")
    other.reload()
    expect(messages(other)).to_have_count(5)
    chat.get_by_role("button", name="This conversation", exact=True).click()
    chat.get_by_role("menuitem", name="Delete").click()
    expect(other.locator(".conversation")).to_have_count(0)
    expect(messages(other)).to_have_count(0)


MERGE = """async () => {
  const {add, change, merged, newConversation, pathOf, remove} = await import('/page/chat/conversation.js')
  const say = (conversation, parent, id) => add(conversation, parent, {id, role: 'user', content: id})
  const base = say(say(newConversation(), 'root', 'a'), 'a', 'b')
  const b = base.messages.b
  const cases = {
    'both answer': [say(base, 'b', 'ours'), say(base, 'b', 'theirs')],
    'one changes, one adds': [change(base, 'b', {content: 'changed'}), say(base, 'b', 'theirs')],
    'one removes what the other continues': [say(base, 'b', 'ours'), remove(base, b)],
    'both remove': [remove(base, b), remove(base, b)],
    'settings and title': [{...base, title: 'ours'}, {...base, title: 'theirs', system: 'theirs'}],
  }
  return Object.fromEntries(Object.entries(cases).map(([name, [ours, theirs]]) => {
    const {messages, title, system, ...rest} = merged(base, ours, theirs)
    const path = pathOf({messages, ...rest}).map(({content}) => content)
    return [name, [Object.keys(messages).sort().join(' '), path.join(' '), title, system]]
  }))
}"""


def test_changes_of_two_browser_tabs_are_merged(modules: Page) -> None:
    assert modules.evaluate(MERGE) == {
        "both answer": ["a b ours theirs", "a b ours", "a", ""],
        "one changes, one adds": ["a b theirs", "a changed theirs", "a", ""],
        "one removes what the other continues": ["a", "a", "a", ""],
        "both remove": ["a", "a", "a", ""],
        "settings and title": ["a b", "a b", "ours", "theirs"],
    }


def test_an_answer_is_shown_and_stopped_in_another_browser_tab(chat: Page, url: str) -> None:
    send_without_end(chat)
    expect(messages(chat, "assistant").locator(".markdown")).not_to_be_empty(timeout=ANSWERED)
    other = chat.context.new_page()
    open_tab(other, url)
    other.locator(".conversation").click()
    expect(other.get_by_text("Interrupted.")).to_have_count(0)
    other.get_by_role("button", name="Stop", exact=True).click()
    for page in (chat, other):
        expect(page.get_by_text("Stopped.")).to_be_visible()
    assert messages(other, "assistant").text_content() == messages(chat, "assistant").text_content()


def test_conversations_are_exported_and_imported(chat: Page, new_context: Callable[..., BrowserContext]) -> None:
    answer_with(chat, "# Yes\n\nIndeed.")
    settings(chat, System_prompt="Be brief.")
    ask(chat, "Is it so?")
    markdown = exported(chat, "This conversation", "Export as Markdown").read_text()
    assert markdown == (
        "# Is it so?\n\n## System\n\nBe brief.\n\n## You\n\nIs it so?\n\n## Assistant\n\n# Yes\n\nIndeed.\n"
    )
    file = exported(chat, "All conversations", "Export all as JSON")
    other = new_context().new_page()
    other.goto(chat.url)
    wait_ready(other)
    other.get_by_label("File to import").set_input_files(
        {"name": "a.json", "mimeType": "", "buffer": file.read_bytes()}
    )
    expect(messages(other)).to_have_count(2)
    expect(other.locator(".conversation")).to_have_text("Is it so?")
    openai = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "from elsewhere"}]}
    upload = {"name": "b.json", "mimeType": "", "buffer": json.dumps(openai).encode()}
    other.get_by_label("File to import").set_input_files(upload)
    expect(messages(other, "user")).to_have_text("from elsewhere")
    for damaged in ('{"a": 1}', "no JSON", '{"format": "cppbatch-chat", "conversations": [{"messages": {"a": {}}}]}'):
        upload = {"name": "c.json", "mimeType": "", "buffer": damaged.encode()}
        other.get_by_label("File to import").set_input_files(upload)
        expect(other.locator(".toast.error").last).to_contain_text("c.json could not be imported")
    expect(other.locator(".conversation")).to_have_count(2)


def long_conversation(n: int) -> dict[str, Any]:
    roles = ("user", "assistant") * (n // 2)
    return {"messages": [{"role": role, "content": MARKDOWN} for role in roles]}


def test_a_long_conversation_is_not_rendered_again_while_an_answer_grows(chat: Page) -> None:
    upload = {"name": "a.json", "mimeType": "", "buffer": json.dumps(long_conversation(300)).encode()}
    chat.get_by_label("File to import").set_input_files(upload)
    expect(messages(chat)).to_have_count(300)
    expect(chat.locator(".assistant .markdown:empty")).to_have_count(0)
    expect(chat.locator("code:has(.code-kwd)")).to_have_count(150)
    chat.evaluate("""() => {
      window.changed = 0
      const observer = new MutationObserver((changes) => { window.changed += changes.length })
      document.querySelectorAll('.message .markdown').forEach((one) =>
        observer.observe(one, {childList: true, subtree: true, characterData: true}))
    }""")
    answer_with(chat, "word " * 2000)
    ask(chat, "And now?")
    expect(messages(chat)).to_have_count(302)
    assert chat.evaluate("window.changed") == 0


def test_the_view_follows_an_answer_unless_the_reader_has_scrolled_up(chat: Page) -> None:
    upload = {"name": "a.json", "mimeType": "", "buffer": json.dumps(long_conversation(4)).encode()}
    chat.get_by_label("File to import").set_input_files(upload)
    expect(messages(chat)).to_have_count(4)
    send_without_end(chat, "Forget the table. Write a long story about a mill and its miller.")
    chat.set_viewport_size({"width": 800, "height": 420})
    box = chat.get_by_role("region", name="Messages")
    wait_until(lambda: box.evaluate("(one) => one.scrollTop") > 60)
    answer = messages(chat, "assistant").last.locator(".markdown")
    expect(answer).not_to_be_empty(timeout=ANSWERED)
    wait_until(lambda: box.evaluate(FROM_END) < 60)
    box.evaluate(GROW)
    wait_until(lambda: box.evaluate(FROM_END) < 60)
    box.evaluate("(one) => { one.scrollTop = 0 }")
    before = answer.text_content() or ""  # not its inner text: what is out of view is not laid out
    wait_until(lambda: len(answer.text_content() or "") > len(before) + 4)
    assert box.evaluate("(one) => one.scrollTop") == 0
    chat.get_by_role("button", name="Scroll to end").click()
    wait_until(lambda: box.evaluate(FROM_END) < 60)


# --- small screens --------------------------------------------------------------------------------------------------


def test_on_a_phone_escape_closes_the_list_of_conversations(chat: Page) -> None:
    phone(chat)
    button = chat.get_by_role("button", name="Show conversations")
    button.click()
    expect(chat.get_by_role("complementary", name="Conversations")).to_be_visible()
    chat.keyboard.press("Escape")
    expect(chat.get_by_role("complementary", name="Conversations")).to_be_hidden()
    expect(button).to_have_attribute("aria-expanded", "false")


@pytest.mark.parametrize("name", ["table", "code-table", "scroll"])
def test_a_table_that_scrolls_has_a_shadow_at_the_edge_beyond_which_it_continues(chat: Page, name: str) -> None:
    chat.evaluate(
        """(name) => {
          const [box, wide] = [document.createElement('div'), document.createElement('div')]
          Object.assign(box, {className: name, id: 'box'})
          box.style.cssText = 'position: fixed; z-index: 50; inset: 0 auto auto 0; width: 200px; overflow: auto'
          wide.style.cssText = 'width: 900px; height: 20px'
          box.append(wide)
          document.body.append(box)
        }""",
        name,
    )

    def edges(scrolled: int) -> tuple[bytes, bytes]:
        chat.locator("#box").evaluate("(box, left) => { box.scrollLeft = left }", scrolled)
        clips = ({"x": x, "y": 10, "width": 6, "height": 20} for x in (2, 190))
        left, right = (chat.screenshot(clip=clip) for clip in clips)
        return left, right

    (start_left, start_right), (end_left, end_right) = edges(0), edges(700)
    assert start_left != end_left, "hidden at the start"
    assert start_right != end_right, "hidden at the end"


def test_on_a_phone_conversations_are_behind_a_button_and_nothing_overflows(chat: Page) -> None:
    answer_with(chat, f"{LONG_WORD}\n\n```\n{LONG_WORD}\n```\n\n| {LONG_WORD} | b |\n|---|---|\n| c | {LONG_WORD} |\n")
    phone(chat)
    ask(chat, LONG_WORD)
    assert overflow(chat) == []
    wide = chat.evaluate(
        "[...document.querySelectorAll('.message')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    )
    assert wide == 0
    sidebar = chat.get_by_role("complementary", name="Conversations")
    expect(sidebar).to_be_hidden()
    chat.get_by_role("button", name="Show conversations").click()
    expect(sidebar).to_be_visible()
    assert overflow(chat) == []
    assert axe_violations(chat) == []
    sidebar.get_by_role("button", name="New conversation").click()
    expect(sidebar).to_be_hidden()
    expect(messages(chat)).to_have_count(0)


# --- what people met ------------------------------------------------------------------------------------------------


def test_a_setting_out_of_range_is_reported_and_not_sent(chat: Page) -> None:
    settings(chat, Temperature="-5", Maximum_tokens="7")
    answer_with(chat, "Hello.")
    with chat.expect_request(CHAT) as asked:
        ask(chat, "Hi")
    assert "temperature" not in asked.value.post_data_json
    assert asked.value.post_data_json["max_tokens"] == 7
    chat.get_by_role("button", name="Conversation settings").click()
    expect(chat.get_by_text("It must be from 0 to 100; the value is ignored.")).to_be_visible()


def test_words_in_tables_are_not_broken(chat: Page) -> None:
    phone(chat)
    words = ["Constantinople", "Mississippi", "Czechoslovakia", "Liechtenstein", "Massachusetts"]
    answer_with(chat, "|" + "|".join(words) + "|\n" + "|---" * 5 + "|\n|" + "|".join(words) + "|\n")
    ask(chat, "A table")
    heights = chat.locator(".markdown td").evaluate_all(
        "(cells) => cells.map((cell) => { const range = document.createRange(); range.selectNodeContents(cell);"
        " return range.getClientRects().length })"
    )
    assert heights == [1] * 5, "a word has several lines"
    assert overflow(chat) == []


def test_a_toast_does_not_cover_send(chat: Page) -> None:
    answer_with(chat, "Hello.")
    ask(chat, "Hi")
    messages(chat, "assistant").get_by_role("button", name="Delete").click()
    toast = chat.locator(".toast")
    expect(toast).to_be_visible()
    for width in (1440, 390):
        chat.set_viewport_size({"width": width, "height": 740})
        over, below = toast.bounding_box(), chat.get_by_role("button", name="Send", exact=True).bounding_box()
        assert over
        assert below
        assert over["y"] + over["height"] < below["y"]


def test_the_speed_is_shown_while_an_answer_streams(chat: Page) -> None:
    send_without_end(chat)
    expect(messages(chat, "assistant").last.locator(".stats")).to_contain_text("/s", timeout=ANSWERED)
    expect(chat.get_by_role("button", name="Stop")).to_be_visible()
    chat.get_by_role("button", name="Stop").click()


def test_a_conversation_has_an_address(chat: Page, url: str) -> None:
    answer_with(chat, "One.")
    ask(chat, "First")
    address = chat.url
    assert re.search(r"#chat/\w+$", address)
    chat.get_by_role("button", name="New conversation").click()
    expect(chat).to_have_url(f"{url}#chat")
    other = chat.context.new_page()
    other.goto(address)
    expect(messages(other, "user")).to_have_text("First")
