"""`pdserve bench handoff`: what moving pages costs beside the bytes."""

from typing import Annotated

import typer

TINY_BYTES = 64  # a page of next to nothing: what is left is the price of a page


def bench_handoff(
    page_bytes: Annotated[int, typer.Option(min=8, help="Bytes of a page.")] = 368640,
    pages: Annotated[list[int] | None, typer.Option(min=1, help="Pages of a copy; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Copies of each; medians are shown.")] = 20,
    tcp: Annotated[bool, typer.Option("--tcp", help="Let UCX use TCP alone.")] = False,
) -> None:
    """Write pages from one process into another with NIXL, and show what each page costs."""
    from rich.console import Console
    from rich.table import Table

    from pdserve.cli.failure import CommandError
    from pdserve.kvtransfer.trial import CopyFailedError, measure

    table = Table(title=f"NIXL between two processes, {'TCP' if tcp else 'lane chosen by UCX'}; times are per page")
    for column in ("page bytes", "pages", "ask, us", "post, us", "post CPU, us", "digest, us", "landed, us", "MB/s"):
        table.add_column(column, justify="right")
    counts = pages or [1, 16, 64, 256]
    try:
        costs = [cost for size in (TINY_BYTES, page_bytes) for cost in measure(size, counts, repeats, tcp=tcp)]
    except CopyFailedError as error:
        raise CommandError(str(error)) from error
    for cost in costs:
        times = (cost.ask_us, cost.post_us, cost.post_cpu_us, cost.digest_us, cost.landed_us)
        cells = (f"{cost.page_bytes:,}", str(cost.num_pages), *(f"{us:.2f}" for us in times))
        table.add_row(*cells, f"{cost.bytes_per_s / 1e6:,.0f}")
    Console().print(table)
