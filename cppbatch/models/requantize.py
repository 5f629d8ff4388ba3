"""Other types of weights for a model: which ones batch well on this CPU, and writing the file.

A type whose kernel computes a batch row by row makes 16 sequences as slow as 16 times one. Q8_0 has a batched kernel on
nearly every CPU and represents all smaller types nearly without loss; BF16 is faster on CPUs with instructions for it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from cppbatch import child_processes
from cppbatch.errors import ModelError
from cppbatch.models.file_header import FILE_TYPES, WEIGHT_TYPES, read_header
from cppbatch.models.find import check_path, copy_path, model_parts
from cppbatch.models.kernels import KernelTimes
from cppbatch.regular_files import is_same_file, is_special, replace_file

Times = Mapping[str, KernelTimes]
Written = Callable[[int], object]
"""Called with the bytes that are written so far."""

TYPES = (
    "F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "IQ4_NL", "Q4_1", "Q4_0", "IQ4_XS", "Q3_K",
    "Q2_K",
)  # fmt: skip
"""The types that can be asked for. Others need an importance matrix, or are for special models."""

EXACT = ("Q8_0", "BF16", "F16", "F32")
"""Types that lose next to nothing of types of as many bits or fewer; smallest first."""
_SMALL = ("Q4_K", "IQ4_NL", "Q4_0")  # 4 bits with batched kernels on most CPUs; best quality first
_MAX_TIME_RATIO = 0.9  # of a type's time: less would not be worth another file
_SAME = 0.95  # of a time: less would be noise, and the smaller file is chosen
_SMALL_BYTES = 512 << 20  # of all matrices with 16 bits: a single row of more is bound by reading them from memory
_SMALL_PART = 8  # of the machine's memory
FLOATS = ("F32", "F16", "BF16")
"""The types that are not quantised."""
_LOOKUPS = ("token_embd.weight", "per_layer_token_embd.weight")
_MAIN_FILE_TYPES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


class Job(msgspec.Struct, frozen=True):
    """What `cppbatch.llama.quantize_child` writes: the arguments of `quantize`."""

    source: str
    target: str
    default: str
    overrides: dict[str, str]


class Requantization(msgspec.Struct, frozen=True, kw_only=True):
    """The types that a model's matrices get."""

    source: Path
    changes: dict[str, tuple[str, str]]
    """{matrix: (its type, its new type)} of those that change."""
    default: str
    """The file type of the result."""
    overrides: dict[str, str]
    """The types of matrices that are not of the default type."""
    n_bytes: int
    """The size of the result."""

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """{(type, new type): number of matrices}, most frequent first."""
        return dict(Counter(self.changes.values()).most_common())

    @property
    def output(self) -> Path:
        """The usual path of the result: beside the source, with the new types at the end of the name."""
        return copy_with(self.source, self.changes)


