"""Reads pydantic models from YAML or JSON files and from flags. Errors name file, line, field and limit.

`Section` is for files with camelCase keys, and with durations such as 1h30m.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from pdserve.base.errors import ConfigError, echo

Model = TypeVar("Model", bound=BaseModel)
Place = tuple[int | str, ...]

_TAG = "tag:yaml.org,2002:"
_OTHERS = ("int", "float", "timestamp", "value")  # tags that YAML 1.2 has not, or gives to other texts than 1.1


class FieldError(ValueError):
    """A validator's error about a field inside the model that it validates."""

    def __init__(self, place: Place, problem: str) -> None:
        super().__init__(f"{_dotted(place)}: {problem}")
        self.place = place
        self.problem = problem


def read_model(cls: type[Model], path: Path | None, flags: Mapping[str, object] | None = None) -> Model:
    """Read a model by its fields' aliases. Flags of the same names override the file.

    ConfigError names for each fault the flag, unless it is of several, or the file and line, the field, the limit and
    the value. The value is left out if the model's configuration has `hide_input_in_errors`. With flags the file may be
    empty or missing.
    """
    node, content = (None, None) if path is None else _parse(path)
    if flags is not None and (content is None or isinstance(content, dict)):
        content = {**(content or {}), **flags}
    try:
        return cls.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        of_flags, of_file = [], []
        for fault in sorted(error.errors(include_url=False), key=_rank):
            if path is None or (fault["loc"] and fault["loc"][0] in (flags or ())):
                flag = _dotted(_place(fault)).replace("_", "-")
                of_flags.append(f"--{flag}: {_problem(cls, fault)}" if flag else _problem(cls, fault))
            else:
                of_file.append(_explain(cls, node, fault))
        shown = [*of_flags, f"{path}, {'; '.join(of_file)}"] if of_file else of_flags
        raise ConfigError("; ".join(shown)) from error


def parsed_json(given: object) -> object:
    """Return what a flag's text says in JSON; what a file has is no text, and returned as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise FieldError((), f"is no JSON: {error}") from error


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known key, or an empty text."""
    close = get_close_matches(key, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does: 12:30 and = are texts, 1e-3 is a number. Refuses duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML copies it where a subclass adds to it
        first: [(tag, pattern) for tag, pattern in kept if tag.removeprefix(_TAG) not in _OTHERS]
        for first, kept in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value}: is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def _parse(path: Path) -> tuple[yaml.Node | None, object]:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: {error.problem or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _rank(fault: ErrorDetails) -> int:
    """Put causes first: a misspelt key often means that another one is missing."""
    return {"extra_forbidden": 0, "missing": 2}.get(fault["type"], 1)


def _explain(cls: type[BaseModel], node: yaml.Node | None, fault: ErrorDetails) -> str:
    place, context = _place(fault), fault.get("ctx", {})
    if fault["type"].startswith("union_tag"):
        place += (context["discriminator"].strip("'"),)
    line, place = _find(node, place)
    return f"line {line}: {_dotted(place) or 'the file'}: {_problem(cls, fault)}"


def _place(fault: ErrorDetails) -> Place:
    error = fault.get("ctx", {}).get("error")
    return fault["loc"] + error.place if isinstance(error, FieldError) else fault["loc"]


def _problem(cls: type[BaseModel], fault: ErrorDetails) -> str:
    context, given, message = fault.get("ctx", {}), fault["input"], fault["msg"].removeprefix("Value error, ")
    match fault["type"]:
        case "extra_forbidden":
            return f"unknown key{did_you_mean(str(fault['loc'][-1]), _known(cls, fault['loc'][:-1]))}"
        case "missing" | "union_tag_not_found":
            return "is required"
        case "model_type":
            return "must hold keys and values"
        case "union_tag_invalid":
            return f"{context['tag']!r} is refused: must be one of {context['expected_tags']}"
        case _:
            if isinstance(context.get("error"), FieldError):
                return str(context["error"].problem)
            is_hidden = cls.model_config.get("hide_input_in_errors", False)
            if is_hidden or (isinstance(given, Collection) and not isinstance(given, str)):
                return message
            return f"{echo(repr(given))} is refused: {message}"


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _find(node: yaml.Node | None, place: Place) -> tuple[int, Place]:
    """Return the line of a field, or of the nearest node around it, and the keys that lead there."""
    line, found = node.start_mark.line + 1 if node else 1, []
    for index, step in enumerate(place):
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None and index < len(place) - 1:
                continue  # no key, but the member of a union
            line, node = (pair[0].start_mark.line + 1, pair[1]) if pair else (line, None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        if step != "[key]":
            found.append(step)
    return line, tuple(found)


def _known(cls: type[BaseModel], place: Place) -> Iterable[str]:
    """Return the keys of a part of a model."""
    schema = cls.model_json_schema(by_alias=True)
    here: dict[str, Any] = schema
    for step in place:
        members = here.get("discriminator", {}).get("mapping", {})
        here = here.get("items", {}) if isinstance(step, int) else here.get("properties", members).get(step, {})
        if isinstance(here, str):
            here = {"$ref": here}
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].removeprefix("#/$defs/")]
    return tuple(here.get("properties", ()))


_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"


def key_of(name: str) -> str:
    """Return a field's key in a file. Attributes name their unit; durations in files carry it in their value."""
    return to_camel(name.removesuffix("_s"))


class Section(BaseModel):
    """A part of a file with camelCase keys. A duration's key lacks the unit `_s` of its attribute's name."""

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
