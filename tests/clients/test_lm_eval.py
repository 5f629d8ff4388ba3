"""`lm-eval` (the LM Evaluation Harness) on a task made here: its scores are the model's own log-probabilities.

The server has F32 weights and an F32 cache, without flash attention: otherwise sums are rounded to 16 bits.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from tests.clients.conftest import PYTHON
from tests.support.server_process import ServerProcess

EXACT = 1e-3

PAIRS = [
    ("The capital of France is", " Paris."),  # the model ends its text after this
    ("The capital of France is", " Berlin."),
    ("One, two, three,", " four"),
    ("One, two, three,", " banana"),
    ("Question: What colour is the sky?\nAnswer:", " The sky is blue."),
    ("<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant", "\nYes."),
]

DOCUMENTS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "Berlin"], "answer": 0},
    {"question": "One, two, three,", "choices": ["banana", "four", "seven"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["cold", "chair", "green"], "answer": 0},
]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""

CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""

GENERATE = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def expected(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Any]]:
    """The model with F32 weights, and the scores of all pairs by hand."""
    path = tmp_path_factory.mktemp("lm-eval") / "model-F32.gguf"
    choices = [(document["question"], f" {choice}") for document in DOCUMENTS for choice in document["choices"]]
    pairs = [*PAIRS, *choices]
    command: list[str | Path] = [PYTHON, "-m", "tests.clients.model_scores", default_model, path]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, check=True)
    return path, dict(zip(pairs, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.fixture(scope="module")
def url(expected: tuple[Path, dict[tuple[str, str], Any]]) -> Iterator[str]:
    """A server without API keys, which lm-eval's `gguf` cannot send."""
    with ServerProcess(
        "-m", expected[0], "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-c", "4096", python=PYTHON
    ) as process:
        yield process.wait_ready().url


def arguments(url: str, kind: str) -> dict[str, Any]:
    if kind == "gguf":
        return {"base_url": url}
    path = "/v1/chat/completions" if kind == "local-chat-completions" else "/v1/completions"
    return {"base_url": url + path, "model": "SmolLM2-135M-Instruct", "num_concurrent": 4}


def scores(kind: str, pairs: list[tuple[str, str]], **given: Any) -> list[tuple[float, bool]]:
    model = get_model(kind)(**given)
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return [(float(score), bool(greedy)) for score, greedy in model.loglikelihood(requests)]


@pytest.mark.parametrize("kind", ["local-completions", "gguf"])
def test_scores_are_the_models_own_to_a_thousandth(
    kind: str, url: str, expected: tuple[Path, dict[tuple[str, str], Any]]
) -> None:
    """local-completions finds the server's tokenizer by itself (/tokenizer_info)."""
    found = scores(kind, PAIRS, **arguments(url, kind))
    for pair, (score, greedy) in zip(PAIRS, found, strict=True):
        by_hand, is_likeliest = expected[1][pair]
        assert math.isclose(score, by_hand, abs_tol=EXACT), (pair, score, by_hand)
        assert greedy is is_likeliest, pair


def test_texts_and_batches_of_texts_give_the_same_scores(
    url: str, expected: tuple[Path, dict[tuple[str, str], Any]]
) -> None:
    texts = [pair for pair in PAIRS if "<|" not in pair[0]]
    for more in ({"tokenized_requests": False}, {"batch_size": 4}):
        for pair, (score, _) in zip(
            texts, scores("local-completions", texts, **arguments(url, "local-completions"), **more), strict=True
        ):
            assert math.isclose(score, expected[1][pair][0], abs_tol=EXACT), (more, pair)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, rest in (("made_choice", CHOICE), ("made_generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    return folder


def run(kind: str, task: str, url: str, tasks: Path, **more: Any) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        kind,
        model_args=arguments(url, kind),
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        **more,
    )


@pytest.mark.parametrize("kind", ["local-completions", "gguf"])
def test_a_task_of_choices_is_scored_as_by_hand(
    kind: str, url: str, tasks: Path, expected: tuple[Path, dict[tuple[str, str], Any]]
) -> None:
    result = run(kind, "made_choice", url, tasks)
    right = 0
    for sample in result["samples"]["made_choice"]:
        document = sample["doc"]
        by_hand = [expected[1][document["question"], f" {choice}"][0] for choice in document["choices"]]
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(by_hand, abs=EXACT)
        right += by_hand.index(max(by_hand)) == document["answer"]
    assert result["results"]["made_choice"]["acc,none"] == pytest.approx(right / len(DOCUMENTS))


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions", "gguf"])
def test_a_task_of_generated_texts_gets_the_servers_texts(kind: str, url: str, tasks: Path) -> None:
    is_chat = kind == "local-chat-completions"
    result = run(kind, "made_generate", url, tasks, apply_chat_template=is_chat)
    samples = result["samples"]["made_generate"]
    assert len(samples) == len(DOCUMENTS)
    assert all(sample["resps"][0][0].strip() for sample in samples)
    if not is_chat:
        assert "Paris" in next(sample for sample in samples if "France" in sample["doc"]["question"])["resps"][0][0]
