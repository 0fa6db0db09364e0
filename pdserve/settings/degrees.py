"""Among how many processes a worker's model is divided. What goes with that, and no test has compared, is refused."""

from typing import TYPE_CHECKING

from pdserve.base.values import value

if TYPE_CHECKING:
    from pdserve.settings.config import WorkerConfig


@value
class Degrees:
    """So many ranks hold each layer together, and so many pipeline stages hold the layers one after the other."""

    tensor: int = 1
    pipeline: int = 1
    nodes: int = 1  # machines, with as many ranks each

    @property
    def num_ranks(self) -> int:
        """Return how many processes compute a step."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int:
        """Return how many of these processes share a machine."""
        return self.num_ranks // self.nodes

    def __str__(self) -> str:
        if self.nodes > 1:
            return f"{self.tensor} ranks on {self.nodes} nodes"
        return f"{self.pipeline} pipeline stages" if self.pipeline > 1 else f"{self.tensor} ranks"

    def problem(self, device: str) -> str | None:
        """Return why workers on a device are not divided like this, or None."""
        if self.tensor > 1 and self.pipeline > 1:
            return f"pipeline_parallel_size: {self.pipeline} is not served with tensor_parallel_size {self.tensor} yet"
        if self.pipeline > 1 and device in ("cuda", "interpreter"):
            return f"pipeline_parallel_size: {self.pipeline} is served on CPUs, not on {device}"
        return None


def nodes_problem(worker: "WorkerConfig") -> str | None:
    """Return why a worker's ranks are not on so many machines, or None."""
    degrees = worker.degrees
    if degrees.nodes == 1:
        return None
    named = f"nnodes: {degrees.nodes}"
    if degrees.pipeline > 1:
        return f"{named} is not served with pipeline stages, which pass on what they make in one machine's memory"
    if degrees.tensor % degrees.nodes:
        return f"{named}: tensor_parallel_size {degrees.tensor} gives them different numbers of ranks"
    if worker.rank_memory != "own":
        return f"{named} needs rank_memory own: machines share no memory"
    if worker.dialect_port is not None:
        return f"{named} is not served with dialect_port yet"
    if worker.kv_cache_dtype != "auto" and worker.device in ("cuda", "interpreter"):
        return f"{named} is not served with kv_cache_dtype {worker.kv_cache_dtype} on {worker.device} yet"
    return None
