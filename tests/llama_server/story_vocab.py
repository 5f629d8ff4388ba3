"""Vocabularies of the made models: llama-server's tests expect certain numbers of tokens.

The models that they were written for have a vocabulary of 512 tokens, trained on stories for children. These words were
chosen by a search so that the counts are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from cppbatch.models.synthetic import GgufVocab

_SPACE = "\u2581"  # how SentencePiece writes a space
_PREFIXES = """
    -Book -D -Fr -Ger -Hel -Hey -L -Test -Th -U -You -ali -am -are -assis -au -bel -book -brown -capit -ci -con
    -dog -dolo -ea -eiusm -el -eni -et -fibo -fu -how -ips -iru -is -joke -jumps -lab -lazy -lif -lo -mag -meanin
    -not -nul -paria -prom -rep -system -th -tru -u -vel -very -wi -y <|im_ or
""".replace("-", _SPACE)
"""A text becomes these, their prefixes, and single characters."""


@dataclass(frozen=True)
class _Field:
    """A value of the metadata, as `GGUFReader` gives it."""

    value: Any
    type: gguf.GGUFValueType

    @property
    def types(self) -> list[gguf.GGUFValueType]:
        return [self.type]

    def contents(self) -> Any:
        return self.value


def story_vocab(*words: str, infill: bool = False) -> GgufVocab:
    """The vocabulary, with these words as tokens too; `infill`: with the special tokens of /infill."""
    special = ["<unk>", "<s>", "</s>", *(["<PRE>", "<SUF>", "<MID>"] if infill else [])]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    whole = [*_PREFIXES.split(), *(_SPACE + word for word in words)]
    merged = {text[:n] for text in whole for n in range(2, len(text) + 1)}
    pieces = [_SPACE, *(chr(c) for c in range(0x21, 0x7F)), *sorted(merged, key=lambda piece: (len(piece), piece))]
    text, token, flag = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL
    fields: dict[str, _Field] = {
        "model": _Field("llama", text),
        "unknown_token_id": _Field(0, token),
        "bos_token_id": _Field(1, token),
        "eos_token_id": _Field(2, token),
        "add_bos_token": _Field(True, flag),
        "add_space_prefix": _Field(True, flag),
    }
    if infill:
        fields |= {f"{name}_token_id": _Field(3 + i, token) for i, name in enumerate(("fim_pre", "fim_suf", "fim_mid"))}
    return GgufVocab(
        pieces=special + raw + pieces,
        scores=[0.0] * (len(special) + len(raw)) + [-float(rank) for rank in range(len(pieces))],
        types=[
            gguf.TokenType.UNKNOWN,
            *[gguf.TokenType.CONTROL] * (len(special) - 1),
            *[gguf.TokenType.BYTE] * len(raw),
            *[gguf.TokenType.NORMAL] * len(pieces),
        ],
        copied={f"tokenizer.ggml.{name}": field for name, field in fields.items()},
    )
