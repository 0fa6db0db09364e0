"""Around the incoming door: the address that senders dial, and streams from them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.config import WorkerConfig
from pdserve.credentials import Credentials
from pdserve.errors import ConfigError, Refusal
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.proto.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from pdserve.rpc import join_address, split_address

STOP_GRACE_S = 1.0
EVERYWHERE = ("", "0.0.0.0", "::")  # hosts that nobody can dial


def check_addresses(config: WorkerConfig) -> None:
    """Raise ConfigError where senders could not be told where to find this worker, whatever role it is given."""
    address = config.handoff_advertise
    if address is None and config.handoff_host in EVERYWHERE:
        raise ConfigError(f"handoff_advertise: is required where handoff_host is {config.handoff_host!r}")
    host, port = split_address(address or config.handoff_host)
    if not host or (port and not port.isdigit()):
        raise ConfigError(f"handoff_advertise: {address!r} is neither host nor host:port")


def advertised(config: WorkerConfig, bound: str) -> str:
    """Return where senders reach this worker, which listens on the address `bound`."""
    if config.handoff_advertise is None:
        return bound
    host, port = split_address(config.handoff_advertise)
    return join_address(host, int(port or split_address(bound)[1]))


@asynccontextmanager
async def listening(
    servicer: HandoffServicer, config: WorkerConfig, credentials: Credentials, on_denied: Callable[[Refusal], None]
) -> AsyncIterator[str]:
    """Let senders attach for the length of the block; yields the address that they are told."""
    server = credentials.server(on_denied)
    add_HandoffServiceServicer_to_server(servicer, server)
    bound = credentials.listen(server, config.handoff_host, config.handoff_port, "handoff_port")
    await server.start()
    try:
        yield advertised(config, bound)
    finally:
        servicer.close()
        await server.stop(STOP_GRACE_S)
