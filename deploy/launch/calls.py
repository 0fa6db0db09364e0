"""Call an internal port as somebody who knows the cluster's secret."""

from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from pdserve import rpc

CALL_TIMEOUT_S = 10.0


class SecretClient:
    """A connection to one internal port. Calls raise grpc.aio.AioRpcError."""

    def __init__(self, address: str, secret_file: Path) -> None:
        self._secret = rpc.read_secret(secret_file)
        self.channel = grpc.aio.insecure_channel(address, options=rpc.channel_options(rpc.INTERNAL_MESSAGE_BYTES))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def identify(
        self, method: str, timeout_s: float | None = None, *, wait_for_ready: bool = False
    ) -> rpc.Metadata:
        """Return the metadata of one call of a method, service/name, to be made at once.

        Another process at that address, started meanwhile, would refuse it.
        """
        method = f"/pdserve.v1.{method}"
        return await rpc.identify(self.channel, self._secret, method, timeout_s, wait_for_ready=wait_for_ready)
