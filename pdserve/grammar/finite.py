"""Whether a JSON Schema that refers to itself describes any finite value.

Each part of a schema either does, or not, by what its own parts do. Where they depend on each other in a circle, a part
does only if that follows without assuming it: the least fixed point. References that lead nowhere, and keywords not
looked at here, are left to who compiles the schema.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_ALTERNATIVES = ("anyOf", "oneOf")


def describes_something_finite(schema: Schema) -> bool:
    """Return whether some finite value may match a schema."""
    parts = {id(part): part for part in _reachable(schema, schema)}
    in_order = list(reversed(parts.values()))  # inner parts mostly come before outer ones
    finite: set[int] = set()
    num_before = -1
    while num_before < len(finite):
        num_before = len(finite)
        for part in in_order:
            if id(part) not in finite and _is_finite(part, schema, finite):
                finite.add(id(part))
    return id(schema) in finite


def _is_finite(part: Schema, root: Schema, finite: set[int]) -> bool:
    """Return whether a part describes something finite, given those of which that is known."""

    def holds(inner: object) -> bool:
        return inner is not False and (not isinstance(inner, dict) or id(inner) in finite)

    target = _target(part, root)
    if not holds(target) or not all(map(holds, _listed(part, "allOf"))):
        return False
    if any(_listed(part, key) and not any(map(holds, _listed(part, key))) for key in _ALTERNATIVES):
        return False
    if "enum" in part or "const" in part:
        return True
    kinds = part.get("type", "string")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(
        all(map(holds, _needed_properties(part)))
        if kind == "object"
        else all(map(holds, _needed_items(part)))
        if kind == "array"
        else True
        for kind in kinds
    )


def _reachable(schema: Schema, root: Schema) -> Iterator[Schema]:
    seen: set[int] = set()
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [_target(part, root), *_needed_properties(part), *_needed_items(part)]
        for key in ("allOf", *_ALTERNATIVES):
            waiting += _listed(part, key)


def _needed_properties(part: Schema) -> list[object]:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(required, list):
        return []
    properties = properties if isinstance(properties, dict) else {}
    others = part.get("additionalProperties", True)
    return [properties.get(name, others) for name in required if isinstance(name, str)]


def _needed_items(part: Schema) -> list[object]:
    least = part.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return []
    first = _listed(part, "prefixItems")
    return first[:least] + ([part.get("items", True)] if least > len(first) else [])


def _listed(part: Schema, key: str) -> list[object]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _target(part: Schema, root: Schema) -> object:
    """Return what a reference within the schema leads to, or True where there is none."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: object = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
