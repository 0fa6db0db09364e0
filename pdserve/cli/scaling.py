"""The measurement of a cluster that follows a policy."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import Dtype, Model, Threads, checked_rate, started
from pdserve.cli.results import JsonFile, PlotFile, report, run, show


def scale(
    model: Model,
    policy: Annotated[Path, typer.Option("--policy", help="The policy to follow.")],
    seconds: Annotated[float, typer.Option(min=5, max=86_400, help="Of each of the four phases.")] = 60,
    request_rate: Annotated[float, typer.Option(help="Requests a second at the peak.")] = 2.0,
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 1900,
    output_len: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    max_num_seqs: Annotated[
        int, typer.Option(min=2, help="Sequences of a worker: with few, a pool fills before the processor does.")
    ] = 4,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests of a phase; they are sent in turn.")] = 30,
    dtype: Dtype = "float32",
    num_threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Of the requests and their times.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Let a local cluster scale under a load that rises, turns from prompts to answers, and falls.

    The requests have the policy's objectives. Each answer is checked against one engine alone.
    """
    from pdserve.autoscaler.loading import load
    from pdserve.autoscaler.process import sizes_at_start
    from pdserve.errors import CommandError
    from pdserve.measure.objectives import Objective
    from pdserve.measure.scale import ScalePlan, known, measure_scale, phases, plot, scale_table

    objectives, sizes = load(policy).objectives, sizes_at_start(policy)
    flags = {"dtype": dtype, "num_threads": num_threads, "max_num_seqs": max_num_seqs}
    patience = {"max_hold_s": objectives.ttft_s}  # requests wait while pools grow
    spec = started("scale", model, seed, sizes.prefill, sizes.decode, **flags)
    spec = replace(spec, router_flags=patience, max_workers=sizes.max_workers, autoscaling=policy.absolute())
    load_phases = phases(checked_rate(request_rate), input_len, output_len)
    plan = ScalePlan(load_phases, seconds, Objective(objectives.ttft_s, objectives.tpot_s), distinct, seed)
    report("computing the right answers")
    found = run(measure_scale(spec, plan, known(plan, spec.model, dtype), report))
    show(json_file, found, scale_table(found))
    if plot_file is not None:
        plot(found, plot_file)
    ended = [outcome for outcomes in found.outcomes for outcome in outcomes]
    if any(outcome.wrong or (outcome.status != "OK" and not outcome.is_refused) for outcome in ended):
        raise CommandError("not every request was answered with the right tokens, or refused")
