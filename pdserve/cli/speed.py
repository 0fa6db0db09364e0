"""`pdserve bench router`: how fast a router decides."""

import json
from typing import Annotated

import typer

from pdserve.cli.output import JsonFile, show


def bench_router(
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 64,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests placed.")] = 2000,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    json_file: JsonFile = None,
) -> None:
    """Measure decisions per second of one core, for each policy, without network or engine."""
    from pdserve.bench.tables import Column, Sheet
    from pdserve.experiments.router_speed import RouterSpeed
    from pdserve.router.policies import POLICIES

    columns = (Column("policy", is_text=True), Column("placements/s"), Column("rest of a request", "us"))
    found = {policy: RouterSpeed(policy, prefill, decode, prompt).measure(requests) for policy in POLICIES}
    rows = [(policy, f"{rate:,.0f}", f"{rest_us:.0f}") for policy, (rate, rest_us) in found.items()]
    text = json.dumps({name: {"placements_per_s": rate, "rest_us": rest} for name, (rate, rest) in found.items()})
    title = f"{prefill} + {decode} workers, {requests} requests of {prompt} tokens"
    show(json_file, f"{text}\n", Sheet(title, columns, rows))
