"""Call an internal port as an operator of the cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from pdserve import rpc
from pdserve.certificates import Part
from pdserve.credentials import Credentials

CALL_TIMEOUT_S = 10.0


class OperatorClient:
    """Calls of one internal port, which raise grpc.aio.AioRpcError.

    Each call dials: so it shows the certificate that is there by then, and what runs on an earlier connection goes on.
    """

    def __init__(self, address: str, credentials: Credentials, listener: Part) -> None:
        self.address = address
        self._credentials = credentials
        self._listener = listener

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

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
        async with self._credentials.channel(self.address, self._listener) as channel:
            yield channel, await rpc.identify(channel, secret, method, timeout_s, wait_for_ready=wait_for_ready)


def operator_credentials(secret_file: Path, identity_dir: Path | None) -> Credentials:
    """Read what an operator shows; ConfigError names the setting that is refused."""
    return Credentials.read(secret_file, identity_dir, Part.OPERATOR)
