"""llama-server's flags, from the page of the pinned version, sorted: what each one does in `cppbatch serve`."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cppbatch.cli.llama_server_flags import PRESETS, REFUSED, RENAMED, UNNEEDED
from cppbatch.cli.serve_command import serve
from tests.support.llama_cpp_source import server_readme

_ROW = re.compile(r"\| `(-[^`]+)` \| (.*) \|")
_NAMES = re.compile(r"(?:^|, +)(--?[A-Za-z][\w.-]*)")
_ENV = re.compile(r"\(env: (\w+)\)")
_HELP_NAMES = ("-h", "--help", "--usage")


@dataclass(frozen=True)
class ServerFlag:
    """A row of llama-server's page."""

    names: tuple[str, ...]
    env: str
    """Its variable; "": none."""


@dataclass(frozen=True)
class Sorted:
    """The rows by what they do here."""

    same: list[ServerFlag]
    ignored: dict[str, list[ServerFlag]]
    """By the reason."""
    refused: dict[str, list[ServerFlag]]
    unknown: list[ServerFlag]
    """Rows with a name that `cppbatch serve` does not know."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many do the same, are ignored, and are refused."""
        return len(self.same), sum(map(len, self.ignored.values())), sum(map(len, self.refused.values()))


def read_flags(page: str) -> list[ServerFlag]:
    """The flags in llama-server's page."""
    found = []
    for line in page.splitlines():
        if row := _ROW.match(line):
            env = _ENV.search(row[2])
            found.append(ServerFlag(tuple(_NAMES.findall(row[1])), env[1] if env else ""))
    return found


def names_in_help(llama_server: Path) -> set[str]:
    """The names of flags in the help of a llama-server."""
    shown = subprocess.run([llama_server, "--help"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if line.startswith("-") and not line.startswith("---")]
    return {name for line in lines for name in _NAMES.findall(line)}


def variables() -> set[str]:
    """llama.cpp's variables that `cppbatch serve` reads."""
    of_options = [option.envvar for option in serve.params]
    return {name for each in of_options for name in ([each] if isinstance(each, str) else each or [])}


def sort_flags(flags: list[ServerFlag]) -> Sorted:
    """A row is refused or ignored if one of its names is; the others do the same."""
    refused = {name: flag.reason for flag in REFUSED for name in flag.names.split()}
    ignored = {name: flag.instead for flag in UNNEEDED for name in flag.names.split()}
    options = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    same = {*options, *RENAMED, *PRESETS, *_HELP_NAMES} - refused.keys() - ignored.keys()
    found = Sorted([], defaultdict(list), defaultdict(list), [])
    for flag in flags:
        names = set(flag.names)
        if not names <= same | refused.keys() | ignored.keys():
            found.unknown.append(flag)
        elif named := [name for name in flag.names if name in refused]:
            found.refused[refused[named[0]]].append(ServerFlag(tuple(named), flag.env))  # without --no-agent
        elif names <= same:
            found.same.append(flag)
        else:
            found.ignored[next(ignored[name] for name in flag.names if name in ignored)].append(flag)
    return found


def run(llama_server: Path | None) -> bool:
    """Prints the tables of docs/llama-server.md, and what llama-server's page and the help of `llama_server` do not
    have in common. Returns whether all flags are known."""
    flags = read_flags(server_readme())
    found = sort_flags(flags)
    print(page_table(found), end="")
    for flag in found.unknown:
        print(f"unknown: {' '.join(flag.names)}")
    in_page = {name for flag in flags for name in flag.names}
    different = in_page ^ names_in_help(llama_server) if llama_server else set()
    for name in sorted(different):
        print(f"only in {'its page' if name in in_page else 'its help'}: {name}")
    return not (found.unknown or different)


def page_table(found: Sorted) -> str:
    """The flags by what they do, as docs/llama-server.md has them."""
    n_same, n_ignored, n_refused = found.counts
    n_all = n_same + n_ignored + n_refused
    rows = [
        f"Of the {n_all} flags of the pinned llama-server, {n_same} do the same, {n_ignored} are accepted and ignored, "
        f"and {n_refused} are refused.",
        "",
        "| the same |",
        "|---|",
        f"| {', '.join(f'`{flag.names[0]}`' for flag in found.same)} |",
        "",
        "| accepted and ignored | what applies |",
        "|---|---|",
        *_by_reason(found.ignored),
        "",
        "| refused | why |",
        "|---|---|",
        *_by_reason(found.refused),
    ]
    return "\n".join(rows) + "\n"


def _by_reason(found: dict[str, list[ServerFlag]]) -> list[str]:
    return [
        f"| {', '.join(f'`{name}`' for flag in flags for name in flag.names)} | {why} |" for why, flags in found.items()
    ]
