"""What doors may show of the router itself."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.metrics_server import Collect


@dataclass(frozen=True, slots=True)
class RouterState:
    """Looked at whenever somebody asks."""

    is_live: Callable[[], bool]
    is_ready: Callable[[], bool]  # some pair of workers serves, or did lately
    collect: Collect | None  # metrics; None: they are turned off
