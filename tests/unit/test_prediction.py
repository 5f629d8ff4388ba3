"""The expected text of a request (`prediction`): it becomes tokens, or is refused with what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cppbatch import GenerationRequest, InvalidRequest, Pair
from cppbatch.engine.input_processor import InputProcessor
from tests.support.fakes import N_VOCAB, fake_engine, greedy

N_CTX = 40


@pytest.fixture
def processor() -> Iterator[InputProcessor]:
    with fake_engine(n_ctx=N_CTX, n_batch=40, n_parallel=1, unified=True) as engine:
        yield engine.core.inputs


def request(prediction: object) -> GenerationRequest:
    return GenerationRequest(id="a", prompt=[1, 2], params=greedy(3), prediction=prediction)  # type: ignore[arg-type]


def test_a_text_is_tokenised_and_token_ids_are_taken_unchanged(processor: InputProcessor) -> None:
    text = processor.process(request("abc")).prediction
    assert text is not None
    assert text.tolist() == processor._vocab.tokenize("abc").tolist()
    ids = processor.process(request([7, 5])).prediction
    assert ids is not None
    assert ids.tolist() == [7, 5]


@pytest.mark.parametrize("nothing", [None, "", [], " "])
def test_an_empty_prediction_is_ignored(processor: InputProcessor, nothing: object) -> None:
    assert processor.process(request(nothing)).prediction is None


@pytest.mark.parametrize("value", [5, 1.5, b"a", {"type": "content"}, Pair("a", "b")])
def test_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^prediction: is .*; it must be a string or a list of token ids$"):
        request(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, N_VOCAB], rf"^prediction\[1\]: is {N_VOCAB}; token ids are 0 to"),
        ([1] * (N_CTX + 1), rf"^prediction: has {N_CTX + 1} tokens, but this context holds only {N_CTX}"),
        ("a" * (N_CTX + 1), rf"^prediction: has {N_CTX + 1} tokens, but this context holds only {N_CTX}"),
        ("a" * (1 << 17), r"^prediction: is 131,072 bytes long, which is more than"),
    ],
)
def test_unknown_ids_and_more_tokens_than_the_context_are_refused(
    processor: InputProcessor, value: object, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        processor.process(request(value))


@pytest.mark.parametrize("entry", ["a", 1.5, -1])
def test_entries_are_token_ids(entry: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^prediction\[1\]: is .*; token ids are 0 to"):
        request([1, entry])


def test_a_long_prediction_is_not_prepared_between_steps(processor: InputProcessor) -> None:
    assert processor.is_quick(request("abc"))
    assert not processor.is_quick(request("a" * (1 << 16)))
