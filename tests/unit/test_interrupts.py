"""Signals that end a process as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cppbatch.interrupts import interrupt_on_termination, interrupts_deferred

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals have their default handlers, also if an earlier test has changed them."""
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_first_signal_is_an_interrupt_and_later_ones_do_not_stop_the_cleanup(name: str) -> None:
    interrupt_on_termination()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(getattr(signal, name))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)


def test_it_is_deferred_as_ctrl_c_is() -> None:
    seen = []

    def block() -> None:
        with interrupts_deferred() as is_pressed:
            signal.raise_signal(signal.SIGTERM)
            seen.append(is_pressed())

    interrupt_on_termination()
    with pytest.raises(KeyboardInterrupt):
        block()
    assert seen == [True]


def test_it_works_where_ctrl_c_is_ignored_and_leaves_other_handlers() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_on_termination()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
