"""A world of replicas for the autoscaler: they come, serve, drain and go as time passes, and some orders go wrong."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from pdserve.autoscaler.decisions import Action, Add, Decision, Drain, Flip
from pdserve.autoscaler.observation import Capacity, Observation, Replica, State
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.schema import Policy
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts
from pdserve.protocol.reports import NUM_BANDS, Demand, band_of

STEP_S = 0.02
COSTS = StepCosts(Curve(0.01, 1e-4, 0.0), (DecodePiece(None, Curve(STEP_S, 0.0, 0.0)),))
CAPACITY = Capacity(kv_tokens=1_000_000, max_num_seqs=20, step_tokens=1000)
PROMPT, ANSWER = 1000, 101  # tokens: a prefill worker computes about 9 a second, a decode worker holds 20 for 2 s
BOTH = (Role.PREFILL, Role.DECODE)


def policy(**changes: Any) -> Policy:  # noqa: ANN401 - whatever a policy has
    """Return a policy that reacts at once, with some of its keys changed; `prefill` and `decode` change the pools'."""
    pool: dict[str, Any] = {
        "min_replicas": 1,
        "max_replicas": 8,
        "startup_s": 30.0,
        "behavior": {"scale_up": {"tolerance": 0.0}, "scale_down": {"stabilization_window_seconds": 60.0}},
    }
    pools = {role.value: {**pool, **changes.pop(role.value, {})} for role in BOTH}
    given: dict[str, Any] = {
        "api_version": "pdserve/v1alpha1",
        "kind": "AutoscalingPolicy",
        "objectives": {"ttft_ms": 500, "tpot_ms": 40, "attainment": 0.95},
        "budget": {"max_devices": 16},
        "interval": {"forecast_s": 20.0, "react_s": 5.0},
        "forecaster": {"quantile": 0.9},
        "role_switch": {"enabled": True, "min_dwell_s": 20.0},
        "pools": pools,
        **changes,
    }
    return Policy.model_validate(given)


@dataclass
class World:
    """Time goes on in steps; demand is what it is set to."""

    policy: Policy
    scaler: Autoscaler = None  # type: ignore[assignment] - set below
    startup_s: float = 30.0
    drain_s: float = 10.0
    rate: float = 1.0  # requests a second
    prompt: int = PROMPT
    answer: int = ANSWER
    noise: Random | None = None
    at_s: float = 0.0
    replicas: dict[str, Replica] = field(default_factory=dict)
    orders: list[tuple[float, Action]] = field(default_factory=list)
    decisions: tuple[Decision, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
    num_held: int = 0  # requests that wait in routers
    knows_costs: bool = True  # whether routers have learnt what steps take

    def __post_init__(self) -> None:
        self.scaler = Autoscaler(self.policy)

    def start(self, prefill: int, decode: int) -> "World":
        """Begin with replicas that serve."""
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number in range(count):
                self.replicas[f"{role}-{number}"] = Replica(f"{role}-{number}", role, State.READY, self.at_s)
        return self

    def size(self, role: Role) -> int:
        return sum(r.role is role and r.state is not State.DRAINING for r in self.replicas.values())

    @property
    def sizes(self) -> tuple[int, int]:
        return self.size(Role.PREFILL), self.size(Role.DECODE)

    def go_on(self, seconds: float, every_s: float = 5.0) -> "World":
        """Let time pass, and carry out what is decided."""
        until_s = self.at_s + seconds
        while self.at_s < until_s - 1e-9:
            self.advance(every_s)
            for decision in self.look(every_s):
                if decision.action is not None and not decision.advisory:
                    self.carry_out(decision.action)
                    self.scaler.ordered(decision.action, self.at_s)
        return self

    def advance(self, seconds: float) -> None:
        """Let replicas start and end."""
        self.at_s += seconds
        for name, each in list(self.replicas.items()):
            if each.state is State.STARTING and self.at_s - each.since_s >= self.startup_s:
                self.replicas[name] = replace(each, state=State.READY, since_s=each.since_s + self.startup_s)
            if each.state is State.DRAINING and self.at_s - each.since_s >= self.drain_s:
                del self.replicas[name]

    def look(self, seconds: float, *, fresh: bool = True) -> tuple[Decision, ...]:
        """Return what the autoscaler decides."""
        self.decisions = self.scaler.decide(self.observation(seconds, fresh=fresh))
        return self.decisions

    def observation(self, seconds: float, *, fresh: bool = True) -> Observation:
        replicas = tuple(self.replicas.values())
        demand = self._demand(seconds) if fresh else None
        known = (dict.fromkeys(BOTH, COSTS), dict.fromkeys(BOTH, CAPACITY)) if self.knows_costs else ()
        return Observation(self.at_s, self.at_s, replicas, demand, seconds, self.num_held, self.refused, *known)

    def _demand(self, seconds: float) -> Demand:
        count = self.rate * seconds
        if self.noise is not None:
            count = max(0.0, self.noise.gauss(count, count**0.5))
        whole = round(count)
        prompts, answers = [0] * NUM_BANDS, [0] * NUM_BANDS
        prompts[band_of(self.prompt)] = answers[band_of(self.answer)] = whole
        return Demand(whole, whole * self.prompt, 0, whole * self.answer, tuple(prompts), tuple(answers))

    def carry_out(self, action: Action) -> None:
        """Do as an actuator does."""
        self.orders.append((self.at_s, action))
        match action:
            case Add(name, role):
                self.replicas.setdefault(name, Replica(name, role, State.STARTING, self.at_s))
            case Drain(name):
                if (each := self.replicas.get(name)) is not None and each.state is not State.DRAINING:
                    self.replicas[name] = replace(each, state=State.DRAINING, since_s=self.at_s)
            case Flip(name, role):
                if (each := self.replicas.get(name)) is not None:
                    self.replicas[name] = replace(each, role=role)
