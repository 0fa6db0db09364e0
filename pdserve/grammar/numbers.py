"""Numbers of JSON schemas that llguidance can follow. It reads them as float64, and counts with signed 64 bits.

Invariant: every number within the bounds returned is within those given.
"""

import math
from typing import Any

from pdserve.base.errors import GrammarError
from pdserve.grammar.parts import is_whole

EXACT = 2**53  # up to here each whole number is a float64; beside it, its successor is not
LARGEST = 2**63 - 1024  # the largest float64 that llguidance takes as a bound of whole numbers
LARGEST_NUMBER = 1e18  # the largest bound of numbers that need not be whole
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
Part = dict[str, Any]


def with_bounds(part: Part) -> Part:
    """Return a part of a schema with large bounds moved inwards, to the next ones that llguidance can follow.

    GrammarError if no number is left between them.
    """
    bounds = {key: part[key] for key in (*LOWER, *UPPER) if _is_number(part.get(key))}
    if not any(abs(each) >= EXACT for each in bounds.values()):
        return part
    if not is_whole(part):
        lows = {key: max(bounds[key], -LARGEST_NUMBER) for key in LOWER if key in bounds}
        return {**part, **lows, **{key: min(bounds[key], LARGEST_NUMBER) for key in UPPER if key in bounds}}
    least, most = -LARGEST, LARGEST
    for key, bound in bounds.items():
        if key in LOWER:
            least = max(least, _float_from(math.ceil(bound) if key == "minimum" else math.floor(bound) + 1))
        else:
            most = min(most, -_float_from(-(math.floor(bound) if key == "maximum" else math.ceil(bound) - 1)))
    if least > most:
        shown = " and ".join(f"{key} {bound}" for key, bound in bounds.items())
        raise GrammarError(f"{shown} leave no whole number that a grammar can follow: float64 holds its bounds")
    rest = {key: value for key, value in part.items() if key not in bounds}
    return {**rest, "minimum": least, "maximum": most}


def check_constants(part: Part) -> None:
    """Raise GrammarError for a constant of a part of a schema that llguidance would not write exactly."""
    for key in ("const", "enum"):
        if (number := _inexact_in(part.get(key))) is not None:
            raise GrammarError(
                f"{key} has a whole number beyond {EXACT} that a grammar cannot follow exactly: {number}"
            )


def _inexact_in(value: object) -> int | None:
    """Return a whole number that a value is or holds and that is no float64, or too large."""
    match value:
        case int() if abs(value) > LARGEST or int(float(value)) != value:
            return value
        case list():
            return next((found for each in value if (found := _inexact_in(each)) is not None), None)
        case dict():
            return _inexact_in([*value.values()])
        case _:
            return None


def _float_from(number: int) -> int:
    """Return the lowest whole float64 that is not under a number; one beyond LARGEST stays as it is."""
    if abs(number) > LARGEST:
        return number
    found = float(number)
    return int(found if int(found) >= number else math.nextafter(found, math.inf))


def _is_number(value: object) -> bool:
    """Return whether a bound is one. A whole number of any length is."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
