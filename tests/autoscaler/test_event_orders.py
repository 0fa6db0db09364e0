"""Whatever happens in whatever order, the autoscaler's orders stay within limits, and each of them has an end."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scaled_world import BOTH, World, policy

from pdserve.autoscaler.decisions import Action, Add, Decision, Drain, Flip
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.schema import ForecasterKind
from pdserve.autoscaler.supply import Result
from pdserve.base.roles import Role

MAX_DEVICES, LEAST, MOST = 7, {Role.PREFILL: 1, Role.DECODE: 2}, {Role.PREFILL: 4, Role.DECODE: 6}
LIMITS = {role.value: {"min_replicas": LEAST[role], "max_replicas": MOST[role]} for role in BOTH}
DELAYS_S = st.sampled_from([0.0, 0.0, 3.0, 20.0])  # until an order is carried out


class AnyOrder(RuleBasedStateMachine):
    """The autoscaler with an actuator that fails, lies and is late, and replicas that die."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(policy(budget={"max_devices": MAX_DEVICES}, **LIMITS)).start(1, 2)
        self.late: list[tuple[float, Action]] = []  # orders that are carried out later
        self.open: list[tuple[Action, frozenset[Role]]] = []  # orders without an outcome, and whose they are

    # ---- what happens

    @rule(
        rate=st.floats(0, 60), prompt=st.sampled_from([100, 1000, 4000, 20_000]), answer=st.sampled_from([2, 101, 801])
    )
    def demand_changes(self, rate: float, prompt: int, answer: int) -> None:
        self.world.rate, self.world.prompt, self.world.answer = rate, prompt, answer

    @rule(
        seconds=st.sampled_from([1.0, 5.0, 5.0, 40.0]),
        fresh=st.sampled_from([True, True, True, False]),
        does=st.sampled_from(["works", "works", "lies", "fails", "fails after all", "is late", "fails and is late"]),
        refused=st.sampled_from([{}, {}, {"queue": 40}, {"pages": 40}]),
    )
    def time_passes(self, seconds: float, fresh: bool, does: str, refused: dict[str, int]) -> None:
        self.advance(seconds)
        self.world.refused = refused
        for decision in self.look(seconds, fresh):
            if decision.action is not None:
                self.carry_out(decision.action, does)

    @rule(number=st.integers(0, 20))
    @precondition(lambda self: self.world.replicas)
    def one_dies(self, number: int) -> None:
        names = sorted(self.world.replicas)
        del self.world.replicas[names[number % len(names)]]

    @rule(fresh=st.booleans())
    def nobody_is_listed(self, fresh: bool) -> None:
        """An answer without replicas ends none of them."""
        self.advance(5.0)
        before, self.world.replicas = self.world.replicas, {}
        decisions = self.look(5.0, fresh)
        self.world.replicas = before
        assert all(decision.action is None or isinstance(decision.action, Add) for decision in decisions)
        for decision in decisions:
            if decision.action is not None:
                self.carry_out(decision.action, "works")

    @rule()
    def the_autoscaler_starts_again(self) -> None:
        for _, action in self.late:
            self.world.carry_out(action)
        self.late, self.open = [], []
        self.world.scaler = Autoscaler(self.world.policy)

    # ---- how

    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)
        due = [action for at_s, action in self.late if at_s <= self.world.at_s]
        self.late = [(at_s, action) for at_s, action in self.late if at_s > self.world.at_s]
        for action in due:
            self.world.carry_out(action)

    def look(self, seconds: float, fresh: bool) -> tuple[Decision, ...]:
        sizes = {role: self.world.size(role) for role in BOTH}
        devices = len(self.world.replicas)
        decisions = self.world.look(seconds, fresh=fresh)
        self.take_outcomes()
        for decision in decisions:
            assert decision.text
            assert decision.desired <= max(MOST[decision.pool], decision.num_replicas)
            assert decision.desired >= min(LEAST[decision.pool], decision.num_replicas)
            action = decision.action
            if action is None:
                continue
            pools = frozenset(BOTH) if isinstance(action, Flip) else frozenset({decision.pool})
            assert not any(pools & theirs for _, theirs in self.open), (action, self.open)
            self.open.append((action, pools))
            for pool in pools:
                gains = isinstance(action, Add) or (isinstance(action, Flip) and action.role is pool)
                sizes[pool] += 1 if gains else -1
                assert not gains or sizes[pool] <= MOST[pool]
                assert gains or sizes[pool] >= LEAST[pool]
            devices += isinstance(action, Add)
            assert fresh or isinstance(action, Add)
        assert devices <= MAX_DEVICES or not any(isinstance(decision.action, Add) for decision in decisions)
        return decisions

    def carry_out(self, action: Action, does: str) -> None:
        world = self.world
        match does:
            case "works" | "fails after all":
                world.carry_out(action)
            case "is late" | "fails and is late":
                self.late.append((world.at_s + 25.0, action))
        if does.startswith("fails"):
            world.scaler.failed(action, "planned", world.at_s)
            self.take_outcomes()
        else:
            world.scaler.ordered(action, world.at_s)

    def take_outcomes(self) -> None:
        for outcome in self.world.scaler.take_outcomes():
            ended = [each for each in self.open if each[0] == outcome.action]
            assert len(ended) == 1, outcome
            assert ended[0][1] == frozenset(outcome.effects)
            self.open.remove(ended[0])

    @invariant()
    def no_more_devices_are_held_than_the_budget_has(self) -> None:
        assert len(self.world.replicas) <= MAX_DEVICES

    def teardown(self) -> None:
        """Every order has an outcome, and both pools are within their limits, soon after the trouble ends."""
        for _ in range(24):
            self.advance(30.0)
            for decision in self.look(30.0, fresh=True):
                if decision.action is not None:
                    self.carry_out(decision.action, "works")
        self.world.rate = 0.0
        self.advance(1.0)
        self.look(1.0, fresh=False)
        assert not self.open
        for role in BOTH:
            assert LEAST[role] <= self.world.size(role) <= MOST[role]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.long
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    rate=st.floats(1, 45),
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(["last", "kalman"]),
    up=st.sampled_from([0, 0.1]),
)
def test_constant_demand_with_noise_hardly_moves_a_pool(
    rate: float, seed: int, kind: ForecasterKind, up: float
) -> None:
    pool = {"behavior": {"scale_up": {"tolerance": up}}}
    world = World(policy(forecaster={"kind": kind}, prefill=pool, decode=pool), noise=Random(seed)).start(1, 1)
    world.rate = rate
    world.go_on(600)
    settled = len(world.orders)
    world.go_on(1200)
    assert len(world.orders) - settled <= 3  # of 480 that were possible


