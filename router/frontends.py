"""A router's frontends: the streams that they attach with, at the internal port.

Invariant: when a frontend's stream ends, its requests are cancelled, and nothing of them is left here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

import grpc

from pdserve.net.rpc import AnyContext, abort
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.router.frontend.channel import METHOD, SAID_GOODBYE, SERVICE, Abort
from pdserve.router.frontend_link import FrontendLink
from pdserve.router.local_backend import LocalBackend

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at whether the router serves, which depends on time too
PINGS_EVERY = 10  # looks; a frontend may leave `frontend_link.MAX_UNANSWERED` pings unanswered
SHUTTING_DOWN = "this router is shutting down"


class Frontends:
    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._links: set[FrontendLink] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let frontends attach at a server. Its messages are frames, as bytes."""
        attach: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._attach)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: attach}),))

    def show(self) -> None:
        readiness = self._backend.readiness()
        for link in self._links:
            link.show(readiness)

    def close(self) -> None:
        """End all streams, each after what was posted. Frontends take other requests to another router."""
        for link in self._links:
            link.channel.finish(SHUTTING_DOWN)

    async def watch(self) -> None:
        """Tell frontends what changes, and ping them, until cancelled."""
        while True:
            for look in range(PINGS_EVERY):
                await asyncio.sleep(LOOK_S)
                self.show()
                if look == 0:
                    for link in self._links:
                        link.ping()

    async def _attach(self, requests: AsyncIterator[bytes], context: AnyContext) -> None:
        link = FrontendLink(self._backend, self._abort, self._count)
        link.show(self._backend.readiness())
        self._links.add(link)
        why = "its connection has ended"  # gRPC cancels this call then
        try:
            why = await link.channel.run(partial(anext, requests, None), context.write)
        finally:
            self._links.remove(link)
            self._count()
            link.end()
            name = link.attached.frontend_id if link.attached is not None else "without a name"
            if why not in (SAID_GOODBYE, SHUTTING_DOWN):
                self._backend.num_frontends_lost += 1
                logger.warning("frontend %s is lost: %s", name, why)
        if why != SAID_GOODBYE:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, why)

    def _count(self) -> None:
        """Count those that have said who they are: their endpoints are open."""
        greeted = [link.attached for link in self._links if link.attached is not None]
        self._backend.admin.frontends = [
            admin.FrontendStatus(frontend_id=each.frontend_id, metrics_address=each.metrics_address)
            for each in sorted(greeted, key=lambda each: each.frontend_id)
        ]
        self._backend.shell.note_change()

    def _abort(self, asked: Abort) -> None:
        for link in self._links:
            link.channel.post(asked)
