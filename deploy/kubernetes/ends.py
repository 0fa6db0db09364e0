"""Which processes of workers have ended, from what pods and nodes show. Pure.

Invariant: a process is reported only once it cannot run any more. Either its container has terminated, and names it in
its message; or a later process of the same container has. Or its pod was removed, and since then the pod's node has
answered without a gap, for as long as its kubelet may take to end what it still runs of that pod. Or its pod was
removed, and an operator asserts that the node's machine is off. A node that does not answer proves nothing by itself,
and neither does a pod that was removed while its node is silent.

A worker whose ranks are on several machines is a group of pods, whose containers all name the same process. It has
ended once it has in each of them. While one of these pods has not shown that, it is not reported.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pdserve.base.processes import is_from_outside, name_of_life
from pdserve.base.values import value
from pdserve.kubernetes.objects import Pod, Terminated

MARGIN_S = 30.0  # beyond a pod's grace period: until a kubelet has seen that the pod is not wanted, and has killed it
GAP_S = 40.0  # without a renewal, after which a node counts as silent; kubelets renew each 10 s
MAX_GONE = 1024  # pods of which no end is proved
FIRST = ""  # in place of the uid of a group's first pod
_Process = tuple[str, int]  # the name of a group's first pod, and the incarnation


@value
class Ended:
    worker_id: str
    incarnation: int
    from_outside: bool  # a drain or a signal ended it, not what it computed


@dataclass(slots=True)
class _Known:
    name: str
    node: str
    grace_s: float
    last_ended: int = 0  # the latest process that is known to have ended
    running: set[int] = field(default_factory=set)  # processes that a router has seen, and whose end is not known
    gone_s: float | None = None  # when it was seen to have been removed
    uid: str = ""
    leader: str = ""  # the first pod of its group, if that is another one
    group_size: int = 1

    def worker_id(self, incarnation: int) -> str:
        """Return the name that a process has to routers. One of a group has a name of its own: see `name_of_life`."""
        return self.name if self.group_size == 1 else name_of_life(f"{self.name}.{self.uid}", incarnation)


@dataclass(slots=True)
class _Answering:
    """A node whose Lease is watched."""

    renewed: str  # as its Lease shows
    last_s: float = 0.0  # when the renewal changed
    since_s: float | None = None  # since when it has answered without a gap; None: it does not


class Ends:
    """Pods of a namespace, and the processes in them."""

    def __init__(self) -> None:
        self._pods: dict[str, _Known] = {}  # by uid
        self._nodes: dict[str, _Answering] = {}
        self._parts: OrderedDict[_Process, dict[str, Ended]] = OrderedDict()  # of groups' processes, by pod
        self._members: OrderedDict[_Process, frozenset[str]] = OrderedDict()  # pods that run them, as far as is known

    def attached(self, incarnation: int, launch_id: str) -> None:
        """Note a process that is attached to a router; its launch_id is its pod's uid."""
        pod = self._pods.get(launch_id)
        if pod is None:
            return
        running = [pod]
        process = pod.name, incarnation
        if pod.group_size > 1 and pod.gone_s is None and process not in self._members:
            # All have joined it, and none is replaced. Who takes a name later runs another process.
            others = {uid: each for uid, each in self._pods.items() if each.leader == pod.name and each.gone_s is None}
            if len(others) == pod.group_size - 1:
                self._members[process] = frozenset((FIRST, *others))
                running += others.values()
                _bound(self._members)
        for each in running:
            if incarnation > each.last_ended:
                each.running.add(incarnation)

    def listed(self, pods: Iterable[Pod], at_s: float) -> list[Ended]:
        """Note all pods of a list; return which processes have ended."""
        found = {pod.metadata.uid: pod for pod in pods}
        ended = [end for pod in found.values() for end in self.changed(pod)]
        for uid in [uid for uid, pod in self._pods.items() if uid not in found and pod.gone_s is None]:
            self._leave(uid, at_s)
        return ended

    def changed(self, pod: Pod) -> list[Ended]:
        """Note a pod; return which of its processes have ended."""
        uid, spec = pod.metadata.uid, pod.spec
        known = self._pods.setdefault(uid, _Known(pod.metadata.name, "", 0.0, uid=uid))
        known.gone_s = None
        known.leader, known.group_size = pod.leader, pod.group_size
        known.node = spec.node_name or known.node
        known.grace_s = float(spec.termination_grace_period_seconds)
        ends = sorted(_ends(pod), key=lambda each: each[0])
        return self._whole(known, [ended for number, how in ends for ended in _end(known, number, how)])

    def removed(self, pod: Pod, at_s: float) -> list[Ended]:
        """Note that a pod was removed, with its last state; return which of its processes have ended."""
        ended = self.changed(pod)
        self._leave(pod.metadata.uid, at_s)
        return ended

    def _leave(self, uid: str, at_s: float) -> None:
        self._pods[uid].gone_s = at_s
        if not self._pods[uid].running:
            del self._pods[uid]
        gone = [uid for uid, pod in self._pods.items() if pod.gone_s is not None]
        for oldest in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._pods[oldest]

    @property
    def num_unproved(self) -> int:
        """Processes whose pods were removed, and whose end is not proved."""
        return sum(len(pod.running) for pod in self._pods.values() if pod.gone_s is not None)

    @property
    def nodes(self) -> set[str]:
        """Nodes to watch: pods of theirs were removed, and the ends of their processes are not proved."""
        wanted = {pod.node for pod in self._pods.values() if pod.gone_s is not None and pod.node}
        self._nodes = {name: node for name, node in self._nodes.items() if name in wanted}
        return wanted

    def off(self, name: str) -> set[str]:
        """Note that a node's machine is off; return the uids of its removed pods: their processes have ended."""
        return {uid for uid, pod in self._pods.items() if pod.node == name and pod.gone_s is not None}

    def asked(self, name: str, renewed: str, *, is_ready: bool, at_s: float) -> set[str]:
        """Note a node's Lease and condition; return the uids of removed pods whose processes must have ended.

        `renewed`: the Lease's renewTime, of which only a change counts; empty without a node or Lease.
        """
        node = self._nodes.setdefault(name, _Answering(renewed))
        if renewed != node.renewed:
            node.since_s = at_s if node.since_s is None or at_s - node.last_s > GAP_S else node.since_s
            node.renewed, node.last_s = renewed, at_s
        if not is_ready or not renewed or at_s - node.last_s > GAP_S:
            node.since_s = None
        if node.since_s is None:
            return set()
        return {
            uid
            for uid, pod in self._pods.items()
            if pod.node == name
            and pod.gone_s is not None
            and node.last_s - max(node.since_s, pod.gone_s) >= pod.grace_s + MARGIN_S
        }

    def proved(self, uids: set[str]) -> list[Ended]:
        """Note that these pods are proved to have ended; return their processes."""
        gone = [self._pods.pop(uid) for uid in sorted(uids & self._pods.keys())]
        ends = [
            (pod, [Ended(pod.worker_id(number), number, from_outside=True) for number in sorted(pod.running)])
            for pod in gone
        ]
        return [ended for pod, own in ends for ended in self._whole(pod, own)]

    def _whole(self, pod: _Known, ends: list[Ended]) -> list[Ended]:
        """Note which processes have ended in a pod; return those that have in all pods of its group."""
        if pod.group_size == 1:
            return ends
        whole = []
        for ended in ends:
            process = pod.leader or pod.name, ended.incarnation
            parts, members = self._parts.setdefault(process, {}), self._members.get(process)
            parts[pod.uid if pod.leader else FIRST] = ended
            # Where the process was not seen attached, containers that name it are all there is to count.
            if FIRST in parts and (parts.keys() >= members if members else len(parts) == pod.group_size):
                # One may have ended from outside, and the others because of that.
                whole.append(replace(parts[FIRST], from_outside=any(each.from_outside for each in parts.values())))
                del self._parts[process]
                self._members.pop(process, None)
        _bound(self._parts)
        return whole


def _bound(noted: "OrderedDict[_Process, Any]") -> None:
    while len(noted) > MAX_GONE:
        noted.popitem(last=False)


def _end(pod: _Known, number: int, how: Terminated) -> Iterator[Ended]:
    """Yield the process that has ended, and before it the earlier ones of the same pod, which have ended too."""
    if number <= pod.last_ended:
        return
    pod.last_ended = number
    for earlier in sorted(each for each in pod.running if each < number):
        yield Ended(pod.worker_id(earlier), earlier, from_outside=True)
    pod.running = {each for each in pod.running if each > number}
    yield Ended(pod.worker_id(number), number, is_from_outside(how.exit_code) and how.reason != "OOMKilled")


def _ends(pod: Pod) -> Iterator[tuple[int, Terminated]]:
    """Yield the processes that terminated containers name."""
    for container in pod.status.container_statuses:
        for state in (container.last_state, container.state):
            how = state.terminated
            if how is not None and (text := how.message.strip()).isdecimal() and 0 < int(text) < 2**64:
                yield int(text), how
