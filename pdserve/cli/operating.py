"""Commands that change a cluster while it serves (roles, drains), and that make its keys and certificates."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pdserve.base.errors import ConfigError, echo
from pdserve.base.ids import WorkerId
from pdserve.base.roles import Role
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import THIS_MACHINES, OperatorFlags

if TYPE_CHECKING:
    from pdserve.net.operator_client import AdminClient
    from pdserve.proto.v1 import admin_pb2 as admin

Result = TypeVar("Result")


def new_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is.")],
    name: Annotated[str, typer.Option("--id", help="Names the key in the file.")] = "key",
) -> None:
    """Make an API key: print it once, and below it what the router's `api_keys_file` is to have for it.

    Only the key's hash stands in the file. To revoke a key take its line out; routers read the file again at once.
    """
    from pydantic import TypeAdapter, ValidationError

    from pdserve.router.frontend.clients import TenantName
    from pdserve.router.frontend.clients import new_key as made

    try:
        TypeAdapter(TenantName).validate_python(tenant)
    except ValidationError as error:
        raise ConfigError(f"TENANT: {tenant!r} is refused: 1 to 64 printable ASCII characters are needed") from error
    key, digest = made()
    typer.echo(key)
    typer.echo(f"tenants:\n  {tenant}:\n    keys:\n      - {{id: {name}, sha256: {digest}}}", err=True)


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if it is not there.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address by which clients reach a router; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=825, help="How long the certificates are valid.")] = 90,
) -> None:
    """Make certificates for a cluster: DIR/router, DIR/worker and DIR/operator for `--identity-dir`, DIR/public for
    clients, and the authority that signs them.

    Where DIR holds an authority, it signs new ones in place of those that are there: running processes read them.
    Keep DIR/ca.key away from the cluster.
    """
    from pdserve.launch.authority import write_certificates

    write_certificates(folder, host or (), days)
    typer.echo(f"{folder}: ca.crt, and certificates for {days} days in router, worker, operator and public")


WorkerName = Annotated[str, typer.Argument(metavar="WORKER", help="Name of the worker.")]


@grouped_flags
def role(
    worker: WorkerName,
    wanted: Annotated[Role, typer.Argument(metavar="prefill|decode|mixed", help="What routers shall place on it.")],
    force: Annotated[
        bool, typer.Option("--force", help="Even if it leaves no worker that computes prompts, or none that decodes.")
    ] = False,
    cluster: OperatorFlags = THIS_MACHINES,
) -> None:
    """Give a worker another role while it serves. Nothing is loaded again; what it was given before, it serves.

    One router is asked; all of them follow what the worker reports. A worker that is started again has the role that
    it was configured with.
    """

    async def work(client: "AdminClient") -> int:
        await _known(client, worker)
        return await client.set_role(WorkerId(worker), wanted, force=force)

    epoch = _operate(cluster, work)
    typer.echo(f"{worker} is a {wanted} worker (epoch {epoch})")


@grouped_flags
def drain(worker: WorkerName, cluster: OperatorFlags = THIS_MACHINES) -> None:
    """Let a worker finish what it has and end; show what is left until it is gone. Ctrl-C leaves it draining.

    `pdserve up` starts it again a second later: with nothing cached, and with the role that it was configured with.
    """

    async def work(client: "AdminClient") -> None:
        before = await _known(client, worker)
        await client.drain(WorkerId(worker))
        shown = ""
        async for status in client.watch():
            present = _process(status, worker)
            if present is None or present.registration.incarnation != before.registration.incarnation:
                typer.echo(f"{worker} is gone")
                return
            load = present.load
            left = f"{load.num_running} sequences run, {load.num_waiting} wait, {load.num_handoffs} hand-offs are open"
            if left != shown:
                typer.echo(f"{worker}: {left}")
            shown = left

    _operate(cluster, work)


@grouped_flags
def undrain(worker: WorkerName, cluster: OperatorFlags = THIS_MACHINES) -> None:
    """Let a worker that drains take requests again, as long as it has not ended.

    A drain that a signal began, or the worker itself for lack of pages, goes on.
    """

    async def work(client: "AdminClient") -> None:
        await _known(client, worker)
        await client.drain(WorkerId(worker), cancel=True)

    _operate(cluster, work)
    typer.echo(f"{worker} takes requests")


def _operate(cluster: OperatorFlags, work: "Callable[[AdminClient], Awaitable[Result]]") -> Result:
    from pdserve.cli.stream import naming

    async def run() -> Result:
        router = cluster.client()
        with naming(router.address):
            return await work(router)

    return asyncio.run(run())


async def _known(client: "AdminClient", worker: str) -> "admin.WorkerStatus":
    """Return a worker's state; ConfigError says which workers there are if it is none of them."""
    status = await client.status()
    found = _process(status, worker)
    if found is None:
        names = ", ".join(sorted(each.registration.worker_id for each in status.workers)) or "none"
        raise ConfigError(f"WORKER: {echo(worker, repr)} is not attached to the router; its workers: {names}")
    return found


def _process(status: "admin.ClusterStatus", worker: str) -> "admin.WorkerStatus | None":
    return next((each for each in status.workers if each.registration.worker_id == worker), None)
