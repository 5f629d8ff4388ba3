"""The text of each token, in events and completions."""

from __future__ import annotations

import pytest

from cppbatch import SamplingParams
from tests.support.fakes import PIECES, fake_engine


@pytest.mark.parametrize("seed", range(20))
def test_the_texts_of_all_tokens_are_the_text(seed: int) -> None:
    engine = fake_engine()
    params = SamplingParams(max_tokens=30, seed=seed, temperature=2.0, ignore_eos=True)
    events = list(engine.stream("ab", params))
    assert all(len(event.token_texts) == len(event.tokens) for event in events)
    texts = [text for event in events for text in event.token_texts]
    assert "".join(texts) == "".join(event.text for event in events)
    (completion,) = engine.generate(["ab"], params)
    assert (completion.token_texts, "".join(completion.token_texts)) == (texts, completion.text)


def test_a_character_of_several_tokens_is_the_text_of_the_last_one() -> None:
    engine = fake_engine()
    halves = [i for i, piece in enumerate(PIECES) if piece and not _is_text(piece)]
    params = SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(map(str, halves), 100.0), ignore_eos=True)
    (completion,) = engine.generate(["ab"], params)
    assert len(completion.token_texts) == 6
    assert "" in completion.token_texts
    assert "".join(completion.token_texts) == completion.text


def test_the_tokens_of_a_stop_string_keep_their_texts() -> None:
    engine = fake_engine()
    plain = engine.generate(["ab"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
    stop = "".join(plain.token_texts[3:5])
    stopped = engine.generate(["ab"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[stop]))[0]
    assert stopped.text + stop == "".join(stopped.token_texts) == plain.text[: len(stopped.text) + len(stop)]


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
