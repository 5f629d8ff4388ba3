"""The conversation of `cppbatch chat`: messages, commands, files, errors. No terminal, no model, no server."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cppbatch.chat.media_parts import media_of
from cppbatch.chat.messages import ChatMessage, conversation_of
from cppbatch.cli.chat.backends import FULL, AnswerEnd, AnswerPart
from cppbatch.cli.chat.session import COMMANDS, ChatSession, read_messages
from cppbatch.engine.media.sources import local_media
from cppbatch.engine.request import Media
from cppbatch.errors import ConfigError, CppBatchError
from cppbatch.typed_json import convert
from tests.support.media_samples import RED, TONE

Json = dict[str, Any]
Script = Sequence[AnswerPart | BaseException]


def words(*texts: str, reason: str = "stop") -> list[AnswerPart | BaseException]:
    parts: list[AnswerPart | BaseException] = [AnswerPart(text=text, n_tokens=1) for text in texts]
    return [*parts, AnswerPart(end=AnswerEnd(finish_reason=reason, n_tokens=len(texts)))]


class FakeBackend:
    """Says what the script says."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.asked: list[list[Json]] = []
        self.params: list[Json] = []
        self.model = "one"
        self.has_template = True
        self.n_closed = 0

    def models(self) -> list[str]:
        return ["one", "two"]

    def use(self, name: str) -> None:
        if name not in self.models():
            raise CppBatchError(f"no {name}")
        self.model = name

    def answer(self, messages: Sequence[Json], params: Json) -> Generator[AnswerPart, None, None]:
        self.asked.append(list(messages))
        self.params.append(params)
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self.n_closed += 1

    def close(self) -> None:
        pass


