"""What every actuator must do, whatever starts its replicas: a test class for each kind inherits `ActuatorSuite`."""

from dataclasses import replace
from typing import Protocol

import pytest

from pdserve.autoscaler.actuator import Actuator
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Listed, State
from pdserve.base.roles import Role


class Stage(Protocol):
    """A platform that begins with the ready replicas prefill-0 and decode-0, and a hand on what happens there."""

    @property
    def actuator(self) -> Actuator:
        """What is tested. It gives up on an order after a second at most."""

    @property
    def roles(self) -> dict[str, Role]:
        """The roles that replicas were given while they served."""

    async def make_ready(self, name: str) -> None:
        """Let a replica become ready; returns once it is."""

    async def kill(self, name: str) -> None:
        """End a replica's process; returns once what kept it knows."""

    async def until_gone(self, name: str) -> None:
        """Wait until a replica has left."""

    def let_drains_last(self) -> None:
        """Let replicas that are added from now on take longer to drain than any test."""

    async def fall_silent(self) -> None:
        """Answer no call from now on."""


async def held(stage: Stage) -> dict[str, Listed]:
    replicas = await stage.actuator.observe()
    assert len({replica.name for replica in replicas}) == len(replicas), "a replica is listed twice"
    return {replica.name: replace(replica, worker_id="") for replica in replicas}


async def state_of(stage: Stage, name: str) -> State | None:
    replica = (await held(stage)).get(name)
    return None if replica is None else replica.state


class ActuatorSuite:
    """The tests; an inheriting class has a fixture `stage`."""

    async def test_what_is_there_from_the_start_is_held(self, stage: Stage) -> None:
        assert await held(stage) == {
            "prefill-0": Listed("prefill-0", Role.PREFILL, State.READY),
            "decode-0": Listed("decode-0", Role.DECODE, State.READY),
        }

    async def test_an_added_replica_starts_and_then_serves(self, stage: Stage) -> None:
        await stage.actuator.add("decode-1", Role.DECODE)
        assert (await held(stage))["decode-1"] == Listed("decode-1", Role.DECODE, State.STARTING)
        await stage.make_ready("decode-1")
        assert await state_of(stage, "decode-1") is State.READY

    async def test_an_order_repeated_adds_nothing_twice(self, stage: Stage) -> None:
        for _ in range(3):
            await stage.actuator.add("decode-1", Role.DECODE)
        await stage.make_ready("decode-1")
        await stage.actuator.add("decode-1", Role.DECODE)
        assert len(await held(stage)) == 3
        assert await state_of(stage, "decode-1") is State.READY

    async def test_a_drained_replica_ends_for_good_and_alone(self, stage: Stage) -> None:
        await stage.actuator.add("decode-1", Role.DECODE)
        await stage.make_ready("decode-1")
        await stage.actuator.drain("decode-1")
        assert await state_of(stage, "decode-1") in (State.DRAINING, None)
        await stage.until_gone("decode-1")
        assert set(await held(stage)) == {"prefill-0", "decode-0"}
        await stage.actuator.drain("decode-1")  # it is so already

    async def test_a_replica_that_drains_is_neither_asked_again_nor_brought_back(self, stage: Stage) -> None:
        stage.let_drains_last()
        await stage.actuator.add("decode-1", Role.DECODE)
        await stage.make_ready("decode-1")
        await stage.actuator.drain("decode-1")
        await stage.actuator.drain("decode-1")
        assert await state_of(stage, "decode-1") is State.DRAINING
        with pytest.raises(ActuatorError, match="decode-1"):
            await stage.actuator.add("decode-1", Role.DECODE)
        assert await state_of(stage, "decode-1") is State.DRAINING

    async def test_a_replica_whose_process_dies_is_kept_and_started_again(self, stage: Stage) -> None:
        await stage.kill("decode-0")
        assert await state_of(stage, "decode-0") is State.STARTING
        await stage.make_ready("decode-0")
        assert await state_of(stage, "decode-0") is State.READY

    async def test_a_role_is_given_while_the_replica_serves(self, stage: Stage) -> None:
        for _ in range(2):
            await stage.actuator.flip("decode-0", Role.PREFILL)
        assert stage.roles == {"decode-0": Role.PREFILL}
        assert await state_of(stage, "decode-0") is State.READY
        with pytest.raises(ActuatorError, match="nobody"):
            await stage.actuator.flip("nobody", Role.DECODE)

    async def test_an_order_without_an_answer_fails_and_can_be_repeated(self, stage: Stage) -> None:
        await stage.fall_silent()
        orders = (
            stage.actuator.observe(),
            stage.actuator.add("decode-1", Role.DECODE),
            stage.actuator.drain("decode-0"),
            stage.actuator.flip("decode-0", Role.PREFILL),
        )
        for order in orders:
            with pytest.raises(ActuatorError):
                await order
