"""A schema is refused only where no finite value matches it."""

from typing import Any

import pytest

from pdserve.grammar.finite import is_matched

NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        NODE,  # the next may be left out
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "minItems": 2, "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        {**NODE, "type": ["object", "null"], "required": ["next"]},
        {"anyOf": [{"$ref": "#"}, {"const": 1}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
        {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1, "items": {"$ref": "#"}},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://elsewhere"},
        {"type": 5, "required": 7, "anyOf": {}},
        {"anyOf": [{}], "$ref": "#/anyOf/" + "1" * 4301},  # more digits than int() takes
    ],
)
def test_finite(schema: dict[str, Any]) -> None:
    assert is_matched(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {**NODE, "required": ["next"]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {**NODE, "required": ["next"]}]},
        {"allOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
    ],
)
def test_endless(schema: dict[str, Any]) -> None:
    assert not is_matched(schema)


def test_a_long_chain_of_references_is_followed_at_once() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    assert is_matched({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {"type": "null"}}})
    assert not is_matched({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {"$ref": "#"}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["x"], "additionalProperties": False},
        {"type": "object", "required": ["x"], "properties": {"x": False}},
        {"type": "array", "minItems": 1, "items": False},
        {"anyOf": [False, {"allOf": [{"type": "null"}, False]}]},
        {**NODE, "required": ["x"], "additionalProperties": False},
    ],
)
def test_false_is_required(schema: dict[str, Any]) -> None:
    assert not is_matched(schema)
