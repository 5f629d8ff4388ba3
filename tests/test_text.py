"""From token pieces to text: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch.engine.text import TextStream
from tests.fakes import cut_before_stop

MANY = settings(deadline=None, derandomize=True, database=None, max_examples=1000)
LETTERS = "ab\n é日🙂"
TEXTS = st.text(LETTERS, max_size=24) | st.text(max_size=24)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4).map(tuple)


@st.composite
def pieces_of(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """The bytes cut into pieces anywhere, inside characters too; some pieces are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=len(raw))))
    return [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


def bytewise(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def read(pieces: list[bytes], stop: tuple[str, ...]) -> tuple[list[str], TextStream]:
    """What the engine gives out: every push until a stop string comes, else the held back rest."""
    stream, shown = TextStream(stop), []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.stopped:
            return shown, stream
    return [*shown, stream.flush()], stream


@MANY
@given(data=st.data(), text=TEXTS, stop=STOPS)
def test_the_text_is_cut_before_the_stop_string_that_is_complete_first(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    shown, stream = read(data.draw(pieces_of(text.encode())), stop)
    assert ("".join(shown), stream.stopped) == cut_before_stop(text, stop)


@MANY
@given(text=TEXTS, stop=STOPS)
def test_the_cut_is_the_same_in_one_piece_and_byte_by_byte(text: str, stop: tuple[str, ...]) -> None:
    assert "".join(read([text.encode()], stop)[0]) == "".join(read(bytewise(text), stop)[0])


@MANY
@given(data=st.data(), text=TEXTS, stop=STOPS)
def test_no_stop_string_and_no_replacement_character_gets_out(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    shown = "".join(read(data.draw(pieces_of(text.encode())), stop)[0])
    assert not any(string in shown for string in stop)
    assert shown.count("\ufffd") <= text.count("\ufffd")


@MANY
@given(data=st.data(), text=TEXTS, stop=STOPS)
def test_only_what_may_become_a_stop_string_or_a_character_is_held_back(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    stream, shown, raw = TextStream(stop), "", b""
    for piece in data.draw(pieces_of(text.encode())):
        shown, raw = shown + stream.push(piece), raw + piece
        if stream.stopped:
            return
        held = raw.decode("utf-8", "ignore").removeprefix(shown)
        assert held == "" or any(string.startswith(held) and string != held for string in stop)


@MANY
@given(data=st.data(), raw=st.binary(max_size=24))
def test_bytes_that_are_no_utf8_become_replacement_characters(data: st.DataObject, raw: bytes) -> None:
    assert "".join(read(data.draw(pieces_of(raw)), ())[0]) == raw.decode("utf-8", "replace")


def test_a_character_comes_out_whole_when_its_last_byte_has_come() -> None:
    shown, _ = read(bytewise("🙂!"), ())
    assert shown == ["", "", "", "🙂", "!", ""]


def test_half_a_character_at_the_very_end_becomes_a_replacement_character() -> None:
    stream = TextStream()
    assert stream.push("né".encode()[:-1]) == "n"
    assert stream.flush() == "\ufffd"


def test_the_beginning_of_a_stop_string_waits_and_comes_when_it_was_none() -> None:
    shown, stream = read([b"1 <", b"/", b"b>"], ("</s>",))
    assert shown == ["1 ", "", "</b>", ""]
    assert not stream.stopped


def test_flush_gives_the_beginning_of_a_stop_string_that_never_came() -> None:
    shown, stream = read([b"end <", b"/s"], ("</s>",))
    assert shown == ["end ", "", "</s"]
    assert not stream.stopped


def test_a_stop_string_split_over_pieces_leaves_no_trace() -> None:
    shown, stream = read([b"yes<", b"/", b"s>no"], ("</s>",))
    assert shown == ["yes", "", ""]
    assert stream.stopped


def test_a_false_start_within_a_stop_string_still_finds_it() -> None:
    shown, stream = read(bytewise("aaab"), ("aab",))
    assert "".join(shown) == "a"
    assert stream.stopped


@pytest.mark.parametrize("pieces", [[b"x12345"], bytewise("x12345")])
def test_a_short_stop_string_inside_a_long_one_wins_because_it_is_complete_first(pieces: list[bytes]) -> None:
    assert "".join(read(pieces, ("12345", "34"))[0]) == "x12"


@pytest.mark.parametrize("pieces", [[b"xab"], bytewise("xab")])
def test_of_two_stop_strings_complete_at_the_same_letter_the_longer_is_cut_away(pieces: list[bytes]) -> None:
    assert "".join(read(pieces, ("b", "ab"))[0]) == "x"


def test_a_stop_string_of_characters_split_over_bytes_is_found() -> None:
    shown, stream = read(bytewise("é日é🙂日"), ("é🙂",))
    assert "".join(shown) == "é日"
    assert stream.stopped


def test_without_stop_strings_every_letter_comes_at_once() -> None:
    assert read(bytewise("abc"), ())[0] == ["a", "b", "c", ""]


def test_everything_after_a_stop_string_is_dropped() -> None:
    stream = TextStream(("#",))
    assert stream.push(b"x#y") == "x"
    assert stream.push(b"z") == ""
    assert stream.stopped
