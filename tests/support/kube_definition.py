"""What an API server does with resources that have a definition: it drops unknown fields, and refuses bad values."""

from typing import Any

from jsonschema import Draft4Validator  # in which bounds are as in Kubernetes

OWN = ("apiVersion", "kind", "metadata")  # fields of every object, which no definition describes


class Definition:
    """The schema of a definition's one version."""

    def __init__(self, definition: dict[str, Any]) -> None:
        (version,) = definition["spec"]["versions"]
        self._schema = version["schema"]["openAPIV3Schema"]
        self._validator = Draft4Validator(self._schema)

    def pruned(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return what a server keeps of an object."""
        return {key: value for key, value in item.items() if key in OWN} | _pruned(item, self._schema)

    def problems(self, item: dict[str, Any]) -> list[str]:
        """Return what the definition does not allow, each with its place."""
        errors = self._validator.iter_errors(item)
        return [f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in errors]


def _pruned(value: Any, schema: dict[str, Any]) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_pruned(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    schemas = {key: known.get(key, others) for key in value}
    return {key: _pruned(each, schemas[key]) for key, each in value.items() if schemas[key] is not None}
