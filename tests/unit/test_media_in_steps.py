"""Images among tokens: computed in separate batches, shared like any prefix, and never treated as tokens."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationRequest, InvalidRequest, Media, MediaPrompt
from cppbatch.engine.core import EngineCore
from cppbatch.engine.disk.slots import Footer, read_slot_file, write_slot_file
from cppbatch.engine.kv.prefix_cache import ReuseCosts
from cppbatch.engine.media import input
from cppbatch.engine.request import ResumeState
from cppbatch.engine.sampling.logit_processing import recent_tokens
from cppbatch.errors import RequestCancelled
from tests.support.fake_encoder import SEPARATOR, FakeEncoder, as_read, fake_media, small_picture
from tests.support.fakes import FakeProposer, FakeVocab, context_of, drain, fake_engine, greedy, reference, tokens_of

PROMPT = MediaPrompt(["abc", small_picture(1, 6, 2), "de"])
SIZES_OF_ENGINE: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_parallel": 4, "unified": True, "sharing": "cells"}


def media_engine(*, is_whole: bool = False, **settings: Any) -> BatchInferenceEngine:
    return fake_engine(media=fake_media(is_whole=is_whole), **{**SIZES_OF_ENGINE, **settings})


def n_encoded(engine: BatchInferenceEngine) -> int:
    media = engine.core.runtime.media
    assert media
    assert isinstance(media.encoder, FakeEncoder)
    return media.encoder.n_calls


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_image_is_computed_in_pieces_between_texts_and_counted(is_whole: bool) -> None:
    engine = media_engine(is_whole=is_whole)
    result = engine.generate([PROMPT], greedy(8, ignore_eos=True))[0]
    assert result.tokens == reference(as_read(PROMPT), greedy(8, ignore_eos=True))[0]
    assert (result.usage.prompt_tokens, result.usage.n_media_tokens) == (18, 12)
    context = context_of(engine)
    assert [sum(step.values()) for step in context.vector_steps] == [6, 6]
    assert [sum(step.values()) for step in context.steps[:3]] == [3, 1, 2]  # the texts, and then tokens


def test_images_of_several_sequences_are_one_batch_beside_tokens_of_others() -> None:
    engine = media_engine()
    prompts = [MediaPrompt(["ab" * (i + 1), small_picture(i, 4), "c"]) for i in range(4)]
    results = engine.generate(prompts, greedy(4, ignore_eos=True))
    assert [result.tokens for result in results] == [
        reference(as_read(prompt), greedy(4, ignore_eos=True))[0] for prompt in prompts
    ]
    assert max(len(step) for step in context_of(engine).vector_steps) == 4


def test_a_second_request_takes_the_image_from_the_prefix_cache_and_the_encoder_is_not_called() -> None:
    engine = media_engine()
    prompt = MediaPrompt(["abcdefgh" * 2, small_picture(1, 12), "ij"])
    first = engine.generate([prompt], greedy(4))[0]
    calls, steps = n_encoded(engine), len(context_of(engine).vector_steps)
    again = engine.generate([MediaPrompt([*prompt.parts[:2], "xy"])], greedy(4))[0]
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 28)
    assert (n_encoded(engine), len(context_of(engine).vector_steps)) == (calls, steps)
    other = engine.generate([MediaPrompt([prompt.parts[0], small_picture(2, 12), "ij"])], greedy(4))[0]
    assert other.usage.cached_tokens == 16


def test_only_where_another_thread_steps_a_request_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input, "HELD_BYTES", -1)
    engine = media_engine()
    request = GenerationRequest(id="1", prompt=PROMPT)
    assert engine.prepare(request).n_prompt == 18
    core = EngineCore(engine.config, runtime=engine.core.runtime, prepares_beside_steps=True)
    with pytest.raises(RequestCancelled):
        core.make_sequence(request, cancelled=lambda: True)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("has_dimensions", [False, True])
def test_a_prefix_never_ends_within_an_image(has_dimensions: bool, unified: bool) -> None:
    layout = {"n_batch": 8, "unified": unified, "sharing": "cells" if unified else "copy"}
    engine = fake_engine(media=fake_media(has_dimensions=has_dimensions), **{**SIZES_OF_ENGINE, **layout})
    prompt = MediaPrompt(["abcdefgh" * 3, small_picture(2, 2, 3), "fg", small_picture(1, 20, 1), "ij"])
    start = 24 + (6 if has_dimensions else 6 + 2) + 2  # of the second image; with separators between rows otherwise
    request_id = engine.add_request(prompt, greedy(4))
    while (sequence := engine.core.sequences[request_id]).n_computed <= start:
        engine.step()
    assert start < sequence.n_computed < start + 20
    engine.cancel(request_id)
    engine.core.kv.check()
    assert (context_of(engine).n_used, engine.core.kv.n_cached) == (start, start)
    again = engine.generate([prompt], greedy(4))[0]
    assert again.usage.cached_tokens == start
    assert again.tokens == reference(as_read(prompt, has_dimensions=has_dimensions), greedy(4))[0]


@pytest.mark.parametrize("has_dimensions", [False, True])
def test_a_checkpoint_is_never_within_an_image(has_dimensions: bool) -> None:
    """The places chosen by distance from the end are all within this one; such a checkpoint could never be taken."""
    engine = fake_engine(
        media=fake_media(has_dimensions=has_dimensions), n_ctx=2048, n_batch=64, sharing="checkpoints",
        reuse_costs=ReuseCosts(min_cached=8),
    )  # fmt: skip
    for end, n_cached in (("x", 0), ("y", 40), ("z", 100)):  # 100: where the second one parted from the first
        prompt = MediaPrompt(["abcdefgh" * 5, small_picture(1, 60, 1), end])
        result = engine.generate([prompt], greedy(4, ignore_eos=True))[0]
        assert result.tokens == reference(as_read(prompt), greedy(4, ignore_eos=True))[0]
        assert result.usage.cached_tokens == n_cached
        engine.core.kv.check()


@pytest.mark.parametrize(
    ("n_before", "n_positions"),
    [(30, 24), (44, 25), (45, 31)],
    ids=["within the image", "after it", "in the answer"],
)
def test_a_sequence_that_comes_back_shares_whole_images(n_before: int, n_positions: int) -> None:
    """With rows and columns: its state is restored, then it gives up the cells that a cached prefix has too."""
    engine = fake_engine(media=fake_media(has_dimensions=True), **{**SIZES_OF_ENGINE, "n_batch": 6, "n_parallel": 1})
    context, params = context_of(engine), greedy(8, ignore_eos=True)
    prompt = MediaPrompt(["abcdefgh" * 3, small_picture(1, 4, 5), "ij"])  # 24 tokens, 20 at 5 positions, 2
    engine.add_request(prompt, params, request_id="1")
    events = []
    while engine.core.sequences["1"].n_computed < n_before:
        events += engine.step()
    engine.core.scheduler.preempt_all()
    engine.core.kv.apply()
    engine.add_request(prompt, greedy(3, ignore_eos=True), request_id="2", priority=-1)
    shared, share = [], context.share_prefix

    def record(source: int, target: int, n: int) -> None:
        shared.append(n)
        share(source, target, n)

    context.share_prefix = record  # type: ignore[method-assign]
    while engine.has_work:
        events += engine.step()
        engine.core.kv.check()
        assert context.n_used == engine.core.kv.n_used + engine.core.kv.n_cached
    expected = reference(as_read(prompt, has_dimensions=True), params)[0]
    assert (tokens_of(events, "1"), tokens_of(events, "2")) == (expected, expected[:3])
    assert shared == [n_positions]


def test_a_request_that_moves_to_another_engine_continues_with_the_same_text() -> None:
    expected = reference(as_read(PROMPT), greedy(10, ignore_eos=True))[0]
    engine = media_engine()
    request = GenerationRequest(id="1", prompt=PROMPT, params=greedy(10, ignore_eos=True))
    engine.add(engine.prepare(request, ResumeState(tokens=expected[:4], age=1.0, first_token_seconds=0.5)))
    assert tokens_of(drain(engine), "1") == expected[4:]


def test_an_interrupted_engine_computes_images_again() -> None:
    engine = media_engine()
    engine.add_request(PROMPT, greedy(6, ignore_eos=True), request_id="1")
    events = [event for _ in range(4) for event in engine.step()]
    engine.core.restart()
    events += drain(engine)
    assert tokens_of(events, "1") == reference(as_read(PROMPT), greedy(6, ignore_eos=True))[0]


def test_a_slot_file_keeps_placeholders(tmp_path: Path) -> None:
    tokens = np.array([1, -2, -(2**31), 7], np.int32)
    state = np.arange(8, dtype=np.uint8)
    footer = Footer("m", "d", ("f16", "f16"), "", [], {})
    write_slot_file(tmp_path / "slot", tokens, state, footer)
    assert read_slot_file(tmp_path / "slot")[0].tolist() == tokens.tolist()


def test_requests_travel_to_workers_and_replicas_with_their_bytes() -> None:
    request = GenerationRequest(id="1", prompt=PROMPT)
    assert PROMPT.media[0].digest == PROMPT.media[0].digest
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerationRequest)
    assert sent == pickle.loads(pickle.dumps(request)) == request
    assert isinstance(sent.prompt, MediaPrompt)
    assert sent.prompt.media[0].digest == PROMPT.media[0].digest


def started(engine: BatchInferenceEngine, prompt: MediaPrompt = PROMPT, **params: Any) -> Any:
    """The sequence of a request, after its first token."""
    request_id = engine.add_request(prompt, greedy(20, ignore_eos=True, **params))
    while not (sequence := engine.core.sequences[request_id]).n_generated:
        engine.step()
    return sequence


def test_penalties_and_processors_see_text_only() -> None:
    sequence = started(media_engine())
    text = [*FakeVocab().tokenize("abc"), SEPARATOR, *FakeVocab().tokenize("de")]
    assert sequence.known_tokens(0).min() < 0
    assert recent_tokens(sequence, -1).tolist() == [*text, *sequence.tokens[18 : sequence.n_tokens]]
    assert recent_tokens(sequence, 4).min() >= 0


def test_a_logits_processor_gets_no_placeholders() -> None:
    seen: list[npt.NDArray[np.int32]] = []

    def look(tokens: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> None:
        seen.append(tokens)

    media_engine().generate([PROMPT], greedy(3, logits_processor=look, ignore_eos=True))
    assert [len(tokens) for tokens in seen] == [6, 7, 8]
    assert min(tokens.min() for tokens in seen) >= 0


def test_penalties_change_a_text_with_an_image_as_one_without() -> None:
    engine = media_engine()
    result = engine.generate([PROMPT], greedy(12, ignore_eos=True, repetition_penalty=100))[0]
    assert len(set(result.tokens)) == 12
    assert not {*result.tokens} & {*FakeVocab().tokenize("abcde").tolist(), SEPARATOR}


def test_no_proposer_reads_a_sequence_with_images() -> None:
    proposer = FakeProposer()
    engine = media_engine(proposers=[proposer])
    read: list[Any] = []
    propose = proposer.propose

    def record(sequences: Any, most: Any) -> Any:
        read.extend(sequences)
        return propose(sequences, most)

    proposer.propose = record  # type: ignore[method-assign]
    prompts: list[MediaPrompt | list[int]] = [
        PROMPT,
        [1, 2, 3],
        MediaPrompt(["ab", small_picture(3, 4), "c"]),
        [3, 2, 1],
    ]
    results = engine.generate(prompts, greedy(30, ignore_eos=True))
    expected = [as_read(prompt) if isinstance(prompt, MediaPrompt) else prompt for prompt in prompts]
    assert [r.tokens for r in results] == [reference(each, greedy(30, ignore_eos=True))[0] for each in expected]
    assert read
    assert not any(sequence.media for sequence in read)
    assert results[0].usage.drafted_tokens == 0


def test_echo_is_the_text_of_the_prompt() -> None:
    result = media_engine().generate([PROMPT], greedy(2, echo=True))[0]
    assert result.text.startswith("abcde")


def test_a_text_with_images_ends_when_the_context_is_full() -> None:
    engine = media_engine(n_ctx=32, n_parallel=1, context_shift=True)
    result = engine.generate([PROMPT], greedy(100, ignore_eos=True), clamp_max_tokens=True)[0]
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.usage.completion_tokens, result.usage.context_shifts) == (14, 0)
    text = engine.generate(["abc"], greedy(100, ignore_eos=True))[0]
    assert text.usage.context_shifts > 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (MediaPrompt(["a", small_picture(1, 4)]), {}, "prompt: ends with an image or audio; add text after it"),
        (
            MediaPrompt(["a", Media("audio", b""), "b"]),
            {},
            "prompt: contains audio, but fake accepts only text and images",
        ),
        (MediaPrompt(["a", Media("image", b"x"), "b"]), {}, "prompt: contains an image that is not a PNG"),
        (MediaPrompt(["a", small_picture(1, 90, 9), "b"]), {}, "prompt: has 8[0-9]{2} tokens"),
        (MediaPrompt([]), {}, "prompt: is empty"),
        (PROMPT, {"echo": True, "logprobs": 1}, "echo: requests log-probabilities of a prompt with images"),
    ],
    ids=["no text after it", "audio", "broken", "too long", "empty", "scored"],
)
def test_invalid_media_prompts_are_refused(prompt: MediaPrompt, params: dict[str, Any], message: str) -> None:
    engine = media_engine()
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request(prompt, greedy(4, **params))


def test_an_engine_without_a_projector_refuses_images() -> None:
    with pytest.raises(InvalidRequest, match=r"contains images, but fake accepts text only \(images require mmproj"):
        fake_engine(**SIZES_OF_ENGINE).add_request(PROMPT, greedy(4))


def test_a_media_prompt_of_texts_is_that_text() -> None:
    results = fake_engine(**SIZES_OF_ENGINE).generate([MediaPrompt(["ab", "cd"]), "abcd"], greedy(6))
    assert results[0].tokens == results[1].tokens
    assert results[0].usage.n_media_tokens == 0
