"""Settings of a machine that has some ranks of a worker, beside the machine of the worker's own process."""

from pathlib import Path

from pydantic import Field

from pdserve.settings.config import MAX_RANKS
from pdserve.settings.process import ProcessConfig


class WorkerNodeConfig(ProcessConfig):
    """Settings of such a machine. The worker's own process has all others."""

    kind = "worker-node"

    master_addr: str = Field(min_length=1, description="Host of the worker's own process: its handoff_host.")
    master_port: int = Field(ge=1, le=65535, description="Port there, the worker's master_port.")
    node_rank: int = Field(ge=1, lt=MAX_RANKS, description="Number of this machine among the worker's; its own is 0.")
    model: str = Field(description="The worker's model, as this machine has it: a path, or a name as workers take.")
    secret_file: Path = Field(description="The cluster's shared secret; its owner and group alone may read it.")
    handoff_host: str = Field(
        "127.0.0.1",
        description="Address of this machine in the network that carries pages, and here sums of ranks, too.",
    )
    handoff_rdma_devices: tuple[str, ...] = Field(
        (), description="RDMA devices of this machine that carry pages too, as UCX names them; repeatable."
    )
    join_timeout_s: float = Field(
        600.0, gt=0.0, le=86_400.0, description="Seconds that the worker's own process has to take this machine in."
    )
    termination_message_file: Path | None = Field(
        None,
        description="File into which the worker's incarnation is written once it is known: on Kubernetes, "
        "/dev/termination-log.",
    )
