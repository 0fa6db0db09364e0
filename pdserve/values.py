"""Values that are made by the thousand each second: events, commands, and what steps are made of.

A frozen dataclass stores each field through `object.__setattr__`, which makes it four times as slow to make as a plain
one. These are plain; only the type checker keeps them from being changed.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots whose objects nobody changes."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
