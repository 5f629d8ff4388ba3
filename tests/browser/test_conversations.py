"""Conversations of the Chat tab: search, tags, presets, examples; files of Open WebUI and of llama.cpp's page."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page_checks import axe_violations, dark, open_tab, phone, wait_ready
from tests.browser.test_chat import CHAT, answer_with, ask, exported, messages

IMPACTS = ("critical", "serious", "moderate", "minor")
Json = dict[str, Any]


@pytest.fixture
def chat(page: Page, url: str) -> Page:
    open_tab(page, url)
    wait_ready(page)
    return page


def take_in(page: Page, name: str, content: bytes) -> None:
    page.get_by_label("File to import").set_input_files({"name": name, "mimeType": "", "buffer": content})


def test_conversations_are_found_by_words_and_tags(chat: Page) -> None:
    search = chat.get_by_role("searchbox", name="Search conversations")
    expect(search).to_have_count(0)  # there is nothing to find
    answer_with(chat, "Simmer it with basil.")
    ask(chat, "How do I cook tomato sauce?")
    chat.get_by_role("button", name="This conversation").click()
    chat.get_by_role("menuitem", name="Rename and tag").click()
    chat.get_by_role("textbox", name="Tags").fill("kitchen,  #Italian food, kitchen")
    assert axe_violations(chat, *IMPACTS) == []
    chat.get_by_role("button", name="Save", exact=True).click()
    chat.get_by_role("button", name="New conversation").click()
    answer_with(chat, "Paris.")
    ask(chat, "What is the capital of France?")
    listed = chat.locator(".conversation")
    expect(listed).to_have_count(2)
    for words, title in (
        ("tomato", "tomato sauce"),
        ("BASIL simmer", "tomato sauce"),
        ("#kit", "tomato sauce"),
        ("#italian-food cook", "tomato"),
        ("paris", "France"),
        ("capital", "France"),
    ):
        search.fill(words)
        expect(listed).to_have_count(1)
        expect(listed).to_contain_text(title)
    search.fill("tomato paris")
    expect(listed).to_have_count(0)
    expect(chat.get_by_text("No conversation has these words.")).to_be_visible()
    assert axe_violations(chat, *IMPACTS) == []
    chat.reload()
    expect(listed).to_have_count(2)
    expect(listed.filter(has_text="#kitchen")).to_contain_text("#Italian-food")
    expect(messages(chat)).to_have_count(2)
    assert axe_violations(chat, *IMPACTS) == []


def test_an_example_is_sent_with_a_click_and_presets_of_system_prompts_are_chosen_saved_and_deleted(chat: Page) -> None:
    chat.get_by_role("button", name="Conversation settings").click()
    prompt, preset = chat.get_by_label("System prompt"), chat.get_by_role("combobox", name="Preset")
    preset.select_option("Translator")
    expect(prompt).to_have_value(
        "Translate each message into English. If it is English, translate it into German. "
        "Answer with the translation only."
    )
    expect(chat.get_by_role("button", name="Delete preset")).to_have_count(0)
    prompt.fill("You are a pirate.")
    chat.get_by_label("Save as preset").fill("Pirate")
    assert axe_violations(chat, *IMPACTS) == []
    chat.get_by_role("button", name="Save", exact=True).click()
    expect(preset).to_have_value("Pirate")
    chat.keyboard.press("Escape")
    examples = chat.get_by_role("group", name="Example prompts").get_by_role("button")
    expect(examples).to_have_count(4)
    answer_with(chat, "Arr.")
    with chat.expect_request(CHAT) as sent:
        examples.first.click()
    system, question = sent.value.post_data_json["messages"]
    assert (system["content"], question["content"][:26]) == ("You are a pirate.", "Explain how a rainbow form")
    expect(examples).to_have_count(0)
    chat.reload()
    chat.get_by_role("button", name="Conversation settings").click()
    expect(preset).to_have_value("Pirate")
    chat.get_by_role("button", name="Delete preset").click()
    expect(preset.locator("option", has_text="Pirate")).to_have_count(0)
    expect(prompt).to_have_value("You are a pirate.")


PICTURE = "data:image/png;base64,iVBORw0KGgo="
SOUND = "data:audio/wav;base64,UklGRg=="
MEDIA = [
    {"kind": "image", "name": "a.png", "url": PICTURE},
    {"kind": "audio", "name": "b.wav", "url": SOUND},
    {"kind": "text", "name": "c.md", "text": "# Notes"},
]
MESSAGES: Json = {
    "u1": {"id": "u1", "parent": "root", "role": "user", "content": "Hello", "media": MEDIA},
    "a1": {
        "id": "a1",
        "parent": "u1",
        "role": "assistant",
        "content": "Hi",
        "reasoning": "Be kind.\n\nAnd brief.",
        "finish": "stop",
    },
    "a2": {"id": "a2", "parent": "u1", "role": "assistant", "content": "Hello there", "finish": "stop"},
    "u2": {"id": "u2", "parent": "a1", "role": "user", "content": "Bye"},
    "a3": {"id": "a3", "parent": "u2", "role": "assistant", "content": "See you", "finish": "stop"},
}
TOOLS: Json = {
    "a4": {
        "id": "a4",
        "parent": "a3",
        "role": "assistant",
        "content": "",
        "calls": [{"id": "c1", "name": "f", "args": "{}"}],
        "finish": "stop",
    },
    "t1": {"id": "t1", "parent": "a4", "role": "tool", "content": "42", "callId": "c1"},
}
CHOSEN = {"root": "u1", "u1": "a1", "a1": "u2", "u2": "a3"}
CONVERSATION: Json = {
    "id": "k1",
    "title": "Greetings",
    "tags": ["x", "y"],
    "created": 1_700_000_000_000,
    "changed": 1_700_000_050_000,
    "system": "Be brief.",
    "settings": {"temperature": 0.5, "seed": 7},
    "tools": "",
    "thinking": "auto",
    "messages": MESSAGES,
    "chosen": CHOSEN,
}
ROUND_TRIP = """async ([label, conversation]) => {
  const {EXPORTS, readFile} = await import('/page/chat/exchange.js')
  const {write} = EXPORTS.find((each) => each.label === label)
  const text = write([conversation, {...conversation, id: 'k2', title: 'Twice'}])
  return readFile(new File([text], 'x'))
}"""


def test_conversations_survive_a_round_trip_through_each_format(chat: Page) -> None:
    """Versions, the chosen one, the system prompt, thoughts, files. Settings and tags as far as the format has them."""
    with_tools = {**CONVERSATION, "messages": MESSAGES | TOOLS, "chosen": CHOSEN | {"a3": "a4", "a4": "t1"}}
    tree = ["id", "title", "system", "messages", "chosen", "changed"]
    for label, conversation, same in (
        ("JSON", with_tools, [*tree, "tags", "settings", "created"]),
        ("Open WebUI", CONVERSATION, [*tree, "tags", "settings", "created"]),
        ("llama.cpp", with_tools, tree),
    ):
        first, second = chat.evaluate(ROUND_TRIP, [label, conversation])
        assert {name: first[name] for name in same} == {name: conversation[name] for name in same}, label
        assert (second["id"], second["title"], second["messages"]) == ("k2", "Twice", conversation["messages"]), label
    first, _ = chat.evaluate(ROUND_TRIP, ["Open WebUI", with_tools])  # which has no messages of tools
    assert first["messages"]["a4"]["content"] == '```json\n{"name":"f","arguments":"{}"}\n```'
    assert (first["messages"]["t1"]["role"], first["messages"]["t1"]["content"]) == ("user", "42")


def of_llama_cpp(conv: str, messages: list[Json]) -> list[Json]:
    """Lines as llama.cpp's page writes them (conversation-transfer.service.ts)."""
    root: Json = {
        "id": f"{conv}-r",
        "convId": conv,
        "type": "root",
        "role": "system",
        "content": "",
        "parent": None,
        "children": [],
        "timestamp": 1,
        "toolCalls": "",
    }
    session = {
        "harness": "llama.app",
        "type": "session",
        "id": conv,
        "name": f"Name of {conv}",
        "lastModified": 1_700_000_000_000,
        "currNode": messages[-1]["id"],
    }
    return [session, *({"type": "message", "message": message} for message in (root, *messages))]


