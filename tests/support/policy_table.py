"""The table of a policy's fields in docs/scale.md, made from the JSON Schema. Run as a script, it prints the table."""

import json
from collections.abc import Iterator
from typing import Any

from pdserve.autoscaler.schema import json_schema
from pdserve.base.yaml_models import in_units

Part = dict[str, Any]
DOCUMENT: Part = json.loads(json_schema())


def rows() -> Iterator[str]:
    """Return the table's lines."""
    yield "| field | values | default | what it means |"
    yield "|---|---|---|---|"
    yield from _fields(DOCUMENT, "")


def _fields(part: Part, where: str) -> Iterator[str]:
    for key, described in part["properties"].items():
        field, name = _resolved(described), f"{where}{key}"
        item = _resolved(field.get("items", {}))
        if name == "pools.decode":
            continue  # as the other pool
        if "oneOf" in field:
            yield from _actuators(field["oneOf"])
        elif "properties" in field:
            yield from _fields(field, f"{name.replace('pools.prefill', 'pools.*')}.")
        elif "properties" in item:
            yield _row(name, "list", _default(part, key, described), field["description"])
            if ".scaleDown." not in name:
                yield from _fields(item, f"{name.replace('.scaleUp.', '.*.')}[].")
        else:
            yield _row(name, _values(field), _default(part, key, described), field["description"])


def _actuators(references: list[Part]) -> Iterator[str]:
    for each in map(_resolved, references):
        own = dict(each["properties"])
        kind = own.pop("kind")
        yield _row("actuator.kind", f"`{kind['const']}`", "", kind["description"])
        yield from _fields({**each, "properties": own}, "actuator.")


def _row(name: str, values: str, default: str, meaning: str) -> str:
    return f"| `{name}` | {values} | {default} | {meaning} |"


def _resolved(part: Part) -> Part:
    found = DOCUMENT["$defs"].get(part.get("$ref", "").rpartition("/")[2], {})
    return {**found, **part}


def _is_duration(part: Part) -> bool:
    return any("pattern" in each and "h|d" in each["pattern"] for each in part.get("anyOf", ()))


def _values(part: Part) -> str:
    if "const" in part or "enum" in part:
        return ", ".join(f"`{each}`" for each in part.get("enum", [part.get("const")]))
    if _is_duration(part):
        return f"duration, {_limits(part['anyOf'][0], duration=True)}"
    if "anyOf" in part:
        return _values(part["anyOf"][0])
    if part["type"] == "array":
        return f"list of {_values(part['items'])}"
    if part["type"] in {"integer", "number"}:
        return _limits(part, duration=False)
    return {"boolean": "`true`, `false`", "string": "text", "object": "name and number"}[part["type"]]


def _limits(part: Part, *, duration: bool) -> str:
    def shown(limit: float) -> str:
        return (in_units(limit) or "") if duration else f"{limit:,.12g}"

    low = f"above {shown(part['exclusiveMinimum'])}" if "exclusiveMinimum" in part else shown(part["minimum"])
    high = f"below {shown(part['exclusiveMaximum'])}" if "exclusiveMaximum" in part else f"to {shown(part['maximum'])}"
    return f"{low} {high}"


def _default(part: Part, key: str, described: Part) -> str:
    if key in part.get("required", ()):
        return "required"
    default = described.get("default")
    if default is None or default == []:
        return ""
    if _is_duration(described):
        return in_units(default) or ""
    if isinstance(default, list) and isinstance(default[0], dict):
        return " or ".join(f"{each['value']} {each['type']} in {in_units(each['periodSeconds'])}" for each in default)
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else json.dumps(default).strip('"')


if __name__ == "__main__":
    print("\n".join(rows()))  # noqa: T201 - for the page
