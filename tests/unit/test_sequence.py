"""The status of a sequence: only changes of `TRANSITIONS` happen, each of them does, and one module makes them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

import cppbatch
from cppbatch import GenerationRequest
from cppbatch.engine.sequence import TRANSITIONS, Seq, SeqStatus
from tests.support.fakes import context_of, drain, fake_engine, greedy

ALL = {(old, new) for old, allowed in TRANSITIONS.items() for new in allowed}


def test_random_schedules_make_every_change_of_the_table_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[SeqStatus, SeqStatus]] = set()
    set_status = Seq._set_status

    def record(sequence: Seq, status: SeqStatus) -> None:
        old = sequence.status
        set_status(sequence, status)
        if status is not old:
            seen.add((old, status))

    monkeypatch.setattr(Seq, "_set_status", record)
    for seed in range(40):
        run_at_random(random.Random(seed))
    assert seen == ALL


def run_at_random(draw: random.Random) -> None:
    """Few cells, so that sequences are preempted; cancels, steps that are interrupted, memory that is not restored."""
    engine = fake_engine(
        n_ctx=48, n_parallel=3, sharing=draw.choice(("cells", "none")), swap_space=draw.choice((0, 1, 1024))
    )
    names = []
    for _ in range(80):
        action = draw.random()
        context_of(engine).fail_restore = draw.random() < 0.1
        if action < 0.3:
            prompt = [1] * draw.choice((1, 5, 20)) + [draw.randrange(9)]
            params = greedy(draw.randint(1, 20), guided_choice=draw.choice((None, ("abcabcabc", "abcddd"))))
            names.append(engine.add_request(prompt, params, priority=draw.choice((0, 1))))
        elif action < 0.4 and names:
            engine.cancel(draw.choice(names[-8:]))
        elif action < 0.43:
            engine.core.restart()
        else:
            engine.step()
    context_of(engine).fail_restore = False
    drain(engine)


def sequence() -> Seq:
    return Seq(GenerationRequest(id="a", prompt=[1]), np.ones(1, np.int32), max_new=1, seed=0, now=0.0)


def test_a_finished_sequence_stays_finished() -> None:
    ended = sequence()
    ended.finished()
    with pytest.raises(AssertionError, match="a cannot change from finished to waiting"):
        ended.restarted()
    assert ended.status is SeqStatus.FINISHED


def test_the_status_cannot_be_assigned() -> None:
    with pytest.raises(AttributeError):
        sequence().status = SeqStatus.DECODE  # type: ignore[misc]


def test_no_other_module_assigns_a_status() -> None:
    package = Path(cppbatch.__file__).parent
    assigned = re.compile(r"\.status\s*=\s*SeqStatus|\b_status\s*=\s*SeqStatus|\b_set_status\(")
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py") if assigned.search(path.read_text())}
    assert modules == {"engine/sequence.py"}
