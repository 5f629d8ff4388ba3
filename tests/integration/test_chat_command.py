"""`cppbatch chat` without a terminal: each line of the input is a message. In this process, and with a server."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.cli.chat.backends import FULL, AnswerPart, ServerBackend
from cppbatch.errors import CppBatchError
from tests.support.chat_families import TEMPLATES
from tests.support.fake_openai import FakeOpenAI, on_a_thread
from tests.support.fixtures import chat_server
from tests.support.scripted_chat import ChatServer

Run = Callable[..., tuple[int, str, str]]
SHORT = ["-n", "8", "--temp", "0", "--grammar", "root ::= [a-z]*"]
SMALL = ["-c", "1024", "-t", "1"]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


server = chat_server(n_parallel=2)


def expected(model: Path, *messages: str) -> str:
    """The answers of the engine to a conversation."""
    params = SamplingParams(max_tokens=8, temperature=0, grammar="root ::= [a-z]*")
    conversation: list[dict[str, object]] = []
    lines = ""
    with BatchInferenceEngine(model, n_ctx=1024, n_parallel=2, n_threads=1) as engine:
        for message in messages:
            conversation.append({"role": "user", "content": message})
            answer = engine.chat(conversation, params)
            conversation.append(answer.message)
            lines += answer.text + "\n"
    return lines


def test_each_line_is_answered_in_one_conversation(run: Run, pipe: Callable[[str], None], tiny_llama: Path) -> None:
    pipe("Hello\n\nWho are you?\n")
    code, out, _ = run("chat", "-m", tiny_llama, *SMALL, *SHORT)
    assert code == 0
    assert out == expected(tiny_llama, "Hello", "Who are you?")


def test_a_model_without_a_chat_template_is_reported_once(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path
) -> None:
    pipe("Hello\nWho are you?\n")
    _, _, err = run("chat", "-m", tiny_llama, *SMALL, *SHORT)
    assert err.count("this file has no chat template: it is a base model") == 1
    pipe("Hello\n")
    _, _, err = run("chat", "-m", tiny_llama, *SMALL, *SHORT, "--chat-template", "chatml")
    assert "no chat template" not in err


def test_a_server_answers_the_same(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path, server: ChatServer, tmp_path: Path
) -> None:
    pipe(f"Hello\n/save {tmp_path / 'talk.json'}\nWho are you?\n/model\n")
    code, out, err = run("chat", "--url", f"{server.url.removeprefix('http://')}/v1/", *SHORT)
    assert code == 0
    assert out == expected(tiny_llama, "Hello", "Who are you?")
    assert "* tiny-llama" in err
    assert [each["role"] for each in json.loads((tmp_path / "talk.json").read_text())] == ["user", "assistant"]


def test_a_saved_conversation_continues(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path, server: ChatServer, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    pipe("Hello\n")
    _, first, _ = run("chat", "--url", server.url, *SHORT, "--save", file)
    pipe("Who are you?\n")
    _, second, _ = run("chat", "-m", tiny_llama, *SMALL, *SHORT, "--continue", file)
    assert first + second == expected(tiny_llama, "Hello", "Who are you?")


@pytest.mark.parametrize("where", ["here", "server"])
def test_a_full_context_is_reported_and_the_conversation_continues(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path, server: ChatServer, where: str
) -> None:
    pipe(f"{'long ' * 3000}\nHello\n")
    given = ["-m", tiny_llama, *SMALL] if where == "here" else ["--url", server.url]
    code, out, err = run("chat", *given, *SHORT)
    assert FULL in err
    assert "/clear" in err
    assert out == expected(tiny_llama, "Hello")
    assert code == 2
    assert err.endswith("error: 1 of the messages failed\n")


def test_another_model_of_the_folder_answers_after_model(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path, tiny_swa: Path
) -> None:
    pipe(f"/model {tiny_swa}\nHello\n/model /no/such.gguf\nHello\n/clear\nHello\n")
    code, out, err = run("chat", "-m", tiny_llama, *SMALL, *SHORT)
    first, _, third = out.splitlines()
    assert first + "\n" == third + "\n" == expected(tiny_swa, "Hello")
    assert "now using tiny-swa" in err
    assert "/no/such.gguf" in err
    assert code == 2


def test_stopping_an_answer_cancels_it_in_the_server(server: ChatServer) -> None:
    backend = ServerBackend(server.url, model=None, api_key=None)
    try:
        answer = backend.answer([{"role": "user", "content": "x"}], {"grammar": "root ::= [a-z]*", "ignore_eos": True})
        assert isinstance(next(answer), AnswerPart)
        answer.close()
        for _ in range(100):
            if server.stats().running == 0:
                break
            time.sleep(0.05)
        assert server.stats().running == 0
        assert list(backend.answer([{"role": "user", "content": "x"}], {"max_tokens": 2}))[-1].end
    finally:
        backend.close()


def test_keys_and_failures_of_servers_are_reported() -> None:
    fake = FakeOpenAI(has_chat=True, api_key="secret", faults={0: "HTTP 500", 1: "error in the stream"})
    fake.faults |= {2: "stream cut short", 3: "connection closed", 4: "unreadable answer"}
    with on_a_thread(fake.app()) as url:
        with pytest.raises(CppBatchError, match="no key"):
            ServerBackend(url, model=None, api_key=None)
        backend = ServerBackend(url, model=None, api_key="secret")
        try:
            ask = [{"role": "user", "content": "x"}], {"max_tokens": 3}
            for said in ("out of luck", "the engine broke", "before it was complete", "connection", "connection"):
                with pytest.raises(CppBatchError, match=said):
                    list(backend.answer(*ask))
            text = "".join(part.text for part in backend.answer(*ask))
            assert text == "word word word "
            with pytest.raises(CppBatchError, match="model 'x' not found"):
                backend.use("x")
        finally:
            backend.close()
    with pytest.raises(CppBatchError, match="cannot connect to"):
        ServerBackend(url, model=None, api_key=None)
    with pytest.raises(CppBatchError, match="is not a URL"):
        ServerBackend("http://", model=None, api_key=None)


def test_the_model_of_the_environment_is_not_one_of_the_server(
    run: Run, pipe: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODEL", "/models/of-this-machine.gguf")
    pipe("Hello\n")
    fake = FakeOpenAI(has_chat=True)
    with on_a_thread(fake.app()) as url:
        code, out, _ = run("chat", "--url", url, "-n", "2")
    assert (code, out) == (0, "word word \n")
    assert fake.bodies[0]["model"] == "fake"


def test_flags_of_the_engine_are_refused_with_a_server(run: Run) -> None:
    code, _, err = run("chat", "--url", "http://127.0.0.1:1", "-c", "512")
    assert code == 2
    assert "-c applies to a model in this process; it cannot be combined with --url" in err


@pytest.mark.parametrize("budget", [0, 5])
def test_a_thinking_budget_ends_the_reasoning_and_the_answer_follows(
    run: Run, pipe: Callable[[str], None], tiny_llama: Path, tmp_path: Path, budget: int
) -> None:
    template, file = tmp_path / "thinks.jinja", tmp_path / "talk.json"
    template.write_text(TEMPLATES["generic"] + "<think>")
    pipe("Hello\n")
    given = ("-m", tiny_llama, *SMALL, "--chat-template", template, "--save", file)
    code, out, _ = run("chat", *given, "--thinking-budget", str(budget), "-n", "40", "--seed", "3")
    assert code == 0
    _, answer = json.loads(file.read_text())
    with BatchInferenceEngine(tiny_llama, n_ctx=1024, n_parallel=2, n_threads=1) as engine:
        said = engine.tokens(answer.get("reasoning_content", ""), add_special=False)
    assert len(said) <= budget
    assert bool(said) == bool(budget)
    assert answer["content"].strip() == out.strip() != ""


def test_a_thinking_budget_is_sent_to_a_server(run: Run, pipe: Callable[[str], None]) -> None:
    fake = FakeOpenAI(has_chat=True)
    with on_a_thread(fake.app()) as url:
        pipe("Hello\n")
        run("chat", "--url", url, "--thinking-budget", "5", "-n", "4")
    assert fake.bodies[-1]["thinking_budget"] == 5
