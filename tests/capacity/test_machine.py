"""The machine that the capacity simulator has for workers that slow each other down."""

import pytest

from pdserve.capacity.machine import Machine
from pdserve.virtual_time import VirtualClock


def test_steps_on_one_machine_take_longer_for_as_long_as_both_run() -> None:
    clock, ended = VirtualClock(), dict[str, tuple[float, float]]()
    machine = Machine(clock)

    def begin(name: str, alone_s: float, slowdown: float) -> None:
        machine.begin(alone_s, slowdown, lambda elapsed_s: ended.update({name: (clock.now_s(), elapsed_s)}))

    clock.at(0.0, begin, "long", 3.0, 2.0)
    clock.at(1.0, begin, "short", 1.0, 1.5)
    clock.run()
    assert ended["short"] == (pytest.approx(2.5), pytest.approx(1.5))
    assert ended["long"] == (pytest.approx(3.75), pytest.approx(3.75))  # 1 alone, 0.75 beside the other, 1.25 alone
