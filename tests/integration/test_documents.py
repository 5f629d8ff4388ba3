"""PDFs and zip files over HTTP: documents of the Messages API, and the texts that the web page attaches and sends."""

from __future__ import annotations

import base64
import io
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cppbatch.server.api import file_texts
from tests.support.http_client import Http, answered, http_of, post
from tests.support.pdf_files import pdf, scanned_pdf

NO_PYPDF = 'a PDF file requires pypdf: pip install "cppbatch[pdf]"'


@pytest_asyncio.fixture
async def http(tiny_llama: Path) -> AsyncIterator[Http]:
    async with http_of(tiny_llama, n_parallel=2, n_ctx=2048) as http:
        yield http


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def zipped(**contents: str | bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name.replace("_", "."), content)
    return file.getvalue()


def document(data: bytes | str, **fields: Any) -> dict[str, Any]:
    kind, text = ("text", data) if isinstance(data, str) else ("base64", encoded(data))
    return {"type": "document", "source": {"type": kind, "media_type": "application/pdf", "data": text}, **fields}


async def n_tokens(http: Http, *content: Any) -> int:
    body = {"messages": [{"role": "user", "content": list(content)}]}
    return int((await answered(http, "/v1/messages/count_tokens", body))["input_tokens"])


async def test_a_document_of_a_message_is_its_text(http: Http) -> None:
    as_text = await n_tokens(http, {"type": "text", "text": "Report\n\none\n\ntwo"})
    assert await n_tokens(http, document(pdf(["one", "two"]), title="Report", citations={"enabled": True})) == as_text
    assert await n_tokens(http, document("one\n\ntwo", title="Report")) == as_text
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document(pdf(["one"]))]}
    assert await n_tokens(http, result) > 0
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [document(pdf(["one"]))]}]}
    assert (await answered(http, "/v1/messages", body))["usage"]["output_tokens"] <= 4


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (document(scanned_pdf(1)), "messages[0].content[0].source.data: contains no text, perhaps because its "),
        (document(b"%PDF-1.4 no"), "messages[0].content[0].source.data: is not a valid PDF: "),
        (document(""), "messages[0].content[0].source.data: is required"),
        ({"type": "document"}, "messages[0].content[0].source: is required"),
        (
            {"type": "document", "source": {"type": "file", "file_id": "f"}},
            "messages[0].content[0].source.type: is 'file'; it must be ",
        ),
    ],
)  # fmt: skip
async def test_a_document_without_a_text_is_refused(http: Http, block: dict[str, Any], message: str) -> None:
    status, answer = await post(
        http, "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    )
    assert status == 400
    assert answer["error"]["message"].startswith(message)


async def test_documents_say_what_to_install(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    status, answer = await post(
        http, "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [document(b"%PDF-")]}]}
    )
    assert (status, answer["error"]["message"]) == (400, f"messages[0].content[0].source.data: {NO_PYPDF}")
    answer = await answered(http, "/file-texts", {"name": "a.pdf", "data": encoded(b"%PDF-")})
    assert answer == {"files": [], "skipped": [{"file": "a.pdf", "reason": f"cannot be read: {NO_PYPDF}"}]}


async def test_the_text_of_a_pdf_and_of_the_files_in_a_zip_file(http: Http) -> None:
    answer = await answered(http, "/file-texts", {"name": "a.pdf", "data": encoded(pdf(["one", "two"]))})
    assert answer == {"files": [{"file": "a.pdf", "text": "one\n\ntwo"}], "skipped": []}
    data = zipped(a_txt="text", b_pdf=pdf(["page"]), c_png=b"\0", d_pdf=scanned_pdf(1), e_txt=b"x" * 5000 + b"\xff")
    answer = await answered(http, "/file-texts", {"name": "in.ZIP", "data": encoded(data)})
    assert answer["files"] == [{"file": "a.txt", "text": "text"}, {"file": "b.pdf", "text": "page"}]
    assert [(each["file"], each["reason"].split(",")[0]) for each in answer["skipped"]] == [
        ("c.png", "not text"),
        ("d.pdf", "contains no text"),
        ("e.txt", "is not UTF-8 text; save it as UTF-8"),
    ]


@pytest.mark.parametrize(("name", "data"), [("a.docx", zipped(a_xml="<a/>")), ("a.txt", b"text"), ("a.pdf", b"")])
async def test_other_files_are_refused(http: Http, name: str, data: bytes) -> None:
    status, answer = await post(http, "/file-texts", {"name": name, "data": encoded(data)})
    assert (status, answer["error"]["message"]) == (400, "data: is neither a PDF nor a zip file")


async def test_a_damaged_zip_file_has_one_sentence(http: Http) -> None:
    answer = await answered(http, "/file-texts", {"name": "a.zip", "data": encoded(b"PK\3\4")})
    reason = "cannot be read: is not a valid zip file: File is not a zip file"
    assert answer == {"files": [], "skipped": [{"file": "a.zip", "reason": reason}]}


async def test_more_text_than_a_response_holds_is_refused(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_texts, "_MAX_CHARACTERS", 1 << 20)
    data = zipped(a_txt="x" * (1 << 20), b_txt="x")
    status, answer = await post(http, "/file-texts", {"name": "a.zip", "data": encoded(data)})
    assert (status, answer["error"]["message"]) == (
        400, "data: has more than 1 Mi characters of text; send its files in parts"
    )  # fmt: skip
