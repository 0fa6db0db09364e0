"""Sections that end in every way that a section on a GPU may, for tests of what runs them."""

import gc
import os
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gpu_report import Case, Row

if TYPE_CHECKING:
    from gpu_device import Device


def well(device: "Device") -> Iterator[Case]:
    yield "first", lambda: [Row("first", {"pid": float(os.getpid())})]
    yield "second", lambda: [Row("second", {"pid": float(os.getpid())})]


def raising(device: "Device") -> Iterator[Case]:
    def case() -> Iterator[Row]:
        yield Row("before")
        raise RuntimeError("out of memory")

    yield "broken", case
    yield "after", lambda: [Row("after")]


def raising_between(device: "Device") -> Iterator[Case]:
    yield "first", lambda: [Row("first")]
    raise RuntimeError("no model")


def dying(device: "Device") -> Iterator[Case]:
    yield "first", lambda: [Row("first")]
    yield "dies", lambda: os._exit(3)


def hanging(device: "Device") -> Iterator[Case]:
    yield "first", lambda: [Row("first")]
    yield "hangs", lambda: time.sleep(3600)


def slow(device: "Device") -> Iterator[Case]:
    for number in range(100):
        yield f"number {number}", _slowly


def losing(device: "Device") -> Iterator[Case]:
    def lose() -> list[Row]:
        def broken() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        device.synchronize = broken  # type: ignore[method-assign]
        raise RuntimeError("the kernel is wrong")

    yield "loses the device", lose
    yield "after", lambda: [Row("after")]


class Large:
    """Stands for a model that fills the device."""


def holding(device: "Device") -> Iterator[Case]:
    def case(large: Large) -> list[Row]:
        return [Row("used it")]

    large = Large()
    seen = weakref.ref(large)
    yield "first", partial(case, large)
    del large
    gc.collect()
    row = Row("left it", {"are left": float(seen() is not None)})
    yield "second", lambda: [row]


def _slowly() -> list[Row]:
    until_s = time.perf_counter() + 0.05
    while time.perf_counter() < until_s:
        pass
    return [Row("one")]
