"""The text of PDF files: whole, or one sentence that says what is wrong, within bounds of time and memory."""

from __future__ import annotations

import io

import pytest

from cppbatch import pdf_text
from cppbatch.errors import UnreadableFile
from tests.support.pdf_files import bomb_pdf, pdf, scanned_pdf


def refusal(data: bytes) -> str:
    with pytest.raises(UnreadableFile) as refused:
        pdf_text.pdf_text(data)
    return str(refused.value)


def test_the_text_of_20_pages_is_read_in_their_order() -> None:
    text = pdf_text.pdf_text(pdf([f"Page {i}\nof a (short) report" for i in range(1, 21)]))
    assert text == "\n\n".join(f"Page {i}\nof a (short) report" for i in range(1, 21))


def test_pages_without_text_are_said_to_need_a_text_recognition() -> None:
    assert refusal(scanned_pdf(3)).startswith("contains no text, perhaps because its pages are images")


def test_an_encrypted_file_is_refused() -> None:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(["secret"]))))
    writer.encrypt("password", algorithm="RC4-128")
    encrypted = io.BytesIO()
    writer.write(encrypted)
    assert refusal(encrypted.getvalue()) == "is encrypted; save a copy without its password"


@pytest.mark.parametrize("data", [b"%PDF-1.4\n", pdf(["text"])[:200], b"%PDF-" + bytes(2000), b""])
def test_a_damaged_file_is_refused_in_one_sentence(data: bytes) -> None:
    sentence = refusal(data)
    assert sentence.startswith(("is not a valid PDF: ", "contains no text"))
    assert "\n" not in sentence


def test_a_stream_that_unpacks_to_thousands_of_times_its_size_is_refused() -> None:
    assert refusal(bomb_pdf(300)).startswith(("is not a valid PDF: ", "needs more than 1 GiB"))


def test_a_file_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_text, "_TIMEOUT_S", 0.001)
    assert refusal(pdf(["text"])) == "takes longer than 0.001 seconds to read; split it"


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_text, "MAX_PDF_BYTES", 10 << 20)
    assert refusal(bytes(11 << 20)) == "has 11 MiB; the limit for a PDF is 10 MiB"
