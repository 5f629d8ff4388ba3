"""Long randomised tests: some of their cases in each run of the ring, more every night, all of them with -m soak."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_REPEATABLE = settings(
    deadline=None, derandomize=True, database=None, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)

Test = Callable[..., None]


def cases(*, ring: int, soak: int, nightly: int | None = None) -> pytest.MarkDecorator:
    """The argument `n_cases` of a test: `ring`; `nightly` with -m nightly; `soak` with -m soak."""
    more = [] if nightly is None else [pytest.param(nightly, marks=pytest.mark.nightly)]
    return pytest.mark.parametrize("n_cases", [ring, *more, pytest.param(soak, marks=pytest.mark.soak)])


def seeds(*, ring: int, nightly: int) -> pytest.MarkDecorator:
    """The argument `seed`: a test for each of range(ring); with -m nightly, the others of range(nightly)."""
    more = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(ring, nightly)]
    return pytest.mark.parametrize("seed", [*range(ring), *more])


def randomised(
    *, ring: int, soak: int, nightly: int | None = None, **drawn: st.SearchStrategy[Any]
) -> Callable[[Test], Test]:
    """As hypothesis' `given`, with the same `ring` examples in each run, and as many as `cases` says in others."""

    def decorate(check: Test) -> Test:
        def test(n_cases: int, **others: Any) -> None:
            settings(_REPEATABLE, max_examples=n_cases)(given(**drawn)(check))(**others)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        others = [its for name, its in signature(check).parameters.items() if name not in drawn]
        named = [its.name for its in others if its.kind is not Parameter.VAR_KEYWORD]
        test.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.KEYWORD_ONLY) for name in [*named, "n_cases"]]
        )
        test.pytestmark = getattr(check, "pytestmark", [])  # type: ignore[attr-defined]
        found: Test = cases(ring=ring, soak=soak, nightly=nightly)(test)
        return found

    return decorate