class Shown:
    """What a user sees."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.reasoning: list[str] = []
        self.summaries: list[str] = []
        self.said: list[str] = []
        self.failed: list[str] = []

    def begin(self) -> None:
        self.answers.append("")
        self.reasoning.append("")

    def add(self, text: str, reasoning: str) -> None:
        self.answers[-1] += text
        self.reasoning[-1] += reasoning

    def end(self, summary: str) -> None:
        self.summaries.append(summary)

    def say(self, line: str) -> None:
        self.said.append(line)

    def fail(self, line: str) -> None:
        self.failed.append(line)


Start = Callable[..., tuple[ChatSession, FakeBackend, Shown]]


@pytest.fixture
def start() -> Start:
    def start(*scripts: Script, **options: Any) -> tuple[ChatSession, FakeBackend, Shown]:
        backend, shown = FakeBackend(*scripts), Shown()
        seconds = iter(range(1000))
        return ChatSession(backend, shown, clock=lambda: next(seconds), **options), backend, shown

    return start


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}


def test_each_message_is_sent_with_the_conversation_so_far(start: Start) -> None:
    session, backend, shown = start(words("Hi", "!"), words("Fine"), system="Be brief.")
    assert session.handle("Hello")
    assert session.handle("How are you?")
    system = {"role": "system", "content": "Be brief."}
    assert backend.asked[1] == [system, user("Hello"), assistant("Hi!"), user("How are you?")]
    assert session.messages == [*backend.asked[1], assistant("Fine")]
    assert shown.answers == ["Hi!", "Fine"]


def test_the_summary_has_tokens_speed_and_time_to_first_token(start: Start) -> None:
    session, _, shown = start(words("a", "b", "c"))
    session.handle("x")
    assert shown.summaries == ["3 tokens · 1.0 tokens/s · first token after 1.00 s"]


def test_reasoning_is_shown_and_kept_but_not_sent_again(start: Start) -> None:
    session, backend, shown = start([AnswerPart(reasoning="Hm.", n_tokens=2), *words("Yes")], words("No"))
    session.handle("x")
    session.handle("y")
    assert shown.reasoning[0] == "Hm."
    assert session.messages[1] == assistant("Yes") | {"reasoning_content": "Hm."}
    assert backend.asked[1][1] == assistant("Yes")


def test_ctrl_c_ends_the_answer_and_keeps_the_partial_text(start: Start) -> None:
    session, backend, shown = start([AnswerPart(text="One, two", n_tokens=3), KeyboardInterrupt()], words("three"))
    assert session.handle("Count")
    assert session.messages == [user("Count"), assistant("One, two")]
    assert shown.summaries[0].endswith("stopped")
    assert backend.n_closed == 1
    session.handle("Go on")
    assert session.messages[-1] == assistant("three")


def test_ctrl_c_before_the_first_token_takes_the_message_back(start: Start) -> None:
    session, backend, _ = start([KeyboardInterrupt()], words("Hi"))
    session.handle("Hello")
    assert session.messages == []
    session.handle("/retry")
    assert backend.asked[1] == [user("Hello")]


def test_an_error_is_a_sentence_and_the_conversation_continues(start: Start) -> None:
    session, backend, shown = start(words("Hi"), [CppBatchError("no server answers")], words("Fine"))
    session.handle("Hello")
    assert session.handle("How are you?")
    assert shown.failed == ["no server answers"]
    assert session.n_failed == 1
    assert session.messages == [user("Hello"), assistant("Hi")]
    session.handle("/retry")
    assert backend.asked[2] == [user("Hello"), assistant("Hi"), user("How are you?")]
    assert session.messages[-1] == assistant("Fine")


@pytest.mark.parametrize(
    ("params", "said"), [({}, f"cut off, because {FULL}"), ({"max_tokens": 2}, "cut off after 2 tokens (-n)")]
)
def test_a_cut_off_answer_says_why(start: Start, params: Json, said: str) -> None:
    session, _, shown = start(words("a", "b", reason="length"), params=params)
    session.handle("x")
    assert shown.said == [said]


def test_an_answer_without_an_end_is_cut_off_and_kept(start: Start) -> None:
    session, backend, shown = start(words("a", "b", "c", "d"), longest=3)
    session.handle("x")
    assert shown.said == ["cut off after 3 tokens (-n)"]
    assert session.messages[-1] == assistant("abc")
    assert backend.n_closed == 1


def test_retry_answers_the_last_message_again_without_the_seed(start: Start) -> None:
    session, backend, _ = start(words("A"), words("B"), params={"seed": 7, "top_k": 3})
    session.handle("x")
    session.handle("/retry")
    assert backend.asked == [[user("x")]] * 2
    assert backend.params == [{"seed": 7, "top_k": 3}, {"top_k": 3}]
    assert session.messages == [user("x"), assistant("B")]


@pytest.mark.parametrize("ending", [CppBatchError("broke"), KeyboardInterrupt()])
def test_a_retry_without_an_answer_leaves_the_conversation_as_it_was(start: Start, ending: BaseException) -> None:
    session, _, _ = start(words("A"), [ending], words("B"))
    session.handle("x")
    session.handle("/retry")
    assert session.messages == [user("x"), assistant("A")]
    session.handle("/retry")
    assert session.messages == [user("x"), assistant("B")]


def test_retry_needs_a_message(start: Start) -> None:
    session, _, shown = start()
    session.handle("/retry")
    assert shown.failed == ["no answer to regenerate; send a message first"]


def test_the_system_message_is_shown_set_and_removed(start: Start) -> None:
    session, backend, shown = start(words("A"), words("B"))
    for line in ("/system", "/system Be brief.", "x", "/system", "/system off", "y"):
        session.handle(line)
    assert backend.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert backend.asked[1][0] == user("x")
    assert shown.said == [
        "no system message is set", "system message: Be brief.", "system message: Be brief.",
        "no system message is set",
    ]  # fmt: skip


def test_clear_starts_a_new_conversation_with_the_same_system_message(start: Start) -> None:
    session, _, _ = start(words("A"), system="Be brief.")
    session.handle("x")
    session.handle("/clear")
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_model_shows_and_switches(start: Start) -> None:
    session, backend, shown = start()
    session.handle("/model")
    assert shown.said[0].splitlines()[1:] == ["* one", "  two"]
    session.handle("/model two")
    assert backend.model == "two"
    session.handle("/model three")
    assert shown.failed == ["no three"]
    backend.has_template = False
    session.handle("/model one")
    assert shown.said[-1].startswith("this file has no chat template")


def test_help_names_each_command_and_unknown_ones_are_refused(start: Start) -> None:
    session, backend, shown = start(words("ok"))
    session.handle("/help")
    assert [line.split()[0] for line in shown.said[0].splitlines()] == list(COMMANDS)
    session.handle("/halp")
    assert shown.failed == [
        "unknown command /halp; see /help for a list, or start a message with // for a literal slash"
    ]
    session.handle("//etc is a folder")
    assert backend.asked == [[user("/etc is a folder")]]
    assert not session.handle("/quit")
    assert not session.handle("/exit")


def test_a_blank_line_sends_nothing(start: Start) -> None:
    session, backend, _ = start()
    assert session.handle("  ")
    assert backend.asked == []


def test_a_conversation_is_saved_and_resumed(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session, _, shown = start(words("Grüße"), system="Be brief.", save_to=file)
    session.handle("Hello")
    assert json.loads(file.read_text(encoding="utf-8")) == session.messages
    session.handle(f"/save {tmp_path / 'talk.md'}")
    assert (tmp_path / "talk.md").read_text(encoding="utf-8") == (
        "## System\n\nBe brief.\n\n## User\n\nHello\n\n## Assistant\n\nGrüße\n"
    )
    assert shown.said == [f"saved 2 messages to {tmp_path / 'talk.md'}"]

    again, backend, _ = start(words("Bye"))
    again.take_up(read_messages(file))
    again.handle("So long")
    assert backend.asked == [[*session.messages, user("So long")]]


def test_saving_replaces_neither_devices_nor_links_nor_models(start: Start, tmp_path: Path) -> None:
    session, _, shown = start(words("Hi"))
    session.handle("Hello")
    model, link, device = tmp_path / "model.gguf", tmp_path / "link.json", tmp_path / "null.json"
    model.write_bytes(b"GGUF")
    link.symlink_to(tmp_path / "talk.json")
    device.symlink_to(os.devnull)
    for path in (model, link, device):
        session.handle(f"/save {path}")
    assert shown.failed == [f"{model} is a model file, which is never overwritten: give another name"]
    assert json.loads((tmp_path / "talk.json").read_text()) == session.messages
    assert link.is_symlink()
    assert device.is_symlink()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_system_message_that_is_given_replaces_that_of_the_file(start: Start) -> None:
    session, _, _ = start(system="New.")
    session.take_up([{"role": "system", "content": "Old."}, user("x"), assistant("y")])
    assert session.messages == [{"role": "system", "content": "New."}, user("x"), assistant("y")]


def test_a_file_that_cannot_be_written_is_named(start: Start, tmp_path: Path) -> None:
    session, _, shown = start()
    session.handle(f"/save {tmp_path / 'none' / 'talk.md'}")
    session.handle("/save")
    assert shown.failed == [
        f"{tmp_path / 'none' / 'talk.md'} cannot be written: No such file or directory",
        "/save requires a file: /save talk.md, or /save talk.json",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no", "is not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "is not valid JSON"),
        ("{}", "is not a saved conversation"),
        ('[{"role": "me", "content": "x"}]', "is not a saved conversation"),
    ],
)
def test_a_file_that_is_not_a_conversation_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"talk.json {said}"):
        read_messages(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_messages(tmp_path / "none.json")


def test_images_and_audio_precede_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "tone.wav").write_bytes(TONE)
    backend, shown = FakeBackend(words("A red one."), words("Yes.")), Shown()
    session = ChatSession(backend, shown, save_to=tmp_path / "talk.md")
    attached = (f"/image {tmp_path}/red.png", f"/audio {tmp_path}/tone.wav")
    for line in (*attached, "What?", "Sure?", "/image nothing.png", "/image"):
        assert session.handle(line)
    first, second = backend.asked
    content = first[0]["content"]
    assert [part["type"] for part in content] == ["image_url", "input_audio", "text"]
    assert list(media_of(local_media(conversation_of(convert(first, list[ChatMessage], "messages"))))) == [
        Media("image", RED), Media("audio", TONE),
    ]  # fmt: skip
    assert second == [*first, {"role": "assistant", "content": "A red one."}, {"role": "user", "content": "Sure?"}]
    assert shown.failed == ["nothing.png cannot be read: No such file or directory", "/image requires a file"]
    saved = (tmp_path / "talk.md").read_text()
    assert "*(image)*\n\n*(audio)*\n\nWhat?" in saved
    assert "base64" not in saved
