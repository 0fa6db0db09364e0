"""Strategies for values that a JSON schema accepts: of the keywords that the chart's schema has, others are refused."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Strategy = st.SearchStrategy[Any]

_KNOWN = {
    *("type", "properties", "required", "additionalProperties", "propertyNames", "dependencies", "not"),
    *("minProperties", "maxProperties", "items", "minItems", "maxItems", "uniqueItems", "enum", "const", "anyOf"),
    *("oneOf", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$ref", "$schema", "$defs", "description", "title", "default", "format", "discriminator"),
}
_NOT_YAML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")  # what no values can hold
_FEW = 3  # members of a list, and keys of a map


class Values:
    """Makes strategies of the parts of one schema."""

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._made = dict[int, Strategy]()

    def of(self, schema: Schema) -> Strategy:
        """Return a strategy for values of a part of the schema; one for each part, which is costly to make."""
        schema = self.resolved(schema)
        if id(schema) not in self._made:
            self._made[id(schema)] = self._make(schema)
        return self._made[id(schema)]

    def _make(self, schema: Schema) -> Strategy:
        assert schema.keys() <= _KNOWN, schema.keys() - _KNOWN
        if members := schema.get("anyOf") or schema.get("oneOf"):
            return st.one_of([self.of(each) for each in members])
        if "enum" in schema or "const" in schema:
            return st.sampled_from(schema.get("enum") or [schema["const"]])
        match schema["type"]:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                return _texts(schema["pattern"], schema.get("minLength", 0), schema.get("maxLength", 2**31))
            case "integer" | "number" as kind:
                return _numbers(schema, whole=kind == "integer")
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        raise AssertionError(f"{schema['type']}: unknown")

    def resolved(self, schema: Schema) -> Schema:
        """Return the schema that a reference leads to."""
        while "$ref" in schema:
            found: Any = self._root
            for step in schema["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            schema = found
        return schema

    def _array(self, schema: Schema) -> Strategy:
        items = self.resolved(schema["items"])
        if _is_open(items):
            return st.just([])
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", _FEW), max(least, _FEW))
        unique = {"unique_by": repr} if schema.get("uniqueItems") else {}
        return st.lists(self.of(items), min_size=least, max_size=most, **unique)  # type: ignore[arg-type]

    def _object(self, schema: Schema) -> Strategy:
        properties = {key: part for key, part in schema.get("properties", {}).items() if not self._is_open(part)}
        if not properties:
            return self._map(schema)
        required, optional = (
            set(schema.get("required", ())),
            sorted(properties.keys() - set(schema.get("required", ()))),
        )
        least = max(0, schema.get("minProperties", 0) - len(required))
        most = min(len(optional), schema.get("maxProperties", len(properties)) - len(required))
        parts = {key: st.deferred(lambda part=part: self.of(part)) for key, part in properties.items()}  # type: ignore[misc]

        def drawn(chosen: Iterable[str]) -> Strategy:
            keys = _closed({*required, *chosen}, schema.get("dependencies", {}))
            return st.fixed_dictionaries({key: parts[key] for key in sorted(keys)})

        sizes = st.lists(st.sampled_from(optional), unique=True, min_size=least, max_size=most) if most else st.just([])
        excluded = [set(each["required"]) for each in schema.get("not", {}).get("anyOf", [])]
        return sizes.flatmap(drawn).filter(lambda value: not any(value.keys() >= keys for keys in excluded))

    def _map(self, schema: Schema) -> Strategy:
        values = schema.get("additionalProperties", False)
        if not isinstance(values, dict):
            return st.just({})
        keys = (
            _texts(schema["propertyNames"]["pattern"], 0, 100) if "propertyNames" in schema else _texts(r"^\w+$", 1, 20)
        )
        return st.dictionaries(keys, self.of(values), min_size=schema.get("minProperties", 0), max_size=_FEW)

    def _is_open(self, schema: Schema) -> bool:
        return _is_open(self.resolved(schema))


def _is_open(schema: Schema) -> bool:
    """Whether anything is accepted, so that only Kubernetes knows what is right."""
    return schema.get("additionalProperties") is True and not schema.get("properties")


def _closed(keys: set[str], dependencies: dict[str, list[str]]) -> set[str]:
    found = keys.union(*(dependencies.get(key, []) for key in keys))
    return found if found == keys else _closed(found, dependencies)


@cache
def _texts(pattern: str, least: int, most: int) -> Strategy:
    whole = re.compile(pattern, re.ASCII)  # as Go reads it
    found = st.from_regex(whole, fullmatch=True)
    found = found.filter(lambda text: _NOT_YAML.search(text) is None)
    return found.filter(lambda text: least <= len(text) <= most and not (text.endswith("\n") and "$" in pattern))


def _numbers(schema: Schema, *, whole: bool) -> Strategy:
    step = schema.get("multipleOf", 1) if whole else 0
    if whole:
        least, most = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1), schema.get("maximum", 2**31 - 1)
        most = min(most, schema.get("exclusiveMaximum", most + 1) - 1)
        near = st.integers(-(-least // step), min(most, least + 16 * step) // step)
        return (near | st.integers(-(-least // step), most // step)).map(lambda count: count * step)
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0.0))
    most = schema.get("maximum", schema.get("exclusiveMaximum", 1e9))
    return st.floats(
        least,
        most,
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
        allow_nan=False,
        allow_subnormal=False,
    )
