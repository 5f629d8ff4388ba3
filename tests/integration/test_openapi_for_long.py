"""`test_openapi` with requests of any kind to every route, right and wrong: some 16,000."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.integration.test_openapi import EXAMPLES, Case, check, schema_of, server, tame, without_given_fields
from tests.support.app_thread import AppThread
from tests.unit.test_openapi import DOCUMENT

__all__ = ["server"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

MANY = 300  # examples of each route

SLOWEST = 15.0  # seconds of an answer: 10 for a grammar that is too complex, and some for what runs beside it


@schema_of(DOCUMENT).parametrize()
@settings(max_examples=MANY, **EXAMPLES)
def test_answers_are_as_documented_for_long(case: Case, server: AppThread) -> None:
    assert check(case, server) < SLOWEST


@schema_of(without_given_fields(DOCUMENT)).include(method="POST").parametrize()
@settings(max_examples=MANY, **EXAMPLES)
def test_answers_to_a_good_prompt_with_any_options_are_as_documented_for_long(case: Case, server: AppThread) -> None:
    tame(case)
    assert check(case, server) < SLOWEST
