"""What is asked of Kubernetes' API, as rights of an account: the chart grants them, and `pdserve doctor` asks for them.

Objects of deployments and of the Lease are named in the chart; a right to create cannot be limited to names.
"""

from typing import NamedTuple


class Right(NamedTuple):
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
    Right(("get",), "pdserve.dev", "autoscalingpolicies"),
    Right(("patch",), "pdserve.dev", "autoscalingpolicies/status"),
)
ACTUATOR = (
    Right(("list", "patch"), "", "pods"),
    Right(("get", "update"), "apps", "deployments/scale"),
    Right(("create", "get", "update"), "coordination.k8s.io", "leases"),
    Right(("create",), "events.k8s.io", "events"),
)
