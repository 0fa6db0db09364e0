"""Report to a router that a worker's process has ended.

The report is the proof that nothing of that process can write into another worker's pages any more.
"""

import grpc

from pdserve.ids import WorkerId
from pdserve.launch.admin import AdminClient
from pdserve.launch.supervisor import ChildExit

REPORT_TIMEOUT_S = 60.0


async def report_end(router: AdminClient, exit_: ChildExit) -> None:
    """Report an end, once a router is there; after a minute without one leave it at that."""
    try:
        name = WorkerId(exit_.spec.name)
        await router.report_gone(name, exit_.incarnation, REPORT_TIMEOUT_S, from_outside=exit_.from_outside)
    except grpc.aio.AioRpcError:
        return  # no router is there; the worker's next incarnation is the same proof
