"""What all parts of a policy file have in common: camelCase keys, durations, refusals."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PATTERN = r"^(\d+(\.\d+)?(ms|s|m|h|d))+$"


def key_of(name: str) -> str:
    """Return a field's key in a file. Attributes name their unit; durations in files carry it in their value."""
    return to_camel(name.removesuffix("_s"))


class Section(BaseModel):
    """A part of a policy. Files have its fields in camelCase, durations without their unit `_s`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=key_of, validate_by_name=True, validate_by_alias=True
    )


def seconds(given: Any) -> Any:  # noqa: ANN401 - whatever a file holds
    """Return the seconds of a duration such as "90s", "2m" or "1h30m"; what is no text is returned as it is."""
    if not isinstance(given, str):
        return given
    if not re.fullmatch(_PATTERN, given):
        raise ValueError("a duration is a number of seconds, or a text such as 500ms, 90s, 2m, 1h or 1h30m")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(given))


def in_units(duration_s: float | None) -> str | None:
    """Return a duration as a file would have it, such as 1h30m."""
    if not duration_s:
        return None if duration_s is None else "0s"
    parts, rest_ms = [], round(duration_s * 1000)
    for unit, unit_s in sorted(_UNIT_S.items(), key=lambda each: -each[1]):
        count, rest_ms = divmod(rest_ms, round(unit_s * 1000))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


class _Duration:
    """Lets a float be given as a text with units; belongs behind the float's limits."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(seconds, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.BeforeValidatorFunctionSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema["schema"]), {"type": "string", "pattern": _PATTERN}]}


DURATION = _Duration()
