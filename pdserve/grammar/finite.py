"""Whether some finite value may match a JSON schema."""

from collections.abc import Iterator

from pdserve.grammar.parts import Schema, listed, target

_ALTERNATIVES = ("anyOf", "oneOf")


def is_matched(schema: Schema) -> bool:
    """Return whether some finite value may match a schema, which may refer to itself.

    Whether a part of a schema describes something finite depends on its own parts. If parts depend on each other in a
    circle, they do only if that follows without assuming it: the least fixed point. References that lead nowhere, and
    keywords not looked at here, are left to llguidance.
    """
    in_order = list(_reachable(schema, schema))[::-1]  # inner parts mostly come before outer ones
    finite = set[int]()
    num_before = -1
    while num_before < len(finite):
        num_before = len(finite)
        for part in in_order:
            if id(part) not in finite and _is_finite(part, schema, finite):
                finite.add(id(part))
    return id(schema) in finite


def _is_finite(part: Schema, root: Schema, finite: set[int]) -> bool:
    """Return whether a part describes something finite, given the ids of parts that are known to."""

    def holds(inner: object) -> bool:
        return inner is not False and (not isinstance(inner, dict) or id(inner) in finite)

    if not holds(target(part, root)) or not all(map(holds, listed(part, "allOf"))):
        return False
    if any(listed(part, key) and not any(map(holds, listed(part, key))) for key in _ALTERNATIVES):
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
        waiting += [target(part, root), *_needed_properties(part), *_needed_items(part)]
        for key in ("allOf", *_ALTERNATIVES):
            waiting += listed(part, key)


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
    first = listed(part, "prefixItems")
    return first[:least] + ([part.get("items", True)] if least > len(first) else [])
