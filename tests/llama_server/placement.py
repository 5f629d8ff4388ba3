"""Compares where llama-server and cppbatch put the tensors and cells of a model with the same flags.

Two RPC workers of this machine are the devices RPC0 and RPC1. llama.cpp's log says where a program puts what.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cppbatch.cluster.rpc_server_process import free_port
from cppbatch.models.file_header import read_header
from tests.support import tiny_models
from tests.support.rpc_workers import RpcWorker

_READY = re.compile(r"llama_server: model loaded|ready at http")
_MODEL = re.compile(r"loaded meta data .* tensors from (\S+) \(version")
_LAYER = re.compile(r"load_tensors: layer\s+(\d+) assigned to device (\S+),")
_TENSOR = re.compile(r"create_tensor: loading tensor (\S+)")
_OVERRIDDEN = re.compile(r"tensor (\S+) \(\d+ MiB \S+\) buffer type overridden to (\S+)")
_CELLS = re.compile(r"llama_kv_cache: layer\s+(\d+): dev = (\S+)")
_WEIGHTS = re.compile(r"load_tensors:\s+(\S+) model buffer size = +([\d.]+) MiB")
_OF_LAYER = re.compile(r"blk\.(\d+)\.")
_SECONDS = 60


class Line(NamedTuple):
    """A command line. {rpc1} stands for llama.cpp's name of the second worker's buffers."""

    model: str
    flags: str
    draft: str = ""
    different: str = ""
    """Why cppbatch puts something elsewhere."""


LINES = (
    Line("experts", ""),
    Line("experts", "-ngl auto"),
    Line("experts", "-ngl all"),
    Line("experts", "-ngl 3"),
    Line("experts", "-ngl 0"),
    Line("experts", "-cmoe"),
    Line("experts", "-ncmoe 2"),
    Line("experts", "-ncmoe 2 -ngl 3"),
    Line("experts", r"-ot blk\.1\.ffn_down=CPU,output=CPU"),
    Line("experts", "-ot exps={rpc1}"),
    Line("experts", "-cmoe -ot exps={rpc1}"),
    Line("experts", r"-ot blk\.[01]\..*exps={rpc1} -cmoe"),
    Line("experts", "-sm none"),
    Line("experts", "-sm none -mg 1 -ncmoe 1"),
    Line("experts", "-sm row"),
    Line("experts", "-sm tensor"),
    Line("experts", "-ts 3,1"),
    Line("experts", "-ts 1 -ncmoe 1"),
    Line("experts", "-ts 0/1 -ngl 4"),
    Line("experts", "-dev RPC1"),
    Line("experts", "-dev RPC1,RPC0 -ts 1,3"),
    Line("experts", "-dev none"),
    Line("experts", "-dev RPC7"),
    Line("experts", "-nkvo"),
    Line("experts", "-nkvo -cmoe -ngl 4"),
    Line("experts", "--no-op-offload --no-host -cmoe"),
    Line("experts", "-lm none -cmoe"),
    Line("experts", "-fit off -cmoe"),
    Line("dense", "-ncffn 2"),
    Line("dense", "-ncffn 3 -ngl 3 -ts 1,1"),
    Line("dense", "-ot attn=CPU -ncffn 1"),
    Line("dense", "-devd RPC1", "experts"),
    Line("dense", "-devd RPC1,RPC0 -ts 3,1 -ncmoed 2", "experts"),
    Line("dense", "-devd RPC0 -cmoed -ngld 3", "experts"),
    Line("dense", "-devd RPC0 -otd attn_q=CPU -ncffn 1", "experts"),
    Line("dense", "-devd none", "experts"),
    Line("dense", "-ngld 0", "experts"),
    Line("dense", "-dev none", "experts"),
    Line("dense", "", "experts", "a draft token over a network takes longer than it saves"),
)


@dataclass
class Placement:
    """Where llama.cpp has put the parts of a model."""

    tensors: dict[str, str] = field(default_factory=dict)
    cells: dict[int, str] = field(default_factory=dict)
    """By layer."""
    mib: dict[str, str] = field(default_factory=dict)
    """The sizes of the buffers of the weights."""


def read_placements(lines: Iterable[str]) -> dict[str, Placement]:
    """The placement of each model by its file's name; of a model that is loaded several times, the last one."""
    found: dict[str, Placement] = {}
    now, layers, names = Placement(), dict[int, str](), set[str]()
    for line in lines:
        if match := _MODEL.search(line):
            now, layers = Placement(), {}
            names = {tensor.name for tensor in read_header(Path(match[1])).tensors}  # the log has optional ones too
            found[Path(match[1]).stem] = now
        elif match := _LAYER.search(line):
            layers[int(match[1])] = match[2]
        elif (match := _TENSOR.search(line)) and match[1] in names:
            of_layer = _OF_LAYER.match(match[1])
            of_input = "CPU" if match[1].startswith("token_embd") else layers[max(layers)]
            now.tensors[match[1]] = layers[int(of_layer[1])] if of_layer else of_input
        elif match := _OVERRIDDEN.search(line):
            now.tensors[match[1]] = match[2]
        elif match := _CELLS.search(line):
            now.cells[int(match[1])] = match[2]
        elif match := _WEIGHTS.search(line):
            now.mib[match[1]] = match[2]
    return found


