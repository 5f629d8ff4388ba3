"""An image becomes the same tokens in any prompt, is encoded once, and can be cancelled while it waits."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest

from cppbatch import InvalidRequest
from cppbatch.engine.media import input
from cppbatch.engine.media.input import EncodedMedium, MediaInput, placeholders
from cppbatch.engine.request import Media
from cppbatch.engine.vocabulary import IsCancelled, never_cancelled
from cppbatch.errors import LlamaError, RequestCancelled
from tests.support.fake_encoder import SEPARATOR, FakeEncoder, fake_media, small_picture


def encode(media: MediaInput, medium: Media, cancelled: IsCancelled = never_cancelled) -> EncodedMedium:
    return media.encode(medium, lambda n: None, cancelled)


def encoder_of(media: MediaInput) -> FakeEncoder:
    return cast(FakeEncoder, media.encoder)


def tokens_of(medium: EncodedMedium) -> list[int]:
    return [token for piece in medium.pieces for token in piece.tokens.tolist()]


def test_placeholders_follow_from_the_file_and_differ_for_other_pieces_and_files() -> None:
    picture = small_picture(1, 4, 2)
    tokens = tokens_of(encode(fake_media(), picture))
    assert tokens == tokens_of(encode(fake_media(), Media("image", bytes(bytearray(picture.data)))))
    assert tokens[4] == SEPARATOR
    others = tokens[:4] + tokens[5:]
    assert len(set(others)) == 8
    assert max(others) < -1
    of_another_file = tokens_of(encode(fake_media(), small_picture(2, 4, 2)))
    assert not set(of_another_file) & set(others)


def test_placeholders_are_int32_below_minus_one() -> None:
    tokens = placeholders(b"any", 100_000)
    assert tokens.dtype == np.int32
    assert tokens.max() < -1
    assert tokens.min() < -(2**30)


def test_an_equal_file_is_encoded_once() -> None:
    media = fake_media()
    first = encode(media, small_picture(1, 4))
    assert encode(media, Media("image", bytes(bytearray(small_picture(1, 4).data)))) is first
    assert (encoder_of(media).n_calls, media.n_encoded, media.n_found) == (1, 1, 1)


def test_time_does_not_show_what_was_sent_with_another_salt() -> None:
    media, picture = fake_media(), small_picture(1, 4)
    tokens = [tokens_of(media.encode(picture, lambda n: None, never_cancelled, salt=salt)) for salt in ("a", "b", "a")]
    assert (media.n_encoded, media.n_found) == (2, 1)
    assert tokens[0] == tokens[1] == tokens[2], "a file of a slot or a replay finds the same tokens"
    assert media.n_tokens(picture, never_cancelled) == 4
    assert encoder_of(media).n_calls == 2, "counting neither encodes nor finds"


def test_equal_files_that_arrive_together_are_encoded_once() -> None:
    media = fake_media()
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: encode(media, small_picture(1, 4, 3)), range(8)))
    assert len(set(map(id, made))) == 1
    assert encoder_of(media).n_calls == 3  # its rows


def test_the_most_recently_used_images_are_kept_within_the_bound_and_those_of_sequences_are_found_too() -> None:
    n_bytes = encode(fake_media(), small_picture(0, 4)).n_bytes
    media = fake_media(cache_bytes=2 * n_bytes)
    held = encode(media, small_picture(0, 4))
    for number in (1, 2, 3):
        encode(media, small_picture(number, 4))
    encode(media, small_picture(2, 4))
    encode(media, small_picture(3, 4))
    assert encoder_of(media).n_calls == 4
    encode(media, small_picture(1, 4))
    assert encoder_of(media).n_calls == 5
    assert encode(media, small_picture(0, 4)) is held
    assert media._kept_bytes <= 2 * n_bytes


def test_an_image_that_waits_for_the_encoder_can_be_cancelled() -> None:
    media = fake_media()
    encoder_of(media).may_encode.clear()
    is_cancelled = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(encode, media, small_picture(1, 4))
        assert encoder_of(media).encoding.wait(10)
        second = threads.submit(encode, media, small_picture(2, 4), is_cancelled.is_set)
        is_cancelled.set()
        with pytest.raises(RequestCancelled):
            second.result(10)
        encoder_of(media).may_encode.set()
        assert first.result(10).n_tokens == 4
    assert encoder_of(media).n_calls == 1


def test_an_image_is_cancelled_between_two_of_its_pieces() -> None:
    media = fake_media()
    answers = iter((False, False, True))
    with pytest.raises(RequestCancelled):
        encode(media, small_picture(1, 2, 9), lambda: next(answers))
    assert encoder_of(media).n_calls == 2


def test_the_number_of_tokens_is_checked_before_they_are_encoded() -> None:
    media, seen = fake_media(), []

    def refuse(n: int) -> None:
        seen.append(n)
        raise InvalidRequest("prompt", "too long")

    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too long"):
            media.encode(small_picture(1, 4, 2), refuse, never_cancelled)
    assert seen == [9, 9]
    assert encoder_of(media).n_calls == 0


def test_an_image_that_the_encoder_refuses_is_an_invalid_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeEncoder, chunk: object) -> None:
        raise LlamaError("out of memory")

    monkeypatch.setattr(FakeEncoder, "encode", fail)
    with pytest.raises(InvalidRequest, match="prompt: contains image data that cannot be encoded: out of memory"):
        encode(fake_media(), small_picture(1, 4))


def test_beside_a_step_loop_a_request_waits_while_sequences_hold_too_many_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    media = fake_media(cache_bytes=0)
    held = [encode(media, small_picture(number, 4)) for number in range(3)]
    monkeypatch.setattr(input, "HELD_BYTES", 2 * held[0].n_bytes)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(media.wait_for_room, never_cancelled)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)
        held.pop()
        waiting.result(10)
    held.append(encode(media, small_picture(7, 4)))
    with pytest.raises(RequestCancelled):
        media.wait_for_room(lambda: True)
