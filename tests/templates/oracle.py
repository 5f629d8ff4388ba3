"""Random messages with calls, read here and by llama.cpp itself (`chat-oracle`, a small program over its parsers)."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cppbatch.chat.chat_format import ChatFormat, ChatTurn
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from tests.templates.round_trip import QUESTION, TEXT, THOUGHT, TOOLS, AsTheyAre, Json, Said, completion, read

TOOL = "get_weather"
_WORDS = [
    "Paris", "a b", "", '"quoted"', "it's", "line\nline", "<b>bold</b>", "日本 🙂", "\\n", "{}", "[1, 2]", "null", "5",
    "}", "</tag>", "a, b: c", "<|x|>", "tab\there", "&amp;", "x=1",
]  # fmt: skip


def random_said(chance: random.Random) -> Said:
    """Up to three calls, perhaps after text or a thought."""

    def word() -> str:
        return "".join(chance.choices(_WORDS, k=chance.choice([1, 1, 2, 3])))

    def value(depth: int = 0) -> Any:
        kinds: list[Any] = [word, lambda: chance.randint(-9, 999), lambda: chance.random() < 0.5, lambda: None]
        if depth < 3:
            kinds += [lambda: [value(depth + 1) for _ in range(chance.randint(0, 3))]]
            kinds += [lambda: {f"k{i}": value(depth + 1) for i in range(chance.randint(0, 3))}]
        return chance.choice(kinds)()

    def call() -> tuple[str, Json]:
        name = chance.choice(["get_weather", "set_options", "ping"])
        if name == "ping":
            return name, {}
        if name == "get_weather":
            days = {"days": chance.randint(0, 99)} if chance.random() < 0.5 else {}
            return name, {"city": word() or "x"} | days
        given: Json = {
            "options": {f"k{i}": value() for i in range(chance.randint(0, 3))}, "names": [word() for _ in range(2)],
            "on": chance.random() < 0.5, "level": chance.randint(0, 9), "note": word() or "x",
        }  # fmt: skip
        return name, {key: each for key, each in given.items() if chance.random() < 0.6}

    calls = tuple(call() for _ in range(chance.choice([1, 1, 2, 3])))
    kind = chance.random()
    return Said(calls, text=TEXT if kind < 0.25 else "", thought=THOUGHT if kind > 0.75 else "")


def ask(oracle: Path, lines: Sequence[Json]) -> list[Json]:
    """llama.cpp's result for each."""
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([oracle], input=given, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def calls_of(message: Json) -> list[tuple[str, Any]]:
    found = []
    for call in message.get("tool_calls") or []:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            arguments = call["function"]["arguments"]
        found.append((call["function"]["name"], arguments))
    return found


def compare(oracle: Path, files: Sequence[Path], n: int) -> Iterator[tuple[str, Counter[str], list[str]]]:
    """For each template: how many of `n` messages each side read, and those that only llama.cpp reads."""

    def one(file: Path) -> tuple[str, Counter[str], list[str]]:
        chance = random.Random(file.stem)
        form = ChatFormat(AsTheyAre(file.read_text("utf-8"), bos="<s>", eos="</s>"))
        said = [random_said(chance) for _ in range(n)]
        rendered = [(each, found) for each in said if (found := completion(form, each))]
        lines = [{"template": str(file), "tools": TOOLS, "text": text} for _, (_, text) in rendered]
        counts: Counter[str] = Counter(rendered=len(rendered))
        faults = []
        for (each, (asked, text)), answer in zip(rendered, ask(oracle, lines) if lines else [], strict=True):
            theirs = calls_of(answer.get("message", {})) == list(each.calls)
            got = read(asked, text)
            ours = [(call.name, json.loads(call.arguments)) for call in got.calls] == list(each.calls)
            counts["both" if ours and theirs else "ours" if ours else "theirs" if theirs else "none"] += 1
            if theirs and not ours:
                faults.append(text)
        return file.stem, counts, faults

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(one, files)


def compare_prompts(oracle: Path, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """For each template: its name, and where our prompts differ from llama.cpp's; "" if nowhere.

    Conversations that llama.cpp refuses, or renders without their tools or calls, are not compared.
    """
    call = {"id": "callid000", "type": "function", "function": {"name": TOOL, "arguments": '{"city": "Paris"}'}}
    talks: list[tuple[list[Json], list[Json]]] = [
        ([QUESTION], []),
        ([{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": TEXT}, QUESTION], []),
        ([QUESTION], TOOLS[:2]),
        (
            [
                {"role": "system", "content": "Be brief."}, QUESTION,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "callid000", "name": TOOL, "content": "sunny"},
            ],
            TOOLS[:2],
        ),
    ]  # fmt: skip
    for file in files:
        form = ChatFormat(ChatTemplate(file.read_text("utf-8"), bos="<s>", eos="</s>"))
        lines = [{"template": str(file), "messages": m, "text": ""} | ({"tools": t} if t else {}) for m, t in talks]
        faults = []
        for i, ((messages, tools), answer) in enumerate(zip(talks, ask(oracle, lines), strict=True)):
            try:
                prompt = form.render(ChatTurn(messages, tools=tools, choice=ToolChoice())).prompt
            except InvalidRequest as error:
                prompt = f"refused: {error}"
            theirs = answer.get("prompt", "")
            needles = ([f"what {TOOL} says"] if tools else []) + (["Paris"] if "tool_calls" in str(messages) else [])
            if not theirs or not all(needle in theirs for needle in needles):
                continue
            if prompt.removeprefix("<s>") != theirs.removeprefix("<s>"):
                same = next((k for k, (a, b) in enumerate(zip(prompt, theirs, strict=False)) if a != b), 0)
                faults.append(f"talk {i} at {same}: {prompt[same : same + 60]!r} / {theirs[same : same + 60]!r}")
        yield file.stem, "; ".join(faults)