def llama_cpp_messages(conv: str) -> list[Json]:
    def message(id: str, parent: str, role: str, content: str, **more: Any) -> Json:
        return {
            "id": f"{conv}-{id}",
            "convId": conv,
            "type": more.pop("type", "text"),
            "role": role,
            "content": content,
            "parent": f"{conv}-{parent}",
            "children": [],
            "timestamp": 2,
            **more,
        }

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    return [
        message("s", "r", "system", "You are kind.", type="system"),
        message(
            "1",
            "s",
            "user",
            f"Question of {conv}",
            extra=[
                {"type": "TEXT", "name": "n.txt", "content": "notes"},
                {"type": "IMAGE", "name": "i.png", "base64Url": PICTURE},
                {
                    "type": "PDF",
                    "name": "p.pdf",
                    "content": "its text",
                    "base64Data": "AA==",
                    "processedAsImages": False,
                },
            ],
        ),
        message(
            "2", "1", "assistant", "", reasoningContent="Hm.", toolCalls=[call], model="m", timings={"predicted_n": 3}
        ),
        message("3", "2", "tool", "1", toolCallId="c"),
        message("4", "3", "assistant", f"Answer of {conv}"),
    ]


def test_files_of_llama_cpps_page_are_imported(chat: Page) -> None:
    """JSON Lines, a ZIP file of several, and the older JSON."""
    files = {
        name: "\n".join(map(json.dumps, of_llama_cpp(name, llama_cpp_messages(name))))
        for name in ("one", "two", "three")
    }
    take_in(chat, "one.jsonl", files["one"].encode())
    expect(messages(chat, "user")).to_contain_text("Question of one")
    expect(messages(chat, "user").get_by_role("listitem")).to_have_count(3)
    expect(messages(chat, "user").get_by_role("img", name="i.png")).to_be_attached()
    expect(messages(chat, "assistant").first).to_contain_text("calls add")
    expect(messages(chat, "assistant").last).to_contain_text("Answer of one")
    expect(chat.get_by_role("heading", name="Name of one")).to_be_visible()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("two.jsonl", files["two"])
        archive.writestr("readme.txt", "no conversation")
        archive.writestr("three.jsonl", files["three"], zipfile.ZIP_STORED)
    take_in(chat, "conversations.zip", packed.getvalue())
    expect(chat.locator(".toasts")).to_contain_text("2 conversations imported.")
    older = [line["message"] for line in of_llama_cpp("four", llama_cpp_messages("four"))[1:]]
    older[3]["toolCalls"] = json.dumps(older[3]["toolCalls"])
    conv = {"id": "four", "name": "Older", "lastModified": 1_600_000_000_000, "currNode": "four-4"}
    take_in(chat, "old.json", json.dumps([{"conv": conv, "messages": older}]).encode())
    expect(chat.locator(".conversation")).to_have_count(4)
    expect(messages(chat, "assistant").first).to_contain_text("calls add")
    chat.get_by_role("button", name="Conversation settings").click()
    expect(chat.get_by_label("System prompt")).to_have_value("You are kind.")
    chat.keyboard.press("Escape")
    take_in(chat, "bad.zip", packed.getvalue()[:-30])
    expect(chat.locator(".toast.error").last).to_contain_text("bad.zip could not be imported: The ZIP file is damaged.")
    take_in(chat, "one.jsonl", files["one"].encode())  # again: it is the same
    expect(chat.locator(".toasts")).to_contain_text("1 conversation imported.")
    expect(chat.locator(".conversation")).to_have_count(4)