def run(folder: Path, llama_server: Path) -> int:
    """Prints each line with what is where in cppbatch, and what differs. Returns the number of surprises."""
    n_same, surprises = 0, 0
    for line, where, differs in compare(folder, llama_server):
        print(f"{line.model + (f' with {line.draft}' if line.draft else ''):20} {line.flags:32} {where}", flush=True)
        n_same += not differs
        if line.different:
            print(f"    {'differs' if differs else 'does not differ any more'}: {line.different}", flush=True)
        else:
            print("".join(f"    {each}\n" for each in differs), end="", flush=True)
        surprises += bool(differs) != bool(line.different)
    print(f"{n_same} of {len(LINES)} lines put the same tensors and cells on the same devices")
    return surprises


def compare(folder: Path, llama_server: Path) -> Iterator[tuple[Line, str, list[str]]]:
    """Yields each line with what is where in cppbatch, and what differs. Logs are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    models = {
        "experts": tiny_models.experts(folder / "experts.gguf"),
        "dense": tiny_models.echo(folder / "dense.gguf", n_layers=4),
    }
    programs = {"llama-server": [str(llama_server), "-lv", "5"], "cppbatch": _CPPBATCH}
    with RpcWorker() as one, RpcWorker() as two:
        for i, line in enumerate(LINES):
            flags = shlex.split(line.flags.replace("\\", "\\\\").format(rpc1=f"RPC0[{two.endpoint}]"))
            if line.draft:
                flags += ["-md", str(models[line.draft]), "--spec-type", "draft-simple"]
            command = ["-m", str(models[line.model]), "--rpc", f"{one.endpoint},{two.endpoint}", *_SIZES, *flags]
            there, here = (
                _run([*program, *command], folder / f"placement-{i}.{name}.log") for name, program in programs.items()
            )
            yield line, describe(here), [*differences(there, here)]


_CPPBATCH = [sys.executable, "-m", "cppbatch", "serve", "-v"]
_SIZES = ["-c", "512", "-np", "2", "-t", "1"]


def _run(command: list[str], log: Path) -> dict[str, Placement]:
    """The placements of a program; empty if it refuses the command line."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(free_port("127.0.0.1", 0))], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + _SECONDS
            while process.poll() is None and not _READY.search(log.read_text(errors="replace")):
                assert time.monotonic() < end, f"it does not get ready: {log}"
                time.sleep(0.05)
            is_ready = process.poll() is None
        finally:
            process.terminate()
            process.wait(_SECONDS)
    return read_placements(log.read_text(errors="replace").splitlines()) if is_ready else {}


def describe(found: dict[str, Placement]) -> str:
    """The number of tensors on each device, for each model."""
    counts = ((name, Counter(each.tensors.values())) for name, each in found.items())
    return (
        "; ".join(f"{name}: {', '.join(f'{n} {d}' for d, n in sorted(c.items()))}" for name, c in counts) or "refused"
    )


def differences(there: dict[str, Placement], here: dict[str, Placement]) -> Iterator[str]:
    """What is elsewhere in cppbatch (`here`) than in llama-server."""
    if there.keys() != here.keys():
        yield f"llama-server: {describe(there)}"
    for model in there.keys() & here.keys():
        for part in ("tensors", "cells", "mib"):
            one, other = getattr(there[model], part), getattr(here[model], part)
            for key in sorted({*one, *other}):
                if one.get(key) != other.get(key):
                    yield f"{model}, {part} {key}: {one.get(key)} in llama-server, {other.get(key)} here"
