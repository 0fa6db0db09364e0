"""Switches bugs on and off: each mutation breaks one rule of the real cores while it is on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import Parameter, signature
from typing import Any
from unittest.mock import patch

Original = Callable[..., Any]
Mutation = Callable[[], AbstractContextManager[object]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(make: Callable[[], Iterator[object]]) -> Callable[[], Iterator[object]]:
    """Register a bug that patches by itself, and yields while it is on."""
    MUTATIONS[make.__name__] = contextmanager(make)
    return make


def breaks(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a bug that is put in the place of a method, and gets the method before its arguments."""

    def register(around: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[around.__name__] = partial(wrap, owner, name, around)
        return around

    return register


def wrap(owner: object, name: str, around: Callable[..., Any]) -> AbstractContextManager[object]:
    """Put `around(original, *args)` in the place of a method.

    AttributeError unless the owner itself has it; TypeError unless the bug takes what the method takes.
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner} has no {name} of its own to break")
    original = getattr(owner, name)
    _check_fits(around, original)
    return patch.object(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def _check_fits(around: Callable[..., Any], original: Original) -> None:
    """Raise TypeError unless a bug takes all that a method takes, beside the method itself."""
    taken = signature(original).parameters.values()
    by_name = {each.name: None for each in taken if each.kind is Parameter.KEYWORD_ONLY}
    by_place = [each for each in taken if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    signature(around).bind(original, *by_place, **by_name)
