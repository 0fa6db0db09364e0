"""Whether two JSON schemas have no value in common, so that `oneOf` of them is `anyOf`.

Invariant: True is a proof. False says only that none was found. The work is bounded by FUEL.

Two schemas are disjoint if they allow no kind of value, or no constant, in common, or if both allow objects alone and a
property that one requires can have no value in both. References are followed within the schema.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.grammar.parts import Schema, listed, target

FUEL = 10_000  # comparisons of two schemas: some 70 ms of a thread
MAX_DEPTH = 32
KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Prover:
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
        common = _kinds(a) & _kinds(b)
        return not common or (common == {"object"} and self._by_property(a, b, depth))

    def _by_parts(self, a: Schema, b: Schema, depth: int) -> bool:
        """Return whether what `a` refers to or combines is disjoint from `b`."""
        if "$ref" in a and self.are_disjoint(target(a, self._root), b, depth + 1):
            return True
        if any(self.are_disjoint(part, b, depth + 1) for part in listed(a, "allOf")):
            return True
        alternatives = [parts for key in ("anyOf", "oneOf") if (parts := listed(a, key))]
        return any(all(self.are_disjoint(part, b, depth + 1) for part in parts) for parts in alternatives)

    def _by_property(self, a: Schema, b: Schema, depth: int) -> bool:
        """Return whether no value of a required property matches in both."""
        names = {name for each in (a, b) for name in listed(each, "required") if isinstance(name, str)}
        return any(self.are_disjoint(_property(a, name), _property(b, name), depth + 1) for name in sorted(names))


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


def _kinds(schema: Schema) -> set[str]:
    """Return the kinds of values that may match."""
    if (values := _values(schema)) is not None:
        return set(map(_kind_of, values))
    names = schema.get("type")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list):
        return set(KINDS)
    return {"number" if name == "integer" else str(name) for name in names}


def _property(schema: Schema, name: str) -> object:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
