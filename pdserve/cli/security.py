"""Commands that make what a cluster's ports ask for: API keys of clients, and certificates of processes."""

from pathlib import Path
from typing import Annotated

import typer


def new_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is.")],
    name: Annotated[str, typer.Option("--id", help="Names the key in the file.")] = "key",
) -> None:
    """Make an API key: print it once, and below it what the router's `api_keys_file` is to have for it.

    Only the key's hash stands in the file. To revoke a key take its line out; routers read the file again at once.
    """
    from pdserve.router.frontend.api_keys import new_key as made

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
