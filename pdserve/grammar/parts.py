"""The parts of a JSON schema."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

Schema = Mapping[str, Any]
_IN_GRAMMAR = re.compile(r"%json\s*(?=\{)")  # begins a schema within a grammar

ONE, LIST, BY_NAME = "one", "list", "by name"
WITHIN = {  # keywords that hold schemas, and how
    **dict.fromkeys(
        ("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "additionalItems"), ONE
    ),
    **dict.fromkeys(("additionalItems", "unevaluatedItems", "contains", "not", "if", "then", "else"), ONE),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), BY_NAME),
}


def listed(part: Schema, key: str) -> list[Any]:
    """Return what a keyword lists; nothing where its value is no list."""
    value = part.get(key)
    return value if isinstance(value, list) else []


def target(part: Schema, root: Schema) -> object:
    """Return what a reference within the schema leads to, or True if there is no reference."""
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


def schemas_in(grammar: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the schemas within a grammar, each with its beginning and end; broken ones are left to llguidance."""
    for begin in _IN_GRAMMAR.finditer(grammar):
        with suppress(ValueError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(grammar, begin.end())
            yield begin.end(), end, schema


def is_whole(schema: Schema) -> bool:
    """Return whether a schema allows whole numbers alone."""
    names = schema.get("type")
    return names == "integer" or (isinstance(names, list) and "integer" in names and "number" not in names)
