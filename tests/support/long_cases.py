"""Cases of tests with parameters that `make test-long` alone runs."""

from collections.abc import Collection, Iterable

import pytest


def long(*cases: object) -> list[object]:
    """Mark cases. A tuple is the values of several parameters."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in cases]


def long_but(always: Collection[object], cases: Iterable[object]) -> list[object]:
    """Mark all cases but some."""
    return [case for each in cases for case in ([each] if each in always else long(each))]
