"""What doors may show of the router itself."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdserve.metrics_server import Collect
from pdserve.proto.v1 import admin_pb2 as admin


@dataclass(frozen=True, slots=True)
class RouterState:
    """Looked at whenever somebody asks."""

    is_live: Callable[[], bool]
    is_ready: Callable[[], bool]  # some pair of workers serves, or did lately
    collect: Collect | None  # metrics; None: they are turned off
    live: Callable[[admin.GetLiveRequest], Awaitable[admin.GetLiveResponse]]  # what there is to watch
