"""The actuators that a policy may name, with their settings."""

from typing import Annotated, Literal

from pydantic import Field

from pdserve.autoscaler.section import DURATION, Section

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
Amount = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]


class _Ordering(Section):
    """What takes orders."""

    timeout_s: Annotated[float, Field(gt=0, le=3600, strict=True), DURATION] = Field(
        default=10.0,
        description="Time in which an order is to be taken on; later it counts as failed, and is given again.",
    )


class ProcessActuator(_Ordering):
    """Processes on this machine, kept by `pdserve up`."""

    kind: Literal["process"] = Field(default="process", description="Processes on this machine, kept by `pdserve up`.")


class RayActuator(_Ordering):
    """Ray: an actor for each worker, which owns the worker's process."""

    kind: Literal["ray"] = Field(
        default="ray", description="Actors of a Ray cluster, each of which owns a worker's process."
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Address of the Ray cluster; by default Ray looks for it.",
    )
    namespace: Name = Field(
        default="pdserve", description="Ray namespace of the actors, one for each cluster of pdserve."
    )
    resources_per_device: dict[Name, Amount] = Field(
        {"GPU": 1.0},
        min_length=1,
        max_length=16,
        description="Ray resources that a device of a replica takes, by name: GPU, CPU or a custom one. A replica of "
        "several devices gets them on one node.",
    )
    request_nodes: bool = Field(
        default=True, description="Whether Ray's autoscaler is asked for nodes ahead of the actors."
    )


class ScaleTarget(Section):
    """A Deployment of Kubernetes whose scale is set; of no other workload can the pod be chosen that is removed."""

    name: Name = Field(description="Its name.")


class KubernetesActuator(_Ordering):
    """Kubernetes: the scale subresource of one workload for each pool."""

    kind: Literal["kubernetes"] = Field(
        default="kubernetes", description="Pods of two deployments of Kubernetes, whose scale is set."
    )
    namespace: Name = Field(default="default", description="Namespace of both workloads.")
    prefill: ScaleTarget = Field(description="Deployment of the prefill pool.")
    decode: ScaleTarget = Field(description="Deployment of the decode pool.")
    lease: Name = Field(
        default="pdserve-autoscaler",
        description="Name of the Lease whose holder decides, where several autoscalers run.",
    )


class PublishActuator(Section):
    """Nothing is started or ended: the wanted sizes are published for HPA or KEDA to act on."""

    kind: Literal["publish"] = Field(
        default="publish", description="Nobody: `pdserve_desired_replicas` on /metrics is for HPA or KEDA to act on."
    )


Actuator = ProcessActuator | RayActuator | KubernetesActuator | PublishActuator
