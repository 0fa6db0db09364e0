"""What is read of Kubernetes' objects, and the rights that this and changing them takes.

Fields that are not named here are dropped as an object is decoded.
"""

from typing import NamedTuple

from msgspec import Struct, field

ROLE_LABEL = "pdserve.dev/role"
GROUP, VERSION, KIND, PLURAL = "pdserve.dev", "v1alpha1", "AutoscalingPolicy", "autoscalingpolicies"  # of policies
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"  # a taint
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
NODES = "pdserve.dev/nodes"  # an annotation: how many pods a worker has
LEADER = "leaderworkerset.sigs.k8s.io/leader-name"  # an annotation of all but the first of them


class Object(Struct, rename="camel", frozen=True):
    """A part of an object; keys are in camelCase."""


class Metadata(Object, frozen=True, omit_defaults=True):
    """What is written back has only the fields that were read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None
    generation: int = 0


class Condition(Object, frozen=True):
    type: str
    status: str


class Terminated(Object, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""  # what it wrote to its termination message file


class ContainerState(Object, frozen=True):
    terminated: Terminated | None = None


class ContainerStatus(Object, frozen=True):
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodSpec(Object, frozen=True):
    node_name: str = ""
    termination_grace_period_seconds: int = 30


class PodStatus(Object, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Object, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def is_ready(self) -> bool:
        return has(self.status.conditions, "Ready")

    @property
    def group_size(self) -> int:
        """How many pods have a part of its worker."""
        given = self.metadata.annotations.get(NODES, "1")
        return int(given) if given.isdecimal() else 1

    @property
    def leader(self) -> str:
        """The first pod of its worker; empty: it is that itself."""
        return self.metadata.annotations.get(LEADER, "")


class Taint(Object, frozen=True):
    key: str


class NodeSpec(Object, frozen=True):
    taints: tuple[Taint, ...] = ()


class NodeStatus(Object, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Node(Object, frozen=True):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def is_ready(self) -> bool:
        return has(self.status.conditions, "Ready")

    @property
    def is_off(self) -> bool:
        """Whether its operator asserts that the machine is off, by Kubernetes' own rule for that."""
        return not self.is_ready and any(taint.key == OUT_OF_SERVICE for taint in self.spec.taints)


class ScaleSpec(Object, frozen=True):
    replicas: int = 0


class ScaleStatus(Object, frozen=True):
    replicas: int = 0
    selector: str = ""


class Scale(Object, frozen=True):
    """The scale subresource of a workload."""

    metadata: Metadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()


class LeaseSpec(Object, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Object, frozen=True):
    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class Anything(Object, frozen=True):
    """An object of which nothing but its metadata is read."""

    metadata: Metadata = Metadata()


class Status(Object, frozen=True):
    """What the API answers where it refuses, and what a watch ends with."""

    code: int = 0
    message: str = ""


class ListMetadata(Object, frozen=True):
    resource_version: str = ""
    continue_: str = field(name="continue", default="")


class PodList(Object, frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: tuple[Pod, ...] = ()


def has(conditions: tuple[Condition, ...], kind: str) -> bool:
    return any(each.type == kind and each.status == "True" for each in conditions)


class Right(NamedTuple):
    """What pdserve asks of the API. The chart grants these rights to an account, and `pdserve doctor` asks for them.

    The chart names the deployments and the Lease; a right to create cannot be limited to names.
    """

    verbs: tuple[str, ...]
    group: str  # empty: core
    resource: str  # with its subresource
    namespace: str = ""  # that is not the cluster's own; `*`: objects of the whole cluster


NODE_LEASES = "kube-node-lease"

WATCHER = (
    Right(("list", "watch"), "", "pods"),
    Right(("get",), "", "nodes", "*"),
    Right(("get",), "coordination.k8s.io", "leases", NODE_LEASES),
)
RESOURCE = (  # where the policy is a custom resource
    Right(("get",), GROUP, PLURAL),
    Right(("patch",), GROUP, f"{PLURAL}/status"),
)
ACTUATOR = (
    Right(("list", "patch"), "", "pods"),
    Right(("get", "update"), "apps", "deployments/scale"),
    Right(("create", "get", "update"), "coordination.k8s.io", "leases"),
    Right(("create",), "events.k8s.io", "events"),
)
