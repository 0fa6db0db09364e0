"""Makes the definition of a policy as a custom resource from the policy's models, for chart and wheel."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pdserve.autoscaler.schema import Policy
from pdserve.kubernetes.objects import GROUP, KIND, PLURAL, VERSION

Schema = dict[str, Any]
FILE = Path(__file__).parents[1] / "pdserve" / "crds" / "autoscalingpolicies.yaml"
_KEPT = (
    *("type", "description", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)
_POOL = {
    "type": "object",
    "properties": {
        "replicas": {"type": "integer", "description": "Replicas that run or start."},
        "desired": {"type": "integer", "description": "Replicas that the pool should have."},
        "binds": {"type": "string", "description": "What keeps the pool from being smaller."},
    },
}


def definition() -> Schema:
    """Return the CustomResourceDefinition."""
    schema = Policy.model_json_schema()
    spec = _structural(schema, schema["$defs"])
    for key in ("apiVersion", "kind"):
        del spec["properties"][key]
        spec["required"].remove(key)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": KIND, "plural": PLURAL, "singular": KIND.lower(), "shortNames": ["asp"]},
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "properties": {"spec": spec, "status": _status()},
                        }
                    },
                }
            ],
        },
    }


def _columns() -> list[Schema]:
    return [
        {"name": "Prefill", "type": "integer", "jsonPath": ".status.prefill.replicas"},
        {"name": "Wanted", "type": "integer", "jsonPath": ".status.prefill.desired"},
        {"name": "Decode", "type": "integer", "jsonPath": ".status.decode.replicas"},
        {"name": "Wanted ", "type": "integer", "jsonPath": ".status.decode.desired"},
        {"name": "Valid", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Valid")].status'},
        {"name": "Mode", "type": "string", "jsonPath": ".spec.mode", "priority": 1},
        {"name": "Last decision", "type": "string", "jsonPath": ".status.lastDecision", "priority": 1},
    ]


def _status() -> Schema:
    text = {"type": "string"}
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": {
            **dict.fromkeys(("type", "status", "reason", "message"), text),
            "lastTransitionTime": {"type": "string", "format": "date-time"},
        },
    }
    return {
        "type": "object",
        "properties": {
            "observedGeneration": {"type": "integer", "format": "int64"},
            "prefill": _POOL,
            "decode": _POOL,
            "lastDecision": {"type": "string", "description": "The last orders, and why they were given."},
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return a JSON Schema as Kubernetes takes it: without references, alternatives, null and defaults."""
    if "$ref" in schema:
        found = _structural(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return found | ({"description": schema["description"]} if "description" in schema else {})
    if "oneOf" in schema:
        return _merged([_structural(each, definitions) for each in schema["oneOf"]], schema["description"])
    if "anyOf" in schema:
        return _alternatives(schema, definitions)
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        found["enum"] = [schema["const"]]
    for key in ("minimum", "maximum"):
        bound = schema.get(f"exclusive{key.capitalize()}")
        if bound is not None:
            found |= {key: bound, f"exclusive{key.capitalize()}": True}
    if "properties" in schema:
        found["properties"] = {key: _structural(each, definitions) for key, each in schema["properties"].items()}
        found["required"] = list(schema.get("required", ()))
    for values in _values(schema):
        found["additionalProperties"] = _structural(values, definitions)
    if "items" in schema:
        found["items"] = _structural(schema["items"], definitions)
    return found


def _values(schema: Mapping[str, Any]) -> Iterator[Schema]:
    """Yield the schema of a map's values. Kubernetes drops all entries of a map without one, and takes no patterns."""
    if isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]
    yield from schema.get("patternProperties", {}).values()


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return one schema for what may also be null, and for durations: whole seconds, or a text with a unit."""
    about = {"description": schema["description"]} if "description" in schema else {}
    options = [_structural(each, definitions) for each in schema["anyOf"] if each.get("type") != "null"]
    if len(options) == 1:
        return options[0] | about
    return {"x-kubernetes-int-or-string": True, **about}


def _merged(options: list[Schema], description: str) -> Schema:
    """Return an object that may be any of these; the policy's own validation tells them apart."""
    properties: Schema = {}
    kinds: list[str] = []
    for each in options:
        kinds += each["properties"]["kind"]["enum"]
        properties |= each["properties"]
    properties["kind"] = {"type": "string", "enum": kinds}
    return {"type": "object", "description": description, "required": ["kind"], "properties": properties}


if __name__ == "__main__":
    FILE.write_text(yaml.safe_dump(definition(), sort_keys=False), encoding="utf-8")
