"""`pdserve bench cancel`: how soon a cancelled request has given everything back."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import Dtype


def bench_cancel(
    model: Annotated[str, typer.Argument(help="A path, or a name from the catalog.")],
    count: Annotated[int, typer.Option(min=1, help="Requests cancelled at each moment.")] = 50,
    prompt: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt; computing it should take over a second.")
    ] = 3000,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 900,
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of the prompts and the moments.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.", show_default=False)
    ] = None,
) -> None:
    """Cancel requests on an idle local cluster, while they are computed and while they decode."""
    from rich.console import Console
    from rich.table import Table

    from pdserve.bench.outcomes import percentile
    from pdserve.checkpoint.open import open_checkpoint
    from pdserve.cli.cancel_run import CancelPlan, measure_cancels
    from pdserve.cli.models import fetched
    from pdserve.launch.plan import ClusterSpec

    path = fetched(model)
    flags = {"dtype": dtype, "max_num_batched_tokens": 64}
    spec = ClusterSpec(str(path), "cancel", name=f"cancel-{seed}", worker_flags=flags)
    plan = CancelPlan(count, prompt, answer, open_checkpoint(path).config.vocab_size, seed)
    times = asyncio.run(measure_cancels(spec, plan)).freed_s
    table = Table(title="seconds from a cancel until a pool holds nothing, as the router's status tells")
    for column in ("moment", "pool", "cancels", "p50", "p99", "max"):
        table.add_column(column, justify="left" if column in ("moment", "pool") else "right")
    for moment, pools in times.items():
        for pool, seconds in pools.items():
            shown = (f"{percentile(seconds, share):.2f}" for share in (0.5, 0.99, 1.0))
            table.add_row(moment, pool, f"{len(seconds)}", *shown)
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(times, indent=2) + "\n", encoding="utf-8")
