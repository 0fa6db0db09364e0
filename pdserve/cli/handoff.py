"""`pdserve bench handoff`: what moving pages costs beside the bytes."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pdserve.cli.output import JsonFile, show

TINY_BYTES = 64  # a page of next to nothing: what is left is the price of a page


def bench_handoff(
    page_bytes: Annotated[int, typer.Option(min=8, help="Bytes of a page.")] = 368640,
    pages: Annotated[list[int] | None, typer.Option(min=1, help="Pages of a copy; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Copies of each; medians are shown.")] = 20,
    tcp: Annotated[bool, typer.Option("--tcp", help="Let UCX use TCP alone.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Write pages from one process into another with NIXL, and show what each page costs."""
    from pdserve.bench.tables import Column, Sheet
    from pdserve.kvtransfer.trial import measure

    columns = (
        Column("page bytes"),
        Column("pages", "written in one copy"),
        Column("ask", "until a copy is asked for", rank=3),
        Column("post", "until it is posted", rank=1),
        Column("post CPU", "thread time of that", rank=2),
        Column("digest", "at one end", rank=1),
        Column("landed", "until the last byte is there"),
        Column("MB/s"),
    )
    counts = pages or [1, 16, 64, 256]
    costs = [cost for size in (TINY_BYTES, page_bytes) for cost in measure(size, counts, repeats, tcp=tcp)]
    rows = []
    for cost in costs:
        times = (cost.ask_us, cost.post_us, cost.post_cpu_us, cost.digest_us, cost.landed_us)
        cells = (f"{cost.page_bytes:,}", str(cost.num_pages), *(f"{us:.2f}" for us in times))
        rows.append((*cells, f"{cost.bytes_per_s / 1e6:,.0f}"))
    title = f"NIXL between two processes, {'TCP' if tcp else 'lane chosen by UCX'}; times are per page, in us"
    show(json_file, json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", Sheet(title, columns, rows))
