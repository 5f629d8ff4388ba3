"""A model that writes what an attacker would: HTML, scripts, and words that are too long for any line."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny_models

RUN = "window.hacked = true"
LONG_WORD = "unbreakable" * 40
HOSTILE_NAME = f"<img src=x onerror='{RUN}'>{LONG_WORD[:120]}"
PIECES = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload='{RUN}'></svg>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    f"[click](javascript:{RUN.replace(' ', '')})",
    f"![image](x' onerror='{RUN})",
    "![beacon](https://example.org/beacon.png)",
    "<style>main { display: none }</style>",
    "<form action='https://example.org'><button>Log in</button></form>",
    "</textarea></div></main></body>",
    f"`<script>{RUN}</script>`",
    f"\n\n```html\n<script>{RUN}</script>\n```\n\n",
    f"\n\n```\"><img src=x onerror='{RUN}'>\ncode\n```\n\n",
    f"\n\n| a | b |\n|---|---|\n| <script>{RUN}</script> | {LONG_WORD} |\n\n",
    f" {LONG_WORD} ",
    " ${" + RUN + "} ",
    " {{" + RUN + "}} ",
    "\n\n# heading\n\n- item\n",
    "<base href='https://example.org/'>",
    "<meta http-equiv='refresh' content='0;url=https://example.org'>",
)

MARKS = """() => ({
  hacked: 'hacked' in window,
  elements: [...document.querySelectorAll('main :is(script, iframe, style, form[action], base, meta, object, embed)')]
    .map((element) => element.outerHTML.slice(0, 100)),
  handlers: [...document.querySelectorAll('main *')].filter((element) => [...element.attributes]
    .some(({name, value}) => name.startsWith('on') || /^\\\\s*javascript:/i.test(value)))
    .map((element) => element.outerHTML.slice(0, 100)),
})"""
"""The marks that a script of the model would leave in a page. Evaluates to `UNMARKED` in a safe one."""
UNMARKED = {"hacked": False, "elements": [], "handlers": []}


def write_hostile_model(path: Path) -> Path:
    """A random Llama model that writes `PIECES` and nothing else, and never ends by itself."""
    return tiny_models.writing(path, PIECES)
