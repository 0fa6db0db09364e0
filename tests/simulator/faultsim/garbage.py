"""Leaves garbage lie while a simulation runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left() -> Iterator[None]:
    """Look for cycles of objects at the end only: there are few before, and looking takes up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(0)
            gc.enable()