def test_a_file_of_open_webui_is_imported_with_its_versions_and_exported_again(chat: Page) -> None:
    def message(id: str, parent: str | None, children: list[str], role: str, content: str, **more: Any) -> Json:
        return {
            "id": id,
            "parentId": parent,
            "childrenIds": children,
            "role": role,
            "content": content,
            "timestamp": 1_700_000_000,
            **more,
        }

    thoughts = (
        '<details type="reasoning" done="true">\n<summary>Thought for 3 seconds</summary>\n> Hm.\n> Yes.\n</details>\n'
    )
    history = {
        "currentId": "a1",
        "messages": {
            "u1": message(
                "u1",
                None,
                ["a1", "a2"],
                "user",
                "Is it so?",
                files=[
                    {"type": "image", "url": PICTURE},
                    {"type": "file", "name": "n.md", "file": {"data": {"content": "notes"}}},
                    {"type": "collection", "name": "Library", "id": "7"},
                ],
            ),
            "a1": message(
                "a1", "u1", [], "assistant", f"{thoughts}It is.", model="m", done=True, usage={"total_tokens": 3}
            ),
            "a2": message("a2", "u1", [], "assistant", "Perhaps."),
        },
    }
    chats = [
        {
            "id": "w1",
            "user_id": "u",
            "title": "So",
            "updated_at": 1_700_000_000,
            "created_at": 1_690_000_000,
            "archived": False,
            "meta": {"tags": ["truth"]},
            "pinned": False,
            "folder_id": None,
            "share_id": None,
            "chat": {
                "title": "So",
                "models": ["m"],
                "params": {"system": "Be honest.", "temperature": 0.25},
                "history": history,
                "messages": [],
                "tags": [],
                "timestamp": 1_690_000_000_000,
            },
        }
    ]
    take_in(chat, "chats.json", json.dumps(chats).encode())
    expect(chat.locator(".conversation")).to_contain_text("So #truth")
    expect(messages(chat, "assistant")).to_contain_text("It is.")
    expect(messages(chat, "assistant").locator(".thoughts")).to_contain_text("Hm.")
    expect(messages(chat, "assistant")).to_contain_text("1/2")
    expect(messages(chat, "user").get_by_role("listitem")).to_have_count(3)
    expect(messages(chat, "user")).to_contain_text("collection of Open WebUI, not in its export")
    chat.get_by_role("button", name="Conversation settings").click()
    expect(chat.get_by_label("System prompt")).to_have_value("Be honest.")
    expect(chat.get_by_label("Temperature")).to_have_value("0.25")
    chat.keyboard.press("Escape")
    dark(chat)
    phone(chat)
    assert axe_violations(chat, *IMPACTS) == []
    chat.get_by_role("button", name="This conversation").click()
    chat.keyboard.press("Escape")
    [again] = json.loads(exported(chat, "This conversation", "Export as Open WebUI").read_text())
    assert again["chat"]["history"]["currentId"] == "a1"
    assert again["chat"]["history"]["messages"]["u1"]["childrenIds"] == ["a1", "a2"]
    assert again["meta"]["tags"] == ["truth"]
    assert again["chat"]["params"] == {"system": "Be honest.", "temperature": 0.25}
    lines = exported(chat, "This conversation", "Export as llama.cpp").read_text().splitlines()
    session, root, system, *rest = map(json.loads, lines)
    assert (session["type"], session["name"], session["currNode"]) == ("session", "So", "a1")
    assert (root["message"]["type"], root["message"]["children"]) == ("root", [system["message"]["id"]])
    assert (system["message"]["content"], system["message"]["children"]) == ("Be honest.", ["u1"])
    assert [each["message"]["parent"] for each in rest] == [system["message"]["id"], "u1", "u1"]
