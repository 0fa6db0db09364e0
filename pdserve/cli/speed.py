"""`pdserve bench router`: how fast a router decides."""

from typing import Annotated

import typer


def bench_router(
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 64,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests placed.")] = 2000,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
) -> None:
    """Measure decisions per second of one core, for each policy, without network or engine."""
    from rich.console import Console
    from rich.table import Table

    from pdserve.router.policies import POLICIES
    from pdserve.router.speed import RouterSpeed

    table = Table(title=f"{prefill} + {decode} workers, {requests} requests of {prompt} tokens")
    for column in ("policy", "placements/s", "rest of a request, µs"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in POLICIES:
        rate, rest_us = RouterSpeed(policy, prefill, decode, prompt).measure(requests)
        table.add_row(policy, f"{rate:,.0f}", f"{rest_us:.0f}")
    Console().print(table)
