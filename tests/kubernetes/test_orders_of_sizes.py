"""Sizes change once for each order, whatever becomes of requests and answers, and however many autoscalers order."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.workload import MARK, STALE_S, Workload
from pdserve.base.roles import Role
from pdserve.kubernetes.objects import (
    DELETION_COST,
    Condition,
    Metadata,
    Pod,
    PodStatus,
    Scale,
    ScaleSpec,
    ScaleStatus,
)


@dataclass
class Server:
    """A deployment whose controller lags, and writes that reach the server late."""

    size: int
    version: int = 1
    next_pod: int = 0
    pods: dict[str, bool] = field(default_factory=dict)  # whether it is marked, by uid
    late: list[tuple[int, int]] = field(default_factory=list)  # writes on their way: version and size

    def write(self, version: int, size: int) -> bool:
        if version != self.version:
            return False
        self.version, self.size = self.version + 1, size
        return True

    def reconcile(self) -> None:
        while len(self.pods) < self.size:
            self.pods[f"uid-{self.next_pod}"] = False
            self.next_pod += 1
        for uid in sorted(self.pods, key=lambda uid: not self.pods[uid])[: len(self.pods) - self.size]:
            del self.pods[uid]

    def listed(self) -> list[Pod]:
        status = PodStatus("Running", (Condition("Ready", "True"),))
        costs = {uid: {DELETION_COST: MARK} if marked else {} for uid, marked in self.pods.items()}
        return [Pod(Metadata(name=uid, uid=uid, annotations=costs[uid]), status=status) for uid in self.pods]

    def scale(self) -> Scale:
        return Scale(Metadata(name="chat"), ScaleSpec(self.size), ScaleStatus(len(self.pods), "app=chat"))


class Ordering:
    """An autoscaler that wants so many replicas, and orders as `PodActuator` does."""

    def __init__(self, server: Server, goal: int) -> None:
        self._server = server
        self._goal = goal
        self.observe()

    def observe(self) -> None:
        self._workload = getattr(self, "_workload", None) or Workload("chat", Role.DECODE)
        self._workload.see(self._server.scale(), self._server.listed(), "1", 0.0)
        self._held = [each for each in self._workload.listed() if each.state is not State.DRAINING]

    def order(self, fate: str) -> None:
        """Give the order that the last observation asks for, the same one each time."""
        try:
            if len(self._held) < self._goal:
                self._add(f"decode-{len(self._held)}", fate)
            elif len(self._held) > self._goal:
                self._drain(self._held[0].name, fate)
        except ActuatorError:
            pass

    def _add(self, name: str, fate: str) -> None:
        if self._workload.begin_add(name):
            try:
                if self._rescale(1, fate):
                    self._workload.added(name)
            except ActuatorError:
                self._workload.failed_to_add(name)

    def _drain(self, name: str, fate: str) -> None:
        pod = None
        if self._workload.pod(name) is not None:
            pod = self._workload.begin_drain(name, self._server.listed())
            if pod is None:
                return
            for stale in self._workload.stale_marks():
                if stale.metadata.uid in self._server.pods:
                    self._server.pods[stale.metadata.uid] = False
            self._server.pods[pod.metadata.uid] = True
        elif not self._workload.is_coming(name):
            return
        if self._rescale(-1, fate):
            self._workload.drained(name, pod)

    def _rescale(self, change: int, fate: str) -> bool:
        """Return whether an answer came."""
        size = self._workload.target(self._server.size, change)
        if size is None:
            return True
        match fate:
            case "kept" | "answer lost":
                assert self._server.write(self._server.version, size)
            case "late":
                self._server.late.append((self._server.version, size))
        return fate == "kept"


FATES = st.sampled_from(["kept", "request lost", "answer lost", "late"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("order"), st.integers(0, 1), st.just("kept")),
        st.tuples(st.just("order"), st.integers(0, 1), FATES),
        st.tuples(st.sampled_from(["observe", "start again"]), st.integers(0, 1), st.just("")),
        st.tuples(st.sampled_from(["arrive", "reconcile"]), st.just(0), st.just("")),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(STEPS, st.integers(1, 4), st.integers(1, 4))
def test_no_order_is_carried_out_twice(steps: list[tuple[str, int, str]], initial: int, goal: int) -> None:
    server = Server(initial)
    server.reconcile()
    ordering = [Ordering(server, goal), Ordering(server, goal)]
    for what, who, fate in steps:
        match what:
            case "order":
                ordering[who].order(fate)
            case "observe":
                ordering[who].observe()
            case "start again":
                ordering[who] = Ordering(server, goal)
            case "arrive" if server.late:
                server.write(*server.late.pop(0))
            case "reconcile":
                server.reconcile()
        assert min(initial, goal) <= server.size <= max(initial, goal)


def test_lists_of_before_are_refused_until_they_have_come_for_a_minute() -> None:
    server, workload = Server(2), Workload("chat", Role.DECODE)
    server.reconcile()
    workload.see(server.scale(), server.listed(), "900", 0.0)
    for at_s in (1_000.0, 1_000.0 + STALE_S - 1):
        with pytest.raises(ActuatorError, match="before 900"):
            workload.see(server.scale(), server.listed(), "7", at_s)
    workload.see(server.scale(), server.listed(), "7", 1_000.0 + STALE_S)
    workload.see(server.scale(), server.listed(), "8", 1_000.0 + STALE_S)


@given(st.integers(0, 5), st.integers(0, 5))
def test_where_answers_come_each_goal_is_reached(initial: int, goal: int) -> None:
    server = Server(initial)
    server.reconcile()
    ordering = Ordering(server, goal)
    for _ in range(2 * abs(initial - goal) + 1):
        ordering.order("kept")
        server.reconcile()
        ordering.observe()
    assert (server.size, len(server.pods)) == (goal, goal)
