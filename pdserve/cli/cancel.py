"""`pdserve bench cancel`: how soon a cancelled request has given everything back."""

import asyncio
import json
from typing import Annotated

import typer

from pdserve.cli.options import Dtype
from pdserve.cli.output import JsonFile, show


def bench_cancel(
    model: Annotated[str, typer.Argument(help="A path, or a name from the catalog.")],
    count: Annotated[int, typer.Option(min=1, help="Requests cancelled at each moment.")] = 50,
    prompt: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt; computing it should take over a second.")
    ] = 3000,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 900,
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of the prompts and the moments.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Cancel requests on an idle local cluster, while they are computed and while they decode."""
    from pdserve.bench.outcomes import percentile
    from pdserve.bench.tables import Column, Sheet
    from pdserve.checkpoint.open import open_checkpoint
    from pdserve.cli.cancel_run import CancelPlan, measure_cancels
    from pdserve.cli.models import fetched
    from pdserve.launch.plan import ClusterSpec

    path = fetched(model)
    flags = {"dtype": dtype, "max_num_batched_tokens": 64}
    spec = ClusterSpec(str(path), "cancel", name=f"cancel-{seed}", worker_flags=flags)
    plan = CancelPlan(count, prompt, answer, open_checkpoint(path).config.vocab_size, seed)
    times = asyncio.run(measure_cancels(spec, plan)).freed_s
    texts, numbers = ("moment", "pool"), ("cancels", "p50", "p99", "max")
    columns = [*(Column(name, is_text=True) for name in texts), *map(Column, numbers)]
    rows = [
        (moment, pool, f"{len(seconds)}", *(f"{percentile(seconds, share):.2f}" for share in (0.5, 0.99, 1.0)))
        for moment, pools in times.items()
        for pool, seconds in pools.items()
    ]
    sheet = Sheet("seconds from a cancel until a pool holds nothing, as the router's status tells", columns, rows)
    show(json_file, json.dumps(times, indent=2) + "\n", sheet)
