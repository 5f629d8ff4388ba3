"""`python -m tests.archs.child FILE LAYOUT CHECK...`: a line of JSON when a check starts, and one with its finding."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

from cppbatch.config import KvLayout
from cppbatch.errors import CppBatchError
from tests.archs.checks import CHECKS, Subject


def main(file: str, layout: KvLayout, *names: str) -> None:
    say(start="load")
    try:
        subject = Subject(Path(file), layout)
    except CppBatchError as error:
        say(check="load", word="refused", detail=str(error))
        return
    model = subject.model
    say(check="load", word="yes", memory=kind_of_memory(subject))
    for name in names:
        say(start=name)
        began = time.monotonic()
        try:
            found = CHECKS[name](subject)
        except Exception as error:
            traceback.print_exc()
            say(check=name, word="error", detail=f"{type(error).__name__}: {error}")
        else:
            say(check=name, word=found.word, detail=found.detail, seconds=round(time.monotonic() - began, 2))
    model.close()


def kind_of_memory(subject: Subject) -> str:
    model = subject.model
    if not model.is_recurrent:
        return f"window {model.n_swa}" if model.n_swa else "cells"
    has_cells = any(each.kind == "cells" for each in subject.buffers)
    return " + ".join(["states", *["cells"] * has_cells, *[f"window {model.n_swa}"] * bool(model.n_swa)])


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


main(sys.argv[1], "unified" if sys.argv[2] == "unified" else "per-sequence", *sys.argv[3:])
