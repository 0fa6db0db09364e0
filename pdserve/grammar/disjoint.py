"""Whether two JSON schemas have no value in common, so that `oneOf` of them is `anyOf`.

Invariant: True is a proof. False says only that none was found. The work is bounded by FUEL.

A proof is by kinds of values: for each kind that both schemas allow there is a reason why no value of that kind matches
both. References are followed within the schema, and a value is seen as the schema that it alone matches.
"""

from collections.abc import Mapping
from math import ceil, floor, inf, isfinite
from typing import Any

from pdserve.grammar.parts import Schema, is_whole, listed, target

FUEL = 10_000  # comparisons of two schemas: some 70 ms of a thread
MAX_DEPTH = 32
KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_LOWER = (("minimum", False), ("exclusiveMinimum", True))  # the second is not in the range itself
_UPPER = (("maximum", False), ("exclusiveMaximum", True))
_LENGTHS = {  # of a kind: the keywords that bound it
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Prover:
    """Compares parts of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._fuel = FUEL

    def overlapping(self, branches: list[object]) -> tuple[int, int] | None:
        """Return the places of two branches that are not proven disjoint; None if all are."""
        for place, branch in enumerate(branches):
            for other in range(place):
                if not self.are_disjoint(branches[other], branch):
                    return other, place
        return None

    def are_disjoint(self, a: object, b: object, depth: int = 0) -> bool:
        """Return whether it is proven that no value matches both."""
        if a is False or b is False:
            return True
        self._fuel -= 1
        if self._fuel < 0 or depth > MAX_DEPTH or not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            return False
        if self._by_parts(a, b, depth) or self._by_parts(b, a, depth):
            return True
        mine, theirs = _values(a), _values(b)
        if mine is not None and theirs is not None:
            return set(map(_key, mine)).isdisjoint(map(_key, theirs))
        if mine is not None:
            return all(self._by_kind(_alone(value), b, depth) for value in mine)
        if theirs is not None:
            return all(self._by_kind(_alone(value), a, depth) for value in theirs)
        return self._by_kind(a, b, depth)

    def _by_parts(self, a: Schema, b: Schema, depth: int) -> bool:
        """Return whether what `a` refers to or combines is disjoint from `b`."""
        if "$ref" in a and self.are_disjoint(target(a, self._root), b, depth + 1):
            return True
        if any(self.are_disjoint(part, b, depth + 1) for part in listed(a, "allOf")):
            return True
        alternatives = [parts for key in ("anyOf", "oneOf") if (parts := listed(a, key))]
        return any(all(self.are_disjoint(part, b, depth + 1) for part in parts) for parts in alternatives)

    def _by_kind(self, a: Schema, b: Schema, depth: int) -> bool:
        return all(self._has_reason(kind, a, b, depth) for kind in _kinds(a) & _kinds(b))

    def _has_reason(self, kind: str, a: Schema, b: Schema, depth: int) -> bool:
        """Return whether no value of a kind matches both."""
        if kind == "number":
            return _are_apart(a, b)
        if kind not in _LENGTHS:
            return False
        low, high = _LENGTHS[kind]
        if max(_number(each, low, 0) for each in (a, b)) > min(_number(each, high, inf) for each in (a, b)):
            return True
        if kind == "object":
            names = {name for each in (a, b) for name in listed(each, "required") if isinstance(name, str)}
            return any(self.are_disjoint(_property(a, name), _property(b, name), depth + 1) for name in sorted(names))
        if kind == "array":
            num_items = max(_number(each, "minItems", 0) for each in (a, b))
            num_named = max(len(listed(each, "prefixItems")) for each in (a, b)) + 1
            places = range(int(min(num_items, num_named)))
            return any(self.are_disjoint(_item(a, place), _item(b, place), depth + 1) for place in places)
        return False


def _values(schema: Schema) -> list[Any] | None:
    """Return the only values that may match, None if any may."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _key(value: object) -> object:
    """Return what is equal for values that JSON Schema holds equal: 1 and 1.0 are, true and 1 are not."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(each)) for name, each in value.items()))
    return (_kind_of(value), value)


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _alone(value: object) -> Schema:
    """Return a schema that this value matches, and as few others as `_has_reason` can tell."""
    kind = _kind_of(value)
    match value:
        case bool() | None:
            return {"type": kind}
        case int() | float():
            return {"type": kind, "minimum": value, "maximum": value}
        case str():
            return {"type": kind, "minLength": len(value), "maxLength": len(value)}
        case list():
            items = [{"const": each} for each in value]
            return {"type": kind, "prefixItems": items, "minItems": len(value), "maxItems": len(value)}
        case dict():
            properties = {name: {"const": each} for name, each in value.items()}
            return {"type": kind, "properties": properties, "required": list(value), "additionalProperties": False}
        case _:
            return {}


def _kinds(schema: Schema) -> set[str]:
    """Return the kinds of values that may match."""
    names = schema.get("type")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list):
        return set(KINDS)
    return {"number" if name == "integer" else str(name) for name in names}


def _are_apart(a: Schema, b: Schema) -> bool:
    """Return whether no number is within the bounds of both."""
    low = max((_number(each, key, -inf), is_open) for each in (a, b) for key, is_open in _LOWER)
    high = min((_number(each, key, inf), not is_open) for each in (a, b) for key, is_open in _UPPER)
    if not (is_whole(a) or is_whole(b)):
        return low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1]))
    least = low[0] if not isfinite(low[0]) else floor(low[0]) + 1 if low[1] else ceil(low[0])
    most = high[0] if not isfinite(high[0]) else floor(high[0]) if high[1] else ceil(high[0]) - 1
    return least > most


def _number(schema: Schema, key: str, default: float) -> float:
    value = schema.get(key)
    return default if isinstance(value, bool) or not isinstance(value, int | float) else value


def _property(schema: Schema, name: str) -> object:
    """Return what the value of a property has to match."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _item(schema: Schema, place: int) -> object:
    first = listed(schema, "prefixItems")
    return first[place] if place < len(first) else schema.get("items", True)
