"""GGUF files made wrong in a random way: models, adapters, projectors."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cppbatch.models.file_header import VALUE_TYPES, WEIGHT_TYPES
from tests.support import tiny_models, tiny_projectors
from tests.support.lora_files import write_lora

STRING, ARRAY = VALUE_TYPES.index("STRING"), VALUE_TYPES.index("ARRAY")
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
ALIGNMENT = 32
SOURCES: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.llama,
    "quantised": lambda path: tiny_models.llama(path, quant="Q8_0", chat_template="{{ messages[0].content }}"),
    "mamba": tiny_models.mamba,
    "window": tiny_models.sliding_window,
    "hybrid": tiny_models.hybrid,
    "encoder": tiny_models.encoder_only,
    "head": tiny_models.with_head,
    "lora": write_lora,
    "projector": tiny_projectors.vision,
    "audio-projector": tiny_projectors.audio,
}
"""A file of each kind. The adapter and the projectors fit the first one."""
LONG = "long " * 200_000
NUMBERS = [0, 1, 2, 3, 7, 255, 512, 513, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf")]


@dataclass
class Gguf:
    """The content of a file."""

    metadata: list[tuple[bytes, int, Any]]
    """Key, type, value: a number, bytes, or (type, list) for an array."""
    tensors: list[tuple[bytes, list[int], int, int]]
    """Name, shape, type, offset."""
    data: bytes
    counts: dict[str, int] = field(default_factory=dict)
    """Instead of the real `tensors` and `metadata`."""

    def encode(self) -> bytes:
        n_tensors = self.counts.get("tensors", len(self.tensors))
        head = struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, self.counts.get("metadata", len(self.metadata)))
        parts = [head]
        for key, kind, value in self.metadata:
            parts += [_text(key), struct.pack("<I", kind), _value(kind, value)]
        for name, shape, kind, offset in self.tensors:
            parts += [_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)]
        header = b"".join(parts)
        return header + bytes(-len(header) % ALIGNMENT) + self.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        inner, values = value
        if inner == STRING:
            each = _text(values[0]) * len(values) if len(set(values)) == 1 else b"".join(map(_text, values))
        else:
            each = struct.pack(f"<{len(values)}{FORMATS[inner]}", *values)
        return struct.pack("<IQ", inner, len(values)) + each
    return struct.pack(f"<{FORMATS[kind]}", value)


def decode(content: bytes) -> Gguf:
    """Reads a valid file."""
    at = 24
    _, _, n_tensors, n_keys = struct.unpack_from("<4sIQQ", content)

    def take(kind: int) -> Any:
        nonlocal at
        if kind == STRING:
            n = take(10)
            at += n
            return content[at - n : at]
        if kind == ARRAY:
            inner, n = take(4), take(10)
            return inner, [take(inner) for _ in range(n)]
        (value,) = struct.unpack_from(f"<{FORMATS[kind]}", content, at)
        at += struct.calcsize(f"<{FORMATS[kind]}")
        return value

    metadata = [(take(STRING), kind := take(4), take(kind)) for _ in range(n_keys)]
    tensors = [(take(STRING), [take(10) for _ in range(take(4))], take(4), take(10)) for _ in range(n_tensors)]
    return Gguf(metadata, tensors, content[at + -at % ALIGNMENT :])


def retyped(path: Path, name: str, kind: str) -> Path:
    """Writes another type of a tensor into the header of a file."""
    file = decode(path.read_bytes())
    number = WEIGHT_TYPES[kind].number
    file.tensors = [(n, s, number if n == name.encode() else k, at) for n, s, k, at in file.tensors]
    path.write_bytes(file.encode())
    return path


def without_numbers(path: Path, name: str) -> Path:
    """Makes all weights of an F32 tensor NaN."""
    file = decode(path.read_bytes())
    _, shape, _, offset = next(tensor for tensor in file.tensors if tensor[0] == name.encode())
    n_bytes = 4 * math.prod(shape)
    file.data = file.data[:offset] + b"\xff" * n_bytes + file.data[offset + n_bytes :]
    path.write_bytes(file.encode())
    return path


def _some_key(rng: random.Random, file: Gguf) -> int:
    return rng.randrange(len(file.metadata))


def other_number(rng: random.Random, file: Gguf) -> None:
    numeric = [i for i, (_, kind, _) in enumerate(file.metadata) if kind in FORMATS]
    key, kind, _ = file.metadata[i := rng.choice(numeric)]
    if FORMATS[kind] in "fd":
        value: Any = rng.choice(FLOATS)
    elif FORMATS[kind] == "?":
        value = rng.random() < 0.5
    else:
        bits = 8 * struct.calcsize(f"<{FORMATS[kind]}")
        value = rng.choice(NUMBERS) % 2**bits
        value -= 2**bits if FORMATS[kind].islower() and value >= 2 ** (bits - 1) else 0
    file.metadata[i] = (key, kind, value)


def other_value(rng: random.Random, file: Gguf) -> None:
    key, _, _ = file.metadata[i := _some_key(rng, file)]
    file.metadata[i] = (key, *rng.choice([
        (STRING, b""), (STRING, b"text"), (STRING, LONG.encode()), (4, 5), (5, -1), (6, float("nan")), (7, True),
        (10, 2**64 - 1), (12, 1e308), (ARRAY, (4, [])), (ARRAY, (4, [1, 2, 3])), (ARRAY, (STRING, [b"a", b""])),
        (ARRAY, (6, [1.0] * 5000)), (STRING, b"\xff\x00\xfe"),
    ]))  # fmt: skip


def other_array(rng: random.Random, file: Gguf) -> None:
    arrays = [i for i, (_, kind, _) in enumerate(file.metadata) if kind == ARRAY]
    if not arrays:
        return
    key, _, (inner, values) = file.metadata[i := rng.choice(arrays)]
    changed = rng.choice([values[: len(values) // 2], values * 2, values[:1], [], list(reversed(values))])
    if inner == STRING and rng.random() < 0.3:
        changed = [rng.choice([b"", b"x" * 100_000, b"\xff", b"<0x00>", b"\n"]) for _ in values]
    file.metadata[i] = (key, ARRAY, (inner, changed))


def other_text(rng: random.Random, file: Gguf) -> None:
    texts = [i for i, (_, kind, _) in enumerate(file.metadata) if kind == STRING]
    key, kind, _ = file.metadata[i := rng.choice(texts)]
    names = [b"llama", b"clip", b"mamba", b"gemma3", b"bert", b"t5", b"qwen3moe", b"", b"gpt2", b"none", LONG.encode()]
    file.metadata[i] = (key, kind, rng.choice(names))


def no_key(rng: random.Random, file: Gguf) -> None:
    del file.metadata[_some_key(rng, file)]


def key_twice(rng: random.Random, file: Gguf) -> None:
    file.metadata.append(rng.choice(file.metadata))


def other_key(rng: random.Random, file: Gguf) -> None:
    _, kind, value = file.metadata[i := _some_key(rng, file)]
    names = [b"", b"general.alignment", b"general.architecture", b"split.count", b"general.type", b"k" * 70_000]
    file.metadata[i] = (rng.choice(names), kind, value)


def other_type(rng: random.Random, file: Gguf) -> None:
    name, shape, _, offset = file.tensors[i := rng.randrange(len(file.tensors))]
    file.tensors[i] = (name, shape, rng.choice([*range(42), 99, 2**31]), offset)


def other_shape(rng: random.Random, file: Gguf) -> None:
    name, shape, kind, offset = file.tensors[i := rng.randrange(len(file.tensors))]
    shape = list(shape)
    change = rng.randrange(5)
    if change == 0:
        shape[rng.randrange(len(shape))] = rng.choice(NUMBERS)
    elif change == 1:
        shape = shape[::-1]
    elif change == 2:
        shape = [*shape, rng.choice([1, 2, 2**32])]
    elif change == 3:
        shape = shape[:-1]
    else:
        shape = [2**60] * rng.choice([5, 1000, 50_000])
    file.tensors[i] = (name, shape, kind, offset)


def other_offset(rng: random.Random, file: Gguf) -> None:
    name, shape, kind, offset = file.tensors[i := rng.randrange(len(file.tensors))]
    file.tensors[i] = (name, shape, kind, rng.choice([*NUMBERS, offset + 1, offset + 32]))


def other_name(rng: random.Random, file: Gguf) -> None:
    _, shape, kind, offset = file.tensors[i := rng.randrange(len(file.tensors))]
    other = rng.choice([*(name for name, *_ in file.tensors), b"", b"x" * 64, b"x" * 100_000, b"\xff\xfe"])
    file.tensors[i] = (other, shape, kind, offset)


def no_tensor(rng: random.Random, file: Gguf) -> None:
    del file.tensors[rng.randrange(len(file.tensors))]


def swapped_tensors(rng: random.Random, file: Gguf) -> None:
    i, j = rng.randrange(len(file.tensors)), rng.randrange(len(file.tensors))
    a, b = file.tensors[i], file.tensors[j]
    file.tensors[i], file.tensors[j] = (b[0], *a[1:]), (a[0], *b[1:])


def other_count(rng: random.Random, file: Gguf) -> None:
    file.counts[rng.choice(["tensors", "metadata"])] = rng.choice([*NUMBERS, 100_000])


def many_tensors(rng: random.Random, file: Gguf) -> None:
    n = rng.choice([1000, 20_000, 100_000])
    file.tensors += [(b"t%d" % i, [1], 0, 0) for i in range(n)]


def many_keys(rng: random.Random, file: Gguf) -> None:
    file.metadata += [(b"k%d" % i, 4, i) for i in range(rng.choice([1000, 20_000, 200_000]))]


def many_texts(rng: random.Random, file: Gguf) -> None:
    file.metadata.append((b"x.texts", ARRAY, (STRING, [b""] * rng.choice([10_000, 800_000]))))


def other_weights(rng: random.Random, file: Gguf) -> None:
    data = bytearray(file.data)
    for _ in range(1000):
        at = rng.randrange(len(data) - 4)
        data[at : at + 4] = rng.choice([b"\xff" * 4, b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", rng.randbytes(4)])
    file.data = bytes(data)


OF_HEADERS: list[Callable[[random.Random, Gguf], None]] = [
    other_number, other_number, other_number, other_value, other_value, other_array, other_text, no_key, key_twice,
    other_key, other_type, other_type, other_type, other_shape, other_shape, other_offset, other_name, no_tensor,
    swapped_tensors, other_count, many_tensors, many_keys, many_texts, other_weights,
]  # fmt: skip


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 3, 20])):
        changed[rng.randrange(min(len(changed), 20_000))] = rng.randrange(256)
    return bytes(changed)


def mutated(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """The changes and the content of a file with one or two things wrong (or, by luck, none)."""
    if rng.random() < 0.2:
        change = rng.choice([cut, flipped])
        return change.__name__, change(rng, content)
    file, names = decode(content), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        of_header = rng.choice(OF_HEADERS)
        of_header(rng, file)
        names.append(of_header.__name__)
    return "+".join(names), file.encode()


def write_mutants(folder: Path, n: int, seed: int) -> dict[str, Path]:
    """Writes `n` files, each kind in turn, and returns them by a name that says what is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = {kind: make(folder / f"{kind}.source").read_bytes() for kind, make in SOURCES.items()}
    files: dict[str, Path] = {}
    for i in range(n):
        kind = list(SOURCES)[i % len(SOURCES)]
        change, content = mutated(random.Random(f"{seed} {i}"), sources[kind])
        path = folder / f"{kind}-{i}.gguf"
        path.write_bytes(content)
        files[f"{kind} {i}: {change}"] = path
    return files
