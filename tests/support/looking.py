"""Looks again and again at what files, the operating system or other processes show, which tell nobody of a change."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 30.0
INTERVAL_S = 0.02
T = TypeVar("T")


def until(look: Callable[[], T | None], within_s: float = PATIENCE_S, missing: Callable[[], object] = str) -> T:
    """Return what a look finds, once it finds something; AssertionError tells what is there instead."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, missing() or "not found in time"
        time.sleep(INTERVAL_S)
    return found
