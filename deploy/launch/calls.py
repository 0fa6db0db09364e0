"""Call an internal port as an operator of the cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import ClassVar, Self

import grpc

from pdserve import rpc
from pdserve.certificates import Part
from pdserve.credentials import Credentials

CALL_TIMEOUT_S = 10.0


class OperatorClient:
    """Calls of one internal port, which raise grpc.aio.AioRpcError.

    Each call dials: so it shows the certificate that is there by then, and what runs on an earlier connection goes on.
    """

    listener: ClassVar[Part]  # whose port it is

    def __init__(self, address: str, secret_file: Path, identity_dir: Path | None = None) -> None:
        """ConfigError names the setting of the credentials that is refused."""
        self.address = address
        self._credentials = Credentials.read(secret_file, identity_dir, Part.OPERATOR)

    def at(self, address: str) -> Self:
        """Return a connection to another port of the same kind, with the same credentials."""
        other = copy(self)
        other.address = address
        return other

    @asynccontextmanager
    async def calling(
        self, method: str, timeout_s: float | None = CALL_TIMEOUT_S, *, wait_for_ready: bool = False
    ) -> AsyncIterator[tuple[grpc.aio.Channel, rpc.Metadata]]:
        """Yield a connection, and the metadata of one call of a method, service/name, that is to be made there."""
        method, secret = f"/pdserve.v1.{method}", self._credentials.secret
        async with self._credentials.channel(self.address, self.listener) as channel:
            yield channel, await rpc.identify(channel, secret, method, timeout_s, wait_for_ready=wait_for_ready)
