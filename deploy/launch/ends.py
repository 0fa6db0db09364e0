"""Report to a router that a worker's process has ended.

The report is the proof that nothing of that process can write into another worker's pages any more.
"""

import logging

import grpc

from pdserve.ids import WorkerId
from pdserve.launch.admin import AdminClient
from pdserve.launch.supervisor import ChildExit

REPORT_TIMEOUT_S = 60.0
NO_ROUTER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

logger = logging.getLogger(__name__)


async def report_end(router: AdminClient, exit_: ChildExit) -> None:
    """Report an end, once a router is there; after a minute without one leave it at that."""
    name = WorkerId(exit_.spec.name)
    try:
        await router.report_gone(name, exit_.incarnation, REPORT_TIMEOUT_S, from_outside=exit_.from_outside)
    except grpc.aio.AioRpcError as error:  # the worker's next incarnation is the same proof
        if error.code() not in NO_ROUTER:
            logger.error("the end of %s is not reported: %s, %s", name, error.code().name, error.details())
