"""Which files have a draft head, and which of these can be used without aborting the process."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch.models.draft_files import DraftHeads, heads_in
from cppbatch.models.file_header import FileHeader, TensorInfo


def header(architecture: str, *names: str, n: Any = 1, **more: Any) -> FileHeader:
    """Of a file with three layers, of which the last `n` are heads."""
    sizes = {f"{architecture}.block_count": 3, f"{architecture}.nextn_predict_layers": n}
    return FileHeader(
        {"general.architecture": architecture, **sizes, **{f"{architecture}.{key}": more[key] for key in more}},
        [TensorInfo(name, "F32", (8, 8)) for name in names],
    )


def test_a_head_is_a_layer_with_its_tensors_in_the_file() -> None:
    head = "blk.2.nextn.eh_proj.weight"
    assert heads_in([header("qwen35", head)]) == DraftHeads(1, "qwen35")
    assert heads_in([header("qwen35"), FileHeader({}, [TensorInfo(head, "F32", (8,))])]).n == 1  # in the second part
    assert heads_in([header("qwen35", "blk.1.nextn.eh_proj.weight", n=2)]).n == 2
    for without in (header("qwen35"), header("qwen35", head, n=None), header("qwen35", head, n=0), FileHeader({}, [])):
        assert heads_in([without]).why_not_usable("x.gguf") == "x.gguf has no draft head"


@pytest.mark.parametrize(
    ("architecture", "names", "more", "reason"),
    [
        ("qwen35", (), {}, None),
        ("step35", (), {}, r"unsupported architecture (step35)"),
        ("glm4moe", (), {}, None),
        ("glm4moe", (), {"rope.dimension_sections": (0, 0, 0, 0)}, None),
        ("glm4moe", (), {"rope.dimension_sections": (8, 12, 12, 0)}, "multi-dimensional positions"),
        ("mimo2", (), {}, "separate query, key and value matrices"),
        ("mimo2", ("blk.2.attn_qkv.weight",), {}, None),
    ],
)
def test_a_head_that_would_abort_the_process_is_not_used(
    architecture: str, names: tuple[str, ...], more: dict[str, Any], reason: str | None
) -> None:
    heads = heads_in([header(architecture, "blk.2.nextn.eh_proj.weight", *names, **more)])
    said = heads.why_not_usable("x.gguf")
    assert said is None if reason is None else reason in (said or "")
