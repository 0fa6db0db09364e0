"""Numbers of JSON schemas that llguidance can follow. It reads them as float64, and counts with signed 64 bits.

Invariant: every number within the bounds returned is within those given, and every constant is the one given.
"""

import math
from typing import Any

from pdserve.base.errors import GrammarError
from pdserve.grammar.parts import is_whole

EXACT = 2**53  # up to here each whole number is a float64; beside it, its successor is not
LARGEST = 2**63 - 1024  # the largest float64 that llguidance takes as a bound of whole numbers
OPEN_ENDED = 10**18  # a bound of so many digits needs another one on its other side
LARGEST_NUMBER = 1e18  # the largest bound of numbers that need not be whole
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
Part = dict[str, Any]


def with_bounds(part: Part) -> Part:
    """Return a part of a schema with large bounds moved inwards, to the next ones that llguidance can follow.

    GrammarError if no number is left between them.
    """
    given = [part[key] for key in BOUNDS if _is_number(part.get(key))]
    if not any(abs(each) >= EXACT for each in given):
        return part
    rest = {key: value for key, value in part.items() if key not in BOUNDS}
    if not is_whole(part):
        return {**rest, **_of_numbers(part)}
    low, high = _range(part)
    least = None if low is None else max(_float_from(low), -LARGEST)
    most = None if high is None else min(-_float_from(-high), LARGEST)
    if least is not None and most is None and least >= OPEN_ENDED:
        most = LARGEST
    if most is not None and least is None and most <= -OPEN_ENDED:
        least = -LARGEST
    if least is not None and most is not None and least > most:
        shown = " and ".join(f"{key} {part[key]}" for key in BOUNDS if key in part)
        raise GrammarError(f"{shown} leave no whole number that a grammar can follow: float64 holds its bounds")
    return {**rest, **{key: each for key, each in (("minimum", least), ("maximum", most)) if each is not None}}


def with_constants(part: Part) -> Part:
    """Return a part of a schema whose large whole constants are bounds, which llguidance follows exactly.

    GrammarError for a constant that it cannot follow.
    """
    if "const" not in part and not isinstance(part.get("enum"), list):
        return part
    key = "const" if "const" in part else "enum"
    values = [part["const"]] if key == "const" else part["enum"]
    large = [value for value in values if _has_large(value)]
    if not large:
        return part
    for value in large:
        if not isinstance(value, int) or abs(value) > LARGEST or int(float(value)) != value:
            raise GrammarError(f"{key} has a whole number beyond {EXACT} that a grammar cannot follow exactly: {value}")
    ranges: list[Part] = [{"type": "integer", "minimum": value, "maximum": value} for value in large]
    others = [value for value in values if not _has_large(value)]
    either = [*ranges, *([{"enum": others}] if others else [])]
    rest = {name: value for name, value in part.items() if name != key}
    return with_any_of(rest, either)


def with_any_of(part: Part, branches: list[Any]) -> Part:
    """Return a part that also demands that one of some schemas matches."""
    if "anyOf" not in part:
        return {**part, "anyOf": branches}
    both = part.get("allOf")
    return {**part, "allOf": [*(both if isinstance(both, list) else ()), {"anyOf": branches}]}


def _has_large(value: object) -> bool:
    """Return whether a value is or holds a whole number that may be no float64."""
    match value:
        case int():
            return abs(value) > EXACT
        case list():
            return any(map(_has_large, value))
        case dict():
            return any(map(_has_large, value.values()))
        case _:
            return False


def _of_numbers(part: Part) -> Part:
    """Return the bounds of numbers that need not be whole."""
    made: Part = {}
    for key in BOUNDS:
        value = part.get(key)
        if value is None or not _is_number(value):
            continue
        is_low = key in ("minimum", "exclusiveMinimum")
        if value < -LARGEST_NUMBER and is_low:
            made["minimum"] = -LARGEST_NUMBER
        elif value > LARGEST_NUMBER and not is_low:
            made["maximum"] = LARGEST_NUMBER
        else:
            made[key] = value
    return made


def _range(part: Part) -> tuple[int | None, int | None]:
    """Return the lowest and the highest whole number within a part's bounds."""
    lows = [math.ceil(part["minimum"])] if _is_number(part.get("minimum")) else []
    lows += [math.floor(part["exclusiveMinimum"]) + 1] if _is_number(part.get("exclusiveMinimum")) else []
    highs = [math.floor(part["maximum"])] if _is_number(part.get("maximum")) else []
    highs += [math.ceil(part["exclusiveMaximum"]) - 1] if _is_number(part.get("exclusiveMaximum")) else []
    return max(lows, default=None), min(highs, default=None)


def _float_from(number: int) -> int:
    """Return the lowest whole float64 that is not under a number; one beyond LARGEST stays as it is."""
    if abs(number) > 2 * LARGEST:
        return number
    found = float(number)
    return int(found if int(found) >= number else math.nextafter(found, math.inf))


def _is_number(value: object) -> bool:
    """Return whether a bound is one. A whole number of any length is."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
