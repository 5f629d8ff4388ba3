"""From token pieces to text: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

import codecs
import random
import tracemalloc
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from cppbatch.engine.vocabulary import Detokenizer
from tests.support.fakes import cut_before_stop
from tests.support.randomised import randomised

many = partial(randomised, ring=100, soak=500)
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


def read(pieces: list[bytes], stop: tuple[str, ...], *, include_stop: bool = False) -> tuple[list[str], Detokenizer]:
    """The engine's output: every push until a stop string matches, else also the text held back."""
    stream, shown = Detokenizer(stop, include_stop=include_stop), []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.stopped:
            return shown, stream
    return [*shown, stream.flush()], stream


@many(data=st.data(), text=TEXTS, stop=STOPS)
def test_the_text_is_cut_before_the_stop_string_that_is_complete_first(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    shown, stream = read(data.draw(pieces_of(text.encode())), stop)
    assert ("".join(shown), stream.stopped) == cut_before_stop(text, stop)


@many(text=TEXTS, stop=STOPS)
def test_the_cut_is_the_same_in_one_piece_and_byte_by_byte(text: str, stop: tuple[str, ...]) -> None:
    assert "".join(read([text.encode()], stop)[0]) == "".join(read(bytewise(text), stop)[0])


@many(data=st.data(), text=TEXTS, stop=STOPS)
def test_no_stop_string_and_no_replacement_character_gets_out(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    shown = "".join(read(data.draw(pieces_of(text.encode())), stop)[0])
    assert not any(string in shown for string in stop)
    assert shown.count("\ufffd") <= text.count("\ufffd")


@many(data=st.data(), text=TEXTS, stop=STOPS)
def test_only_what_may_become_a_stop_string_or_a_character_is_held_back(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    stream, shown, raw = Detokenizer(stop), "", b""
    for piece in data.draw(pieces_of(text.encode())):
        shown, raw = shown + stream.push(piece), raw + piece
        if stream.stopped:
            return
        held = raw.decode("utf-8", "ignore").removeprefix(shown)
        assert held == "" or any(string.startswith(held) and string != held for string in stop)


@many(data=st.data(), raw=st.binary(max_size=24))
def test_bytes_that_are_not_utf8_become_replacement_characters(data: st.DataObject, raw: bytes) -> None:
    assert "".join(read(data.draw(pieces_of(raw)), ())[0]) == raw.decode("utf-8", "replace")


def test_a_character_comes_out_whole_when_its_last_byte_has_come() -> None:
    shown, _ = read(bytewise("🙂!"), ())
    assert shown == ["", "", "", "🙂", "!", ""]


def test_half_a_character_at_the_very_end_becomes_a_replacement_character() -> None:
    stream = Detokenizer()
    assert stream.push("né".encode()[:-1]) == "n"
    assert stream.flush() == "\ufffd"


def test_the_start_of_a_stop_string_is_held_back_and_released_if_it_does_not_match() -> None:
    shown, stream = read([b"1 <", b"/", b"b>"], ("</s>",))
    assert shown == ["1 ", "", "</b>", ""]
    assert not stream.stopped


def test_flush_returns_the_start_of_a_stop_string_that_was_not_completed() -> None:
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


def test_without_stop_strings_every_character_is_returned_at_once() -> None:
    assert read(bytewise("abc"), ())[0] == ["a", "b", "c", ""]


def test_everything_after_a_stop_string_is_dropped() -> None:
    stream = Detokenizer(("#",))
    assert stream.push(b"x#y") == "x"
    assert stream.push(b"z") == ""
    assert stream.stopped


# --- include_stop ----------------------------------------------------------------------------------------------------


def cut_after_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """As `cut_before_stop`, but with the stop string."""
    for end in range(1, len(text) + 1):
        if text[:end].endswith(stop):
            return text[:end], True
    return text, False


@many(data=st.data(), text=TEXTS, stop=STOPS)
def test_with_include_stop_the_text_is_cut_after_the_stop_string_that_is_complete_first(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    shown, stream = read(data.draw(pieces_of(text.encode())), stop, include_stop=True)
    assert ("".join(shown), stream.stopped) == cut_after_stop(text, stop)


@many(data=st.data(), text=TEXTS, stop=STOPS)
def test_with_include_stop_nothing_comes_earlier_or_later_than_without(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    pieces = data.draw(pieces_of(text.encode()))
    (shown, stream), (without, other) = read(pieces, stop, include_stop=True), read(pieces, stop)
    assert stream.stopped == other.stopped
    assert shown[:-1] == without[:-1]
    assert shown[-1].startswith(without[-1])
    rest = shown[-1].removeprefix(without[-1])
    assert rest == "" or (stream.stopped and "".join(shown).endswith(stop) and rest in stop)


def test_an_included_stop_string_comes_whole_when_it_is_complete() -> None:
    shown, stream = read([b"yes<", b"/", b"s>no"], ("</s>",), include_stop=True)
    assert shown == ["yes", "", "</s>"]
    assert stream.stopped


@pytest.mark.parametrize("pieces", [[b"x12345"], bytewise("x12345")])
def test_of_a_short_stop_string_inside_a_long_one_the_short_one_is_included(pieces: list[bytes]) -> None:
    assert "".join(read(pieces, ("12345", "34"), include_stop=True)[0]) == "x1234"


def test_everything_after_an_included_stop_string_is_dropped() -> None:
    stream = Detokenizer(("#",), include_stop=True)
    assert stream.push(b"x#y") == "x#"
    assert stream.push(b"z") == ""
    assert stream.flush() == ""


# --- a thousand stop strings -----------------------------------------------------------------------------------------


def strings_of(letters: str, lengths: range, n: int) -> tuple[str, ...]:
    draw = random.Random(5)
    return tuple("".join(draw.choices(letters, k=draw.choice(lengths))) for _ in range(n))


THOUSAND = strings_of("abcdefghij", range(4, 9), 1000)


@pytest.mark.parametrize("include_stop", [False, True])
def test_any_of_a_thousand_stop_strings_is_found(include_stop: bool) -> None:
    for string in THOUSAND[::10]:
        text = f"né {string[:2]} {string} after"
        shown, stream = read(bytewise(text), THOUSAND, include_stop=include_stop)
        expected = cut_after_stop if include_stop else cut_before_stop
        assert ("".join(shown), stream.stopped) == expected(text, THOUSAND)
        assert stream.stopped


@randomised(ring=25, soak=100, data=st.data(), text=st.text("abcd ", max_size=200))
def test_of_a_thousand_stop_strings_the_one_that_is_complete_first_ends_the_text(
    data: st.DataObject, text: str
) -> None:
    stop = strings_of("abcd", range(4, 9), 1000)
    shown, stream = read(data.draw(pieces_of(text.encode())), stop)
    assert ("".join(shown), stream.stopped) == cut_before_stop(text, stop)


class Compared(str):
    """A stop string; `n` counts how often any of them is looked at."""

    n = 0

    def __lt__(self, other: str) -> bool:
        Compared.n += 1
        return str(self) < other

    def startswith(self, *arguments: Any) -> bool:
        Compared.n += 1
        return str(self).startswith(*arguments)


def comparisons_a_push(stop: tuple[str, ...]) -> float:
    """With a text that repeatedly has a start of a stop string held back but never stops."""
    pieces = [piece.encode() for string in THOUSAND for piece in (string[:3], " ")]
    stream = Detokenizer([Compared(string) for string in stop])
    Compared.n = 0
    for piece in pieces:
        stream.push(piece)
    assert not stream.stopped
    return Compared.n / len(pieces)


def test_a_thousand_stop_strings_cost_a_push_little_more_than_one() -> None:
    assert 0 < comparisons_a_push(THOUSAND) < 15 * comparisons_a_push(("abcdefgh",))


# --- n_characters ----------------------------------------------------------------------------------------------------


@many(data=st.data(), raw=TEXTS.map(str.encode) | st.binary(max_size=24), stop=STOPS)
def test_n_characters_counts_those_that_are_complete_shown_or_held_back(
    data: st.DataObject, raw: bytes, stop: tuple[str, ...]
) -> None:
    stream, decoder, complete = Detokenizer(stop), codecs.getincrementaldecoder("utf-8")("replace"), 0
    for piece in data.draw(pieces_of(raw)):
        stream.push(piece)
        complete += len(decoder.decode(piece))
        assert stream.n_characters == complete
        if stream.stopped:
            return
    stream.flush()
    assert stream.n_characters == complete + len(decoder.decode(b"", final=True)) == len(raw.decode("utf-8", "replace"))


def test_n_characters_is_the_offset_of_the_next_token() -> None:
    stream, places = Detokenizer(("</s>",)), []
    for piece in (b"a", b"\xc3", b"\xa9", b"<", b"/s", b"x"):
        places.append(stream.n_characters)
        stream.push(piece)
    assert places == [0, 1, 1, 2, 3, 5]


@many(text=TEXTS, stop=STOPS)
def test_it_reports_the_stop_string_that_matched(text: str, stop: tuple[str, ...]) -> None:
    shown, stream = read(bytewise(text), stop)
    if stream.stop is None:
        assert not stream.stopped
    else:
        assert stream.stop in stop
        assert text.startswith("".join(shown) + stream.stop)


def test_long_stop_strings_take_no_memory_of_their_own() -> None:
    """Every prefix of every string was kept: 18 MB for each sequence of 128."""
    stop = tuple(chr(0x1F600 + i) * 512 for i in range(32))
    tracemalloc.start()
    streams = [Detokenizer(stop) for _ in range(16)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert [stream.push(stop[3][:100].encode()) for stream in streams] == [""] * 16
