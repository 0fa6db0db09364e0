"""Command-line flags made from the fields of a configuration, or of a dataclass that several commands share.

`config_flags`: same names, same descriptions, same defaults as the configuration. A flag that is not given is None, so
that it never hides what the YAML file sets. `grouped_flags`: one flag for each field, annotated as typer wants it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from operator import getitem
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdserve.settings.process import ProcessConfig

# Other spellings of the same flags, as vLLM has them.
SPELLINGS = {"page_size": "--block-size", "num_pages": "--num-gpu-blocks-override"}

_Command = TypeVar("_Command", bound=Callable[..., None])


def config_flags(*classes: type[ProcessConfig], without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Give a command that takes `**flags` one flag for each field of `classes`, those in `without` left out.

    Of a field that several of them have, the first one's type is taken, and each one's description and default are
    shown where they differ.
    """
    fields: dict[str, dict[str, FieldInfo]] = {}
    for cls in classes:
        for name, field in cls.model_fields.items():
            fields.setdefault(name, {})[cls.kind] = field
    generated = [_parameter(name, kinds) for name, kinds in fields.items() if name not in without]

    def decorate(command: _Command) -> _Command:
        _set_parameters(command, [*_own_parameters(command), *generated])
        return command

    return decorate


def grouped_flags(command: _Command) -> _Command:
    """Give a command the flags of its groups: the parameters whose default is a dataclass with the flags' defaults."""
    hints, own = get_type_hints(command, include_extras=True), _own_parameters(command)
    groups: dict[str, Any] = {p.name: p.default for p in own if is_dataclass(p.default)}
    parameters = []
    for parameter in own:
        if parameter.name in groups:
            parameters += _field_parameters(parameter.default)
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(command)
    def run(**given: object) -> None:
        for name, group in groups.items():
            given[name] = replace(group, **{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    _set_parameters(run, parameters)
    return cast(_Command, run)


def _own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    """Return a command's parameters without its `**flags`, each as one that is given by name."""
    every = inspect.signature(command).parameters.values()
    own = [p for p in every if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]


def _field_parameters(group: object) -> list[inspect.Parameter]:
    hints = get_type_hints(type(group), include_extras=True)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=hint)
        for name, hint in hints.items()
    ]


def _set_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    signature = inspect.Signature(parameters)
    setattr(command, "__signature__", signature)  # noqa: B010
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _parameter(name: str, kinds: Mapping[str, FieldInfo]) -> inspect.Parameter:
    """Return a field's flag; `kinds` has the field of each kind of process that has it."""
    field = next(iter(kinds.values()))
    flag = f"--{name.replace('_', '-')}"
    kind = _flag_type(field.annotation)
    spellings = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    if name in SPELLINGS:
        spellings.append(SPELLINGS[name])
    helps = {kind: _help(each) for kind, each in kinds.items()}
    same = len(set(helps.values())) == 1
    help_text = _help(field) if same else " ".join(f"{kind}: {text}" for kind, text in helps.items())
    option = typer.Option(*spellings, help=help_text, show_default=False)
    annotation = getitem(Annotated, (getitem(Union, (kind, None)), option))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: FieldInfo) -> str:
    return (field.description or "") + _default_note(field)


def _default_note(field: FieldInfo) -> str:
    default = field.default
    if field.is_required() or default in (None, "", ()):
        return ""
    shown = ", ".join(map(str, default)) if isinstance(default, Iterable) and not isinstance(default, str) else default
    return f" (default: {shown})"


def _flag_type(annotation: object) -> object:
    """Return the type that typer parses for a field's annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _flag_type(arguments[0])
    if origin in (Union, UnionType):
        inner = [_flag_type(a) for a in arguments if a is not NoneType]
        return inner[0] if len(inner) == 1 else str
    if origin in (tuple, list):
        return list.__class_getitem__(_flag_type(arguments[0]))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return str  # JSON
    return annotation
