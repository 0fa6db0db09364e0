"""An event loop under virtual time: a sleep takes no time, and a slow machine changes no duration."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class _Skipping(selectors.SelectSelector):
    """Goes on at once to the moment until which nothing is to be done."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that waits for nothing outside its process."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


class LoopClock:
    """The time of the running loop."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def run_virtually(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine to its end in a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
