"""When Python's garbage collector runs. It stops every thread of a process."""

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