def test_what_was_added_stays_until_it_has_started_and_dwelled() -> None:
    pool = {"behavior": {"scale_down": {"stabilization_window_seconds": 0.0}}}
    kinds = {"forecaster": {"kind": "last"}, "role_switch": {"enabled": False, "min_dwell_s": 40.0}}
    world = World(policy(prefill=pool, decode=pool, **kinds), startup_s=50.0).start(1, 1)
    world.rate = 12.0
    world.go_on(400)
    world.rate = 40.0
    while not any(at_s > 400 for at_s, _ in world.orders):
        world.go_on(5)
    world.rate = 1.0
    world.go_on(300)
    added = {action.name: at_s for at_s, action in world.orders if isinstance(action, Add)}
    kept_s = [at_s - added[action.name] for at_s, action in world.orders if isinstance(action, Drain)]
    assert 90 <= min(kept_s) < 120
    assert world.sizes == (1, 1)


def test_a_replica_that_is_gone_ends_its_flip() -> None:
    world = World(policy(budget={"max_devices": 6}), answer=1601, rate=2.0).start(1, 1)
    world.go_on(300)
    world.answer, world.prompt, world.rate = 21, 4000, 10.0
    flip: Action | None = None
    while flip is None:
        world.advance(5)
        for decision in world.look(5):
            if isinstance(decision.action, Flip):
                flip = decision.action
            elif decision.action is not None:
                world.carry_out(decision.action)
    world.scaler.take_outcomes()
    del world.replicas[flip.name]
    world.advance(5)
    world.look(5)
    assert [o.result for o in world.scaler.take_outcomes() if o.action == flip] == [Result.GONE]
    assert all(r.state is not State.DRAINING for r in world.replicas.values())
