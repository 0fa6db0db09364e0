"""Twenty JSON Schemas whose answers are short, for a model that knows nothing of them."""

from typing import Any

WORD = {"type": "string", "pattern": "^[a-z]{2,8}$"}
NAME = {"type": "string", "minLength": 1, "maxLength": 10}


def record(required: int | None = None, /, **properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema; all of its properties, or the first ones, are required."""
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names if required is None else names[:required],
        "additionalProperties": False,
    }


def numbers(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def listed(items: dict[str, Any], most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: list[dict[str, Any]] = [
    record(name=NAME, age=numbers(0, 120)),
    record(colour={"enum": ["red", "green", "blue"]}, is_dark={"type": "boolean"}),
    record(1, title=NAME, subtitle=NAME, pages=numbers(1, 900)),
    listed(numbers(-5, 5), most=4, least=2),
    listed(WORD, most=3, least=1),
    record(city=WORD, where=record(lat=numbers(-90, 90), lon=numbers(-180, 180))),
    {"anyOf": [record(error=WORD), record(value=numbers(0, 9))]},
    record(kind={"const": "circle"}, radius=numbers(1, 99)),
    record(born={"type": "string", "format": "date"}),
    record(
        tags=listed({"enum": ["new", "old", "sold"]}),
        price={"type": "integer", "multipleOf": 5, "maximum": 500, "minimum": 0},
    ),
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": record(1, value=numbers(0, 9), next={"anyOf": [{"type": "null"}, numbers(0, 9)]})},
    },
    record(answer={"type": ["boolean", "null"]}),
    record(phone={"type": "string", "pattern": r"^\+[1-9][0-9]{6,9}$"}),
    {"type": "array", "prefixItems": [WORD, numbers(0, 50)], "minItems": 2, "maxItems": 2, "items": False},
    record(
        items=listed(
            record(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{3}$"}, count=numbers(1, 20)), most=2, least=1
        )
    ),
    record(mail={"type": "string", "pattern": "^[a-z]{3,8}@[a-z]{3,6}\\.(com|org)$"}),
    {"enum": ["yes", "no", 42, None, {"maybe": True}]},
    record(a=record(b=record(c=record(d={"type": "boolean"})))),
    record(0, x=numbers(0, 1), y=numbers(0, 1), z=numbers(0, 1)),
    record(**{"näme ✓": NAME, "note": {"type": "string", "maxLength": 20}}),
]
