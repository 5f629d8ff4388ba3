"""Replacements for a program of another project: a llama-server that sends words."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_LLAMA_SERVER = """
import sys
from aiohttp import web
from tests.support.fake_openai import FakeOpenAI
if "--backend-sampling" in sys.argv:
    sys.exit("this device cannot sample")
async def health(request):
    return web.json_response({"status": "ok"})
has_drafts = "--spec-type" in sys.argv
is_fastest = "ngram-mod" in sys.argv if has_drafts else {"--no-kv-unified", "q8_0"}.issubset(sys.argv)
between = 0.0 if is_fastest else 0.005
app = FakeOpenAI(model="peer", between=between, has_chat=True).app()
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)
"""


def write_program(path: Path, program: str) -> Path:
    """Writes an executable Python program, which can import this package if it is in PYTHONPATH."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_llama_server(path: Path) -> Path:
    """A server that is fast with a stream for each sequence and flash attention, and slower with other flags or drafts,
    but for those of ngram-mod."""
    return write_program(path, _LLAMA_SERVER)
