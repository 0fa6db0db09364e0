"""Which workers may have ranks on several machines (nodes); the others are refused by the setting that does not fit."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.settings.config import WorkerConfig


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
    return None
