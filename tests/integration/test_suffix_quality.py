"""Suffix matching on texts with repetition, in the default model's tokens: what is accepted, and how long it takes.

`pytest -s` prints for each kind of text: tokens a step, the accepted tokens of a draft, those of the best copy of any
earlier tokens, the acceptance that was estimated, and microseconds a sequence and step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

import cppbatch.bench.quality
from cppbatch import GenerationRequest
from cppbatch.engine import cells
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.suffix_proposer import SuffixProposer
from cppbatch.llama import Model
from cppbatch.llama.vocab import Vocab

MOST = 8
ENGLISH = (Path(cppbatch.bench.quality.__file__).parent / "english.txt").read_text()
CODE = inspect.getsource(cells)
PEOPLE = [
    ("Anna Berg", 23, "Oslo", "baker"), ("Tom Ford", 41, "Leeds", "nurse"), ("Li Wei", 35, "Wuhan", "driver"),
    ("Sara Klein", 29, "Bonn", "teacher"), ("Omar Haddad", 52, "Cairo", "cook"), ("Eva Novak", 38, "Brno", "lawyer"),
]  # fmt: skip
PRODUCTS = ["a wooden chair", "a steel lamp", "a glass table", "a cotton shirt", "a leather bag", "a wool scarf"]


def record(name: str, age: int, city: str, job: str) -> str:
    return f'{{"name": "{name}", "age": {age}, "city": "{city}", "job": "{job}"}}'


def item(product: str, price: int) -> str:
    return (
        f"This is {product} that you will use every day. It costs {price} dollars and is made with care from the best "
        f"material that we could find. We deliver {product} within three days, and you may send it back within a month."
    )


TEXTS: dict[str, list[tuple[str, str, str | None]]] = {
    # prompt, completion, prediction
    "quoting": [
        (f"Quote from this text.\n\n{part}", "The text says: " + ". Further on: ".join(part.split(". ")[::2]), None)
        for part in (ENGLISH[:2000], ENGLISH[2000:4000])
    ],
    "JSON extraction": [
        (
            "Extract the people as JSON.\n\n"
            + "\n".join(f"{n}, {a} years old, lives in {c} and works as a {j}." for n, a, c, j in people),
            "[\n" + ",\n".join("  " + record(*person) for person in people) + "\n]",
            None,
        )
        for people in (PEOPLE, PEOPLE[::-1])
    ],
    "code edit": [
        (f"Rename {old} to {new}.\n\n```python\n{CODE}```", f"```python\n{CODE.replace(old, new)}```", None)
        for old, new in (("first", "begin"), ("cells", "slots"))
    ],
    "code edit, predicted": [
        (f"Rename {old} to {new} in the file.", CODE.replace(old, new), CODE)
        for old, new in (("first", "begin"), ("cells", "slots"))
    ],
    "similar items": [
        (f"Describe {product} in three sentences.", item(product, 20 + 7 * i), None)
        for i, product in enumerate(PRODUCTS)
    ],
}  # fmt: skip
LEAST_OF_BEST = {
    "quoting": 0.5, "JSON extraction": 0.4, "code edit": 0.75, "code edit, predicted": 0.75, "similar items": 0.6,
}  # fmt: skip
"""The least share of the tokens that the best copies would give."""


@pytest.fixture(scope="module")
def vocab(default_model: Path) -> Iterator[Vocab]:
    with Model(default_model, no_alloc=True) as model:
        yield model.vocab


def sequences(vocab: Vocab, kind: str) -> list[Seq]:
    made = []
    for i, texts in enumerate(TEXTS[kind]):
        prompt, completion, prediction = (
            None if text is None else vocab.tokenize(text, add_special=False) for text in texts
        )
        assert prompt is not None
        assert completion is not None
        request = GenerationRequest(id=str(i), prompt="a")
        seq = Seq(request, prompt, max_new=len(completion), seed=0, now=0.0, prediction=prediction)
        seq.tokens[seq.n_prompt : seq.n_prompt + seq.max_new] = completion
        made.append(seq)
    return made


def best_copies(seq: Seq, others: list[int]) -> float:
    """Tokens a step if each draft were the best copy of `MOST` tokens of what is known: no proposer does better."""
    known = [
        *others,
        *([] if seq.prediction is None else seq.prediction.tolist()),
        *seq.tokens[: seq.n_prompt].tolist(),
    ]
    rest, steps = seq.tokens[seq.n_prompt : seq.n_prompt + seq.max_new].tolist(), 0
    places: dict[int, list[int]] = {}
    for p, token in enumerate(known):
        places.setdefault(token, []).append(p)
    done = 0
    while done < len(rest):
        coming = rest[done : done + MOST]
        length = 0
        for p in places.get(rest[done], ()):
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(coming, known[p : p + MOST], strict=False))
            length = max(length, sum(1 for _ in same))
        for token in rest[done : done + length + 1]:
            places.setdefault(token, []).append(len(known))
            known.append(token)
        done += length + 1
        steps += 1
    return len(rest) / steps


@pytest.mark.parametrize("kind", TEXTS)
def test_most_of_what_could_be_copied_is_accepted(vocab: Vocab, kind: str) -> None:
    proposer, seconds, steps, drafted, accepted, expected, n_drafts = SuffixProposer(), [], 0, 0, 0, 0.0, 0
    best, n_tokens = 0.0, 0
    others: list[int] = []
    for seq in sequences(vocab, kind):  # one after the other: each one may copy from those before
        best += seq.max_new / best_copies(seq, others)
        while seq.n_left:
            started = perf_counter()
            (draft,) = proposer.propose([seq], [MOST])
            seconds.append(perf_counter() - started)
            coming, n = seq.tokens[seq.n_tokens : seq.n_tokens + seq.n_left], 0
            if draft is not None:
                length = min(len(draft.tokens), len(coming))
                n = int(np.cumprod(draft.tokens[:length] == coming[:length]).sum())
                expected += float(draft.probabilities[:length].cumprod().sum())
                n_drafts, drafted, accepted = n_drafts + 1, drafted + length, accepted + n
            seq.n_tokens += min(n + 1, len(coming))
            steps += 1
        proposer.finished(seq)
        n_tokens += seq.max_new
        others += seq.tokens[: seq.n_tokens].tolist()
    print(
        f"\n{kind}: {n_tokens / steps:.2f} tokens a step (best copies {n_tokens / best:.2f}), "
        f"{accepted / n_drafts:.2f} of {drafted / n_drafts:.2f} tokens of a draft accepted "
        f"({expected / n_drafts:.2f} estimated), "
        f"{np.median(seconds) * 1e6:.1f} us"
    )
    assert n_tokens / steps > LEAST_OF_BEST[kind] * n_tokens / best
    assert 0.4 * accepted < expected < 1.25 * accepted, "estimates begin careful, and never promise much more"
