"""When memory is collected and returned to the system. Python's collector stops every thread of a process."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects after which the collector runs in a process that serves clients. Few of its objects are in cycles: with
# Python's default of 700 a streamed request takes a tenth more (docs/measurements/front-end.md).
_YOUNG_OBJECTS = 20_000


def collect_rarely() -> None:
    """Let the collector run rarely in a process that serves clients."""
    gc.set_threshold(_YOUNG_OBJECTS)


def freeze_objects() -> None:
    """Let later collections look only at objects that are made from here on.

    Modules, and what a process has loaded, stay until it ends. To look at all of them stops a router for 50 ms, and a
    worker, which has over 200,000, for a tenth of a second: within seconds of its start, when requests come already.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect garbage only at the end of the block: before, it would take up to a third of the time and find little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(0)
            gc.enable()


def trim_memory() -> None:
    """Return what malloc holds free, in whole pages, to the system. Takes milliseconds, in which other threads run."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
