"""Policies from files: at the start, and again while the autoscaler runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from pdserve.autoscaler.schema import Policy
from pdserve.autoscaler.section import in_units, key_of
from pdserve.errors import ConfigError
from pdserve.yaml_models import read_model


def load(path: Path) -> Policy:
    """Read a policy; ConfigError names file, line, field and limit of whatever is wrong."""
    return read_model(Policy, path)


def reload(path: Path, running: Policy) -> tuple[Policy, tuple[str, ...]]:
    """Read the policy that is to replace the running one; return it and what changes, in words.

    ConfigError where it is not valid, or where the actuator is another: the running policy then stays as a whole.
    """
    policy = load(path)
    if policy.actuator != running.actuator:
        changed = "; ".join(_changes("actuator", running.actuator, policy.actuator))
        raise ConfigError(f"{path}: {changed}: an actuator changes only with a new start of the autoscaler")
    return policy, changes(running, policy)


def changes(old: Policy, new: Policy) -> tuple[str, ...]:
    """Return what differs, a sentence for each field; empty where nothing does."""
    return tuple(_changes("", old, new))


def _changes(where: str, old: object, new: object) -> Iterator[str]:
    before, after = _parts(old), _parts(new)
    if old == new:
        return
    if before is None or after is None or type(old) is not type(new):
        yield f"{where} is {_shown(new)}, was {_shown(old)}"
        return
    for key in {**before, **after}:
        place = f"{where}.{key}" if where else key
        if key not in before:
            yield f"{place} is added: {_shown(after[key])}"
        elif key not in after:
            yield f"{place} is removed, was {_shown(before[key])}"
        else:
            yield from _changes(place, before[key], after[key])


def _parts(given: object) -> Mapping[str, object] | None:
    """Return what a value is made of, by the names that it has in a file; None of what is shown as a whole."""
    match given:
        case BaseModel():
            fields = {name: getattr(given, name) for name in type(given).model_fields}
            return {key_of(name): in_units(value) if name.endswith("_s") else value for name, value in fields.items()}
        case dict():
            return given
        case tuple() if all(isinstance(each, BaseModel) for each in given):
            return {str(index): each for index, each in enumerate(given)}
    return None


def _shown(given: object) -> str:
    match given:
        case None:
            return "by default"
        case tuple():
            return ", ".join(map(_shown, given)) or "none"
        case float():
            return f"{given:g}"
        case BaseModel() | dict():
            parts = (_parts(given) or {}).items()
            return " ".join(f"{key} {_shown(part)}" for key, part in parts if part is not None)
        case _:
            return str(given)
