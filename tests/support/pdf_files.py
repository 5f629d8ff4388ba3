"""PDF files for tests, written as bytes: pages of text, pages without text, a stream that unpacks to far more."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_PROLOGUE = b"BT /F1 12 Tf 14 TL 72 720 Td "


def pdf(pages: Sequence[str]) -> bytes:
    """A PDF with a page for each text, whose lines are lines of the page."""
    contents = []
    for text in pages:
        lines = [line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in text.splitlines()]
        contents.append(_PROLOGUE + "".join(f"({line}) Tj T* " for line in lines).encode("latin-1") + b"ET")
    return _file([b"<< /Length %d >> stream\n%s\nendstream" % (len(each), each) for each in contents])


def scanned_pdf(n_pages: int) -> bytes:
    """A PDF whose pages draw a rectangle and no text."""
    return _file([b"<< /Length 20 >> stream\n0 0 100 100 re f    \nendstream"] * n_pages)


def bomb_pdf(megabytes: int) -> bytes:
    """A PDF of a page whose content is packed twice, and unpacks to this size."""
    packer = zlib.compressobj(1)
    once = b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()
    packed = zlib.compress(once, 9)
    form = b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >> stream\n" % len(packed)
    return _file([form + packed + b"\nendstream"])


def _file(streams: Sequence[bytes]) -> bytes:
    """`streams`: the content of each page, as an object."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(streams)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(streams)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, stream in enumerate(streams):
        box = b"/MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
        objects += [b"<< /Type /Page /Parent 2 0 R %s /Contents %d 0 R >>" % (box, 5 + 2 * i), stream]
    data, places = bytearray(b"%PDF-1.4\n"), []
    for number, each in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(data)
