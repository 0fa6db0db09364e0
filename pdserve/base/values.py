"""Values of which thousands are made each second: events, commands, and parts of steps.

A frozen dataclass sets each field through `object.__setattr__`, so making one takes four times as long as a plain one.
These are plain; only the type checker keeps them from being changed.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots, which the type checker treats as frozen."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
