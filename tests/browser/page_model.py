"""A tiny model that writes English words until it is stopped."""

from __future__ import annotations

from pathlib import Path

from cppbatch.models.synthetic import LlamaShape
from tests.support import tiny_models

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "apple autumn baker basket beach bird boat book bread bridge brother butter candle castle chair child circle "
    "city cloud coat corner cotton cousin daughter desert dinner doctor door dream early earth east eight evening farm "
    "father feather field fire fish five flower forest four friend garden girl glass grandmother green hammer harbour "
    "head heart hill horse house island jacket journey kitchen lake lamp letter lighthouse line lion market milk "
    "mill miller minute mirror money moon morning mother mountain music needle night north number ocean orange paper "
    "peach people piano picture pocket potato quick quiet rabbit rain river road rope round salt school second seven "
    "shadow sheep ship silver sister six snow soldier south spring stone storm story street summer sunday table tailor "
    "teacher thunder tiger tower travel tree valley village wagon wall water west window winter woman wood yellow"
).split()


def write_page_model(path: Path) -> Path:
    """Texts of it at the pace of `tests.support.paced_server` last longer than five minutes."""
    shape = LlamaShape(n_ctx_train=32_768)
    return tiny_models.writing(path, [f" {word}" for word in WORDS], shape=shape, chat_template=CHATML)
