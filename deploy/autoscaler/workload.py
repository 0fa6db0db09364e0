"""One workload of Kubernetes: its replicas by the names of orders, and the sizes that orders ask for. Pure.

Invariant: an order asks for one replica more or fewer than were observed, and never for anything else, so that neither
a repeated order, nor a late one, nor two autoscalers change a size twice.

Kubernetes chooses the names of pods; an order only changes their number. A replica that was ordered gets the first pod
that is new since the order. Until there is one, the replica starts without a pod.
"""

from collections.abc import Iterator, Sequence

from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Listed, State
from pdserve.base.roles import Role
from pdserve.kubernetes.objects import DELETION_COST, ROLE_LABEL, Pod, Scale

MARK = str(-(2**31))  # the least deletion cost
STALE_S = 60.0  # in which lists older than an earlier one are refused; then the API counts as restored from a backup
_PHASES = ("Pending", "Unknown", "Running")
_TEMPLATE = "pod-template-hash"


class Workload:
    """A deployment, as it was last observed and ordered."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role  # with which its pods start
        self.uid = ""
        self.selector = ""  # of its pods
        self._size = 0  # wanted
        self._pods: dict[str, Pod] = {}  # by uid, without those that have ended
        self._marked: set[str] = set()  # uids of pods that are to be removed before others
        self._names: dict[str, str] = {}  # that orders gave pods, by uid
        self._coming: dict[str, bool] = {}  # names of replicas without a pod, and whether they are known to be ordered
        self._version = 0
        self._stale_since_s: float | None = None  # since when lists are older than an earlier one

    # ---- what is there

    def see(self, scale: Scale, pods: Sequence[Pod], version: str, now_s: float) -> None:
        """Take in the scale, and the pods of a list. ActuatorError where these cannot be the present state."""
        if not pods and scale.status.replicas:
            raise ActuatorError(f"{self.name}: no pod is listed, of {scale.status.replicas} that there are")
        if version.isdecimal():  # as all API servers have it, though not all promise it
            self._check_age(int(version), now_s)
        before, self.uid, self.selector = set(self._pods), scale.metadata.uid, scale.status.selector
        self._pods = {pod.metadata.uid: pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")}
        self._marked = {uid for uid, pod in self._pods.items() if _cost(pod) == int(MARK)}
        self._names = {uid: name for uid, name in self._names.items() if uid in self._pods}
        self._size = scale.spec.replicas
        fresh = [uid for uid in self._live if uid not in before and uid not in self._names]
        names = list(self._coming)
        self._names |= dict(zip(fresh, names, strict=False))
        rest = names[len(fresh) :]
        self._coming = dict.fromkeys(rest[: max(0, self._size - len(self._live))], True)

    def _check_age(self, version: int, now_s: float) -> None:
        """Note a list's version. ActuatorError if an earlier list had a later one, for at most STALE_S."""
        if version < self._version:
            self._stale_since_s = now_s if self._stale_since_s is None else self._stale_since_s
            if now_s - self._stale_since_s < STALE_S:
                raise ActuatorError(f"{self.name}: pods are listed as of {version}, which is before {self._version}")
        self._version, self._stale_since_s = version, None

    @property
    def _live(self) -> dict[str, Pod]:
        """Pods that count for the workload's size."""
        return {uid: pod for uid, pod in self._pods.items() if pod.metadata.deletion_timestamp is None}

    @property
    def _leaving(self) -> set[str]:
        """Pods that are to be removed, and are not yet."""
        return self._marked & self._live.keys() if len(self._live) > self._size else set()

    def listed(self) -> Iterator[Listed]:
        """Yield all replicas."""
        leaving = self._leaving
        for uid, pod in self._pods.items():
            if uid in leaving or pod.metadata.deletion_timestamp is not None:
                state = State.DRAINING
            else:
                state = State.READY if pod.is_ready else State.STARTING
            yield Listed(self._name(uid), self.role_of(pod), state, pod.metadata.name)
        ordered = [name for name, is_known in self._coming.items() if is_known]
        missing = self._size - len(self._live) - len(ordered)
        for name in (*ordered, *(f"{self.name}/{index}" for index in range(missing))):
            yield Listed(name, self.role, State.STARTING)

    def role_of(self, pod: Pod) -> Role:
        """Return the role that a pod's label names, or else the one that pods start with."""
        label = pod.metadata.labels.get(ROLE_LABEL, "")
        return Role(label) if label in list(Role) else self.role

    @property
    def pods(self) -> Sequence[Pod]:
        return list(self._pods.values())

    def pod(self, name: str) -> Pod | None:
        """Return the pod of a replica."""
        return next((pod for uid, pod in self._pods.items() if self._name(uid) == name), None)

    def _name(self, uid: str) -> str:
        return self._names.get(uid) or self._pods[uid].metadata.name

    # ---- orders

    def is_coming(self, name: str) -> bool:
        """Return whether a replica without a pod has this name."""
        return name in {each.name for each in self.listed() if not each.worker_id}

    def begin_add(self, name: str) -> bool:
        """Return whether a replica of this name is to be asked for; ActuatorError where it cannot be now."""
        pod = self.pod(name)
        if pod is not None and (pod.metadata.deletion_timestamp or pod.metadata.uid in self._leaving):
            raise ActuatorError(f"{name} is still draining")
        if pod is not None or self.is_coming(name):
            return False
        if self._leaving:
            raise ActuatorError(f"{self.name}: a pod has yet to be removed, and would be kept")
        self._coming[name] = False
        return True

    def begin_drain(self, name: str, pods: Sequence[Pod]) -> Pod | None:
        """Return the pod to mark, which is then the first to be removed of those that are there now.

        None where there is nothing to do. ActuatorError where another one would be removed in its place.
        """
        pod = self.pod(name)
        now = {each.metadata.uid: each for each in pods}
        if pod is None or pod.metadata.uid in self._leaving or pod.metadata.uid not in now:
            return None
        staying = [
            each
            for uid, each in now.items()
            if each.metadata.deletion_timestamp is None
            and each.status.phase not in ("Succeeded", "Failed")
            and uid not in self._leaving
        ]
        if pod.metadata.uid not in {each.metadata.uid for each in staying}:
            return None  # it leaves already
        if len({each.metadata.labels.get(_TEMPLATE) for each in staying}) > 1:
            raise ActuatorError(f"{self.name}: pods of two templates are there: a rollout is under way")
        first = min(staying, key=lambda each: (*_rank(each), each.metadata.uid != pod.metadata.uid))
        if first.metadata.uid == pod.metadata.uid or _rank(first) >= _rank(now[pod.metadata.uid]):
            return pod
        if now[pod.metadata.uid].is_ready:
            raise ActuatorError(f"{first.metadata.name} is not ready, and would be removed in its place")
        theirs = self._name(first.metadata.uid) if first.metadata.uid in self._pods else first.metadata.name
        self._names[pod.metadata.uid], self._names[first.metadata.uid] = theirs, name  # those that start are alike
        self._pods.setdefault(first.metadata.uid, first)
        return first

    def stale_marks(self) -> list[Pod]:
        """Return pods that are marked, and are not to be removed."""
        return [self._pods[uid] for uid in self._marked & self._live.keys() if uid not in self._leaving]

    def target(self, actual: int, change: int) -> int | None:
        """Return the size to write where the present one is `actual`; None where it is as it should be.

        ActuatorError where it is neither that nor what was observed.
        """
        if actual == self._size + change:
            return None
        if actual != self._size:
            raise ActuatorError(f"{self.name}: its size was set to {actual}, and {self._size} was observed")
        return actual + change

    def added(self, name: str) -> None:
        """Take note that a replica was ordered."""
        self._coming[name] = True
        self._size += 1

    def failed_to_add(self, name: str) -> None:
        """Take note that a replica was not ordered."""
        if not self._coming.get(name, True):
            del self._coming[name]

    def drained(self, name: str, pod: Pod | None) -> None:
        """Take note that a replica is to leave."""
        self._size -= 1
        self._coming.pop(name, None)
        if pod is not None:
            self._marked.add(pod.metadata.uid)


def _cost(pod: Pod) -> int:
    text = pod.metadata.annotations.get(DELETION_COST, "0")
    return int(text) if text.lstrip("-").isdecimal() else 0


def _rank(pod: Pod) -> tuple[bool, int, bool]:
    """Return what a ReplicaSet compares before it compares costs: pods of the least rank are removed first."""
    phase = pod.status.phase if pod.status.phase in _PHASES else "Unknown"
    return bool(pod.spec.node_name), _PHASES.index(phase), pod.is_ready