def copy_with(source: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """The usual path of the copy with these changes, which may not exist."""
    return copy_path(source, sorted({new for _, new in changes.values()}, key=TYPES.index))


class Matrix(NamedTuple):
    """A matrix whose type can change."""

    name: str
    kind: str
    n_elements: int
    n_columns: int
    is_multiplied: bool
    """Whether each row of a batch is multiplied by it in a plain matrix product."""
    used: float
    """The part of its weights that one token is multiplied by: below 1 for experts, 0 if it is only looked up in."""


def target_type(source_type: str, times: Times, lossy: bool = False, *, is_small: bool = False) -> str:
    """The type that a matrix of `source_type` should have on a CPU with these kernels: the first of `suited_types`.

    `lossy`: the fastest quantised type, and of types that are about as fast the best. `is_small`: `is_small_model`.
    """
    if not lossy:
        return suited_types(source_type, times, is_small=is_small)[0]
    known = [kind for kind in dict.fromkeys((source_type, "Q8_0", *_SMALL)) if kind in times.keys() - set(FLOATS)]
    fastest = min((times[kind].batch_ms for kind in known), default=0.0)
    return next((kind for kind in known if times[kind].batch_ms * _MAX_TIME_RATIO <= fastest), source_type)


def suited_types(source_type: str, times: Times, *, is_small: bool) -> list[str]:
    """The types of weights that this CPU computes batches of fastest, of those that lose next to nothing.

    Types are compared by `KernelTimes.batch_ms`. The source's own type is the first one unless another is 10% faster.
    The others are nearly lossless ones of as many bits or more, within 5% of the fastest, smallest first: two
    measurements of the same kernels differ by less, so they lead to the same file. A matrix of any type of the list
    has nothing to gain by the same rule.

    In a model that is not small a type with a batched kernel stays, and none becomes floats of more bits: a single row
    waits for the weights to be read from memory, which the timed matrices, in the CPU's cache, do not show. Types that
    are not in `times` are not chosen.
    """
    if source_type not in times or (times[source_type].is_batched and not is_small):
        return [source_type]
    exact = [kind for kind in EXACT if kind in times and kind != source_type and bits(kind) >= bits(source_type)]
    if not is_small:
        exact = [kind for kind in exact if kind not in FLOATS or bits(kind) == bits(source_type)]
    ms = {kind: times[kind].batch_ms for kind in (source_type, *exact)}
    fastest = min(ms.values())
    own = [source_type] if ms[source_type] * _MAX_TIME_RATIO <= fastest else []
    return own + [kind for kind in exact if ms[kind] * _SAME <= fastest]


def is_small_model(n_weights: float) -> bool:
    """Whether a model with this number of weights in its matrices may get types of 16 bits and more."""
    memory: int = psutil.virtual_memory().total
    return 2 * n_weights <= min(_SMALL_BYTES, memory / _SMALL_PART)


def bits(kind: str) -> float:
    """Bits per weight of a type."""
    block, n_bytes = _block(kind)
    return 8 * n_bytes / block


def plan_auto(path: Path, times_of: Callable[[set[str]], Times], *, lossy: bool = False) -> Requantization:
    """The types for this CPU. `times_of`: `kernel_times`. Raises `ModelError` for a file that cannot be requantised.

    Matrices that are only looked up in stay, and experts, which another operation multiplies.
    """
    matrices = read_matrices(path)
    multiplied = [matrix for matrix in matrices if matrix.is_multiplied]
    times = times_of({matrix.kind for matrix in multiplied} | {*EXACT, *(_SMALL if lossy else ())})
    is_small = is_small_model(sum(matrix.n_elements for matrix in matrices))
    targets = {}
    for matrix in multiplied:
        fitting = {kind: each for kind, each in times.items() if matrix.n_columns % _block(kind)[0] == 0}
        targets[matrix.name] = target_type(matrix.kind, fitting, lossy, is_small=is_small)
    return _requantization(path, matrices, targets)


def plan_type(path: Path, kind: str, *, lossy: bool = False) -> Requantization:
    """The type `kind` (one of `TYPES`) for all matrices.

    Raises `ModelError` for a file that cannot be requantised, for a type of fewer bits without `lossy`, and if all
    matrices have this type.
    """
    matrices = read_matrices(path)
    fewer = Counter(matrix.kind for matrix in matrices if bits(matrix.kind) > bits(kind))
    if fewer and not lossy:
        n, worst = fewer.total(), max(fewer, key=bits)
        raise ModelError(
            f"{kind} has {bits(kind):.3g} bits per weight, fewer than {n} of {len(matrices)} matrices in {path.name} "
            f"({worst}: {bits(worst):.3g}). Use --lossy to accept the quality loss"
        )
    plan = _requantization(path, matrices, dict.fromkeys((matrix.name for matrix in matrices), kind))
    if not plan.changes:
        raise ModelError(f"all matrices of {path.name} are already {kind}")
    return plan


def read_matrices(path: Path) -> list[Matrix]:
    """The matrices whose type can change. Raises `ModelError` for a file that cannot be requantised."""
    header = read_header(path)
    metadata, tensors = header.metadata, header.tensors
    if (n_parts := header.whole_number("split.count") or 1) > 1:
        raise ModelError(f"{path.name} is one of {n_parts} parts of a model; merge them with llama-gguf-split first")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{path.name} is not a model (its general.type is {kind!r}); only models can be requantised")
    architecture = metadata.get("general.architecture")
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    is_looked_up = has_output or f"{architecture}.pooling_type" in metadata  # such models compute no logits
    n_experts_used = header.whole_number(f"{architecture}.expert_used_count") or 1
    matrices = []
    for tensor in tensors:
        name, shape = tensor.name, tensor.shape
        if len(shape) < 2 or not name.endswith("weight") or name.endswith("_norm.weight"):
            continue
        is_multiplied = len(shape) == 2 and not (is_looked_up and name in _LOOKUPS)
        used = n_experts_used / shape[2] if len(shape) == 3 else float(is_multiplied)
        matrices.append(Matrix(name, tensor.kind, tensor.n_elements, shape[0], is_multiplied, used))
    if unknown := {matrix.kind for matrix in matrices} - WEIGHT_TYPES.keys():
        raise ModelError(
            f"{path.name} has matrices of {', '.join(unknown)}, which the installed gguf package "
            "does not support: update it"
        )
    if any(matrix.kind not in FLOATS for matrix in matrices):  # its float matrices were left so for quality
        matrices = [matrix for matrix in matrices if matrix.kind not in FLOATS]
    return matrices


def _requantization(path: Path, matrices: list[Matrix], targets: Mapping[str, str]) -> Requantization:
    final = {matrix.name: targets.get(matrix.name, matrix.kind) for matrix in matrices}
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        sizes[final[matrix.name]] += matrix.n_elements
    # llama.cpp takes overrides only beside a quantised default type
    main = max(sizes, key=lambda kind: (kind not in FLOATS, sizes[kind]), default="Q8_0")
    if main in FLOATS and len(sizes) > 1:
        main = "Q8_0"
    return Requantization(
        source=path,
        changes={m.name: (m.kind, final[m.name]) for m in matrices if final[m.name] != m.kind},
        default=_file_type(path, main),
        overrides={name: kind for name, kind in final.items() if kind != main},
        n_bytes=path.stat().st_size + sum(_n_bytes(m, final[m.name]) - _n_bytes(m, m.kind) for m in matrices),
    )


def _file_type(path: Path, main: str) -> str:
    """The file type of a file with mostly this type: the source's own, like Q4_K_S, if that fits."""
    own = FILE_TYPES.get(read_header(path).metadata.get("general.file_type", -1), "")
    return own if own == main or own.startswith(f"{main}_") else _MAIN_FILE_TYPES.get(main, main)


def _n_bytes(matrix: Matrix, kind: str) -> int:
    block, n_bytes = _block(kind)
    if matrix.n_columns % block:  # llama.cpp takes a larger type
        return matrix.n_elements * 2
    return matrix.n_elements // block * n_bytes


def _block(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    _, weights, n_bytes = WEIGHT_TYPES[kind]
    return weights, n_bytes


def requantize(plan: Requantization, target: Path, *, overwrite: bool = False, written: Written | None = None) -> Path:
    """Writes the model and returns `target`, which is complete or unchanged, even if this is interrupted or killed.

    `overwrite`: replace a file that exists. Raises `ModelError`.
    """
    check_target(plan, target, overwrite=overwrite)
    try:
        with part_folder(Path(os.path.realpath(target)).parent) as folder:
            part = folder / target.name
            _run_child(Job(str(plan.source), str(part), plan.default, plan.overrides), written)
            replace_file(part, target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def check_target(plan: Requantization, target: Path, *, overwrite: bool) -> None:
    """Raises `ModelError` if the result cannot be written there, or is too large for this machine."""
    folder, needed = check_path(target).parent, plan.n_bytes
    if not folder.is_dir():
        raise ModelError(f"cannot write {target.name}: folder {folder}/ not found")
    if any(is_same_file(target, part) for part in model_parts(plan.source)):
        raise ModelError(f"{target} is the model itself; choose another file with --output")
    if is_special(target):
        raise ModelError(f"{target} is not a regular file; choose another file with --output")
    if target.is_dir() or (target.exists() and not overwrite):
        raise ModelError(
            f"{target} already exists; choose another file with --output, or use --overwrite to replace it"
        )
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{target.name} takes {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free in {folder}/"
        )
    if (memory := psutil.virtual_memory().total) < needed:
        raise ModelError(
            f"{target.name} would take {needed / 1e9:.1f} GB, more than this machine's memory ({memory / 1e9:.1f} GB)"
        )


def _run_child(job: Job, written: Written | None) -> None:
    command = child_processes.child_command("cppbatch.llama.quantize_child")
    with (
        tempfile.TemporaryFile() as errors,
        child_processes.start(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors) as child,
    ):
        try:
            assert child.stdin
            with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code says more
                child.stdin.write(msgspec.json.encode(job))
                child.stdin.close()
            while (code := _wait(child)) is None:
                if written and (part := Path(job.target)).exists():
                    written(part.stat().st_size)
        except BaseException:  # mostly Ctrl-C, after which `with` does not wait
            child.kill()
            child.wait()
            raise
        if code != 0:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
            raise ModelError(f"{Path(job.source).name} cannot be requantised (code {code}): {last[0]}")


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(0.1)
    except subprocess.TimeoutExpired:
        return None


# Hidden folders for files that are not complete yet. What a killed process has left is removed by the next one.


_HOST = re.sub(r"\W", "_", platform.node())


@contextlib.contextmanager
def part_folder(parent: Path) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed at the end. A file in it can be renamed into `parent`, being complete.

    Its name says which process of which machine it belongs to. Raises OSError.
    """
    remove_stale(parent)
    prefix = f".cppbatch-part-{_HOST}-{os.getpid()}-{int(psutil.Process().create_time())}-"
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def remove_stale(parent: Path) -> None:
    """Removes the part folders in `parent` of processes of this machine that have ended."""
    name = re.compile(rf"\.cppbatch-part-{_HOST}-(\d+)-(\d+)-\w+")
    for path in parent.glob(".cppbatch-part-*") if os.path.isdir(parent) else ():
        if (found := name.fullmatch(path.name)) and not _runs(int(found[1]), int(found[2])):
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int, created: int) -> bool:
    """Whether the process that began at this time still runs; another one may have its id."""
    try:
        began: float = psutil.Process(pid).create_time()
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
    return abs(began - created) < 60.0  # the times of processes follow changes of the clock
