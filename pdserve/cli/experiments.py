"""Measurements of clusters that are started for them: under load, under faults, and while an operator changes them."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    DEFAULT_MODEL,
    Dtype,
    Goodput,
    KnownRequestFlags,
    LoadFlags,
    Model,
    OwnClusterFlags,
    Placements,
    Threads,
    WorkloadFlags,
    checked_rate,
)
from pdserve.cli.results import HtmlFile, JsonFile, draw, fail_unless_right, report, run, show, writable
from pdserve.errors import CommandError, ConfigError
from pdserve.router.config import PolicyName

if TYPE_CHECKING:
    from pdserve.capacity.loads import Findings
    from pdserve.measure.outcomes import Objective

Seed = Annotated[int, typer.Option(help="Seed of the requests and their times.")]
StepMs = Annotated[
    float, typer.Option(min=0, max=10_000, help="Least time of a step, as if each worker had a device; 0: as it comes.")
]
_SIZES = WorkloadFlags(num_prompts=2000, scale=0.125, max_length=1024)
_LOADS, _SHORT_LOADS = LoadFlags(), LoadFlags(seconds=40)
_SERVING = OwnClusterFlags(dtype="auto")
_CHECKED, _LONE_THREAD = OwnClusterFlags(), OwnClusterFlags(num_threads=1)
_FOUR, _FOUR_LONE_THREADS = OwnClusterFlags(prefill=2, decode=2), OwnClusterFlags(prefill=2, decode=2, num_threads=1)
_CHAOS_REQUESTS = KnownRequestFlags(distinct=200, input_len=512, output_len=48)
_MOVED_REQUESTS, _DRAINED_REQUESTS = KnownRequestFlags(), KnownRequestFlags(distinct=5, input_len=64, output_len=500)
_SCALED_REQUESTS = KnownRequestFlags(distinct=30, input_len=1900, output_len=96)


@grouped_flags
def accuracy(
    own: OwnClusterFlags = _SERVING,
    loads: LoadFlags = _LOADS,
    sizes: WorkloadFlags = _SIZES,
    profile: Annotated[
        Path | None, typer.Option(help="Step costs to start from; by default those of OPT-13B on A100.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.capacity.loads import measure_loads
    from pdserve.measure.outcomes import ANY
    from pdserve.perfmodel.profile import shipped_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9), ANY)
    spec = own.spec("accuracy", {"placement": "goodput", "profile": profile or shipped_profile()})
    _show(json_file, run(measure_loads({"goodput": spec}, trial, report)))


@grouped_flags
def overload(
    own: OwnClusterFlags = _SERVING,
    loads: LoadFlags = _SHORT_LOADS,
    sizes: WorkloadFlags = _SIZES,
    placement: Placements = None,
    goodput: Goodput = None,
    json_file: JsonFile = None,
) -> None:
    """Load clusters up to twice their capacity: goodput, what admitted requests attain, how fast others are refused.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.capacity.loads import measure_loads

    trial = loads.trial(sizes, (0.5, 0.75, 1.0, 1.5, 2.0), _objective(goodput))
    policies = placement or ["goodput", "round_robin"]
    specs = {policy: own.spec("overload", {"placement": policy}) for policy in policies}
    _show(json_file, run(measure_loads(specs, trial, report)))


@grouped_flags
def simulator(
    own: OwnClusterFlags = _SERVING,
    loads: LoadFlags = _LOADS,
    sizes: WorkloadFlags = _SIZES,
    placement: Annotated[PolicyName, typer.Option(help="How requests are placed.")] = "goodput",
    goodput: Goodput = None,
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also write the step costs that the router has learnt.", callback=writable("--profile")),
    ] = None,
) -> None:
    """Serve a load live, and simulate the same requests with the step times that the live router has learnt.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.capacity.loads import measure_simulator
    from pdserve.perfmodel.profile import write_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9, 1.2), _objective(goodput))
    spec = own.spec("simulator", {"placement": placement})
    found, learnt = run(measure_simulator(spec, placement, trial, report))
    if profile is not None:
        write_profile(profile, learnt)
    _show(json_file, found)


def _objective(goodput: Goodput) -> "Objective | None":
    from pdserve.measure.outcomes import parse_objective

    return parse_objective(*goodput) if goodput and any(goodput) else None


def _show(json_file: Path | None, found: "Findings") -> None:
    show(json_file, found.runs, found.title, results=found)
    fail_unless_right(found.runs)


@grouped_flags
def chaos(
    own: OwnClusterFlags = _FOUR,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests sent.")] = 1000,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 8,
    known: KnownRequestFlags = _CHAOS_REQUESTS,
    kill_every: Annotated[float, typer.Option(min=0, help="Seconds between two kills; 0: none.")] = 5.0,
    victims: Annotated[
        Literal["workers", "router"], typer.Option(help="What is killed; the router with --num-frontends alone.")
    ] = "workers",
    num_frontends: Annotated[int, typer.Option(min=0, help="Frontends in processes of their own.")] = 0,
    freeze_for: Annotated[float | None, typer.Option(help="Freeze for so many seconds instead of killing.")] = None,
    test_fail_copies: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the copies between workers that are made to fail.")
    ] = 0.0,
    baseline: Annotated[int, typer.Option(min=0, help="Requests sent without any fault first, to compare.")] = 0,
    mover: Annotated[str | None, typer.Option(help="The workers' --mover.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Kill workers or the router of a local cluster while requests run; check each answer against one engine alone.

    Fails unless every request was answered with the right tokens and every page was free in the end.
    """
    from pdserve.measure.chaos import ChaosTrial, FaultPlan, run_chaos

    if victims == "router" and not num_frontends:
        raise ConfigError("--victims: without --num-frontends a router's death ends its clients' streams")
    spec = replace(own.spec("chaos", mover=mover), num_frontends=num_frontends)
    faulty = own.spec("chaos", mover=mover, test_fail_copies=test_fail_copies or None)
    faulty = replace(faulty, num_frontends=num_frontends)
    faults = FaultPlan(kill_every, freeze_for, known.seed, victims) if kill_every else None
    trials = [ChaosTrial("chaos", faulty, num_prompts, max_concurrency, faults)]
    if baseline:
        trials.insert(0, ChaosTrial("faultless", spec, baseline, max_concurrency, None))
    requests = known.requests(spec.model, own.dtype)
    verdicts = [run(run_chaos(trial, requests, report)) for trial in trials]
    results = [verdict.result for verdict in verdicts]
    show(json_file, results, "", *(problem for verdict in verdicts for problem in verdict.tally.problems))
    if not all(verdict.is_clean for verdict in verdicts):
        raise CommandError("not every request was answered as it had to be, or pages were not given back")


@grouped_flags
def cancel(
    own: OwnClusterFlags = _CHECKED,
    count: Annotated[int, typer.Option(min=1, help="Requests cancelled at each moment.")] = 50,
    input_len: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt; computing it should take over a second.")
    ] = 3000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 900,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Cancel requests on an idle local cluster, while they are computed and while they decode.

    Shows how long each pool held anything of them, as the router's status says.
    """
    from pdserve.measure.cancel import measure_cancels

    spec = own.spec("cancel", max_num_batched_tokens=64)
    found = run(measure_cancels(spec, count, input_len, output_len, seed))
    show(json_file, found)


@grouped_flags
def moves(
    own: OwnClusterFlags = _FOUR_LONE_THREADS,
    count: Annotated[int, typer.Option("--moves", min=0, help="Answers to move.")] = 200,
    flips: Annotated[int, typer.Option(min=0, help="Changes of a worker's role.")] = 20,
    drains: Annotated[int, typer.Option(min=0, help="Drains of each worker, which then starts again.")] = 2,
    cycles: Annotated[int, typer.Option(min=0, help="Workers that are started, and drained once they serve.")] = 0,
    load: Annotated[float, typer.Option(min=0.01, max=2, help="Share of the capacity that is sent.")] = 0.7,
    pause: Annotated[float, typer.Option(min=0.01, help="Mean seconds between flips, drains and cycles.")] = 2.0,
    within: Annotated[float, typer.Option(min=1, help="Seconds within which all of it has to be done.")] = 240.0,
    calibration: Annotated[
        float, typer.Option(min=2, help="Seconds of full load before, to find the capacity.")
    ] = 15.0,
    known: KnownRequestFlags = _MOVED_REQUESTS,
    step_ms: StepMs = 0.0,
    max_num_seqs: Annotated[int | None, typer.Option(min=2, help="Sequences of a worker.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Flip roles, move answers, drain, add and remove workers of a local cluster under load; check each answer.

    Fails unless all of it was done, every answer has the tokens of one engine alone, and every page is free in the end.
    """
    from pdserve.measure.moves import OperationsPlan, run_moves

    spec = own.spec("moves", max_num_seqs=max_num_seqs, test_step_s=step_ms / 1e3 or None)
    spec = replace(spec, max_workers=spec.num_workers + 1)
    operations = OperationsPlan(flips, count, drains, cycles, pause, within, known.seed)
    requests = known.requests(spec.model, own.dtype)
    verdict = run(run_moves(spec, load, calibration, operations, requests, report))
    show(json_file, [verdict.result], "", *verdict.tally.problems, *verdict.record.refused, results=verdict.result)
    if not verdict.is_clean:
        raise CommandError("not all of it was done, or not every answer was right, or pages were not given back")


@grouped_flags
def drain(
    model: Model = DEFAULT_MODEL,
    answers: Annotated[int, typer.Option(min=1, help="Answers that run.")] = 50,
    known: KnownRequestFlags = _DRAINED_REQUESTS,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Drain a decode worker with many running answers, all of the longest length, while another one can take them.

    Compares how soon it leaves with the time that the pages of its answers take.
    """
    from pdserve.measure.drain import measure_drain

    pages = answers * (2 + (known.input_len + known.output_len) // 16)
    own = OwnClusterFlags(model, decode=2, num_threads=1, dtype=dtype)
    spec = own.spec("drain", max_num_seqs=max(64, answers), num_pages=pages)
    requests = known.requests(spec.model, dtype, are_answers_equal=True)
    found = run(measure_drain(spec, requests, answers, report))
    show(json_file, [found], "", *found.failed, results=found)
    if found.failed or found.left_over:
        raise CommandError("an answer was not as it had to be, or pages were not given back")


@grouped_flags
def conversation(
    own: OwnClusterFlags = _LONE_THREAD,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 8,
    input_len: Annotated[int, typer.Option(min=16, help="Tokens of the last prompt.")] = 4000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 250,
    repeats: Annotated[int, typer.Option(min=1, help="Conversations of each kind.")] = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Hold conversations whose earlier answers are fetched from the decode worker, cached, or computed again."""
    from pdserve.measure import conversation as conversations

    plan = conversations.ConversationPlan(turns, input_len, output_len, repeats, seed)
    found = run(conversations.measure_conversations(own.spec("conversation"), plan, report))
    medians = conversations.medians(found)
    title, notes = "medians of conversations of each kind", conversations.conversation_notes(found)
    show(json_file, medians, title, *notes, results={**asdict(found), "runs": medians})


@grouped_flags
def scale(
    policy: Annotated[Path, typer.Option("--policy", help="The policy to follow.")],
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(min=5, max=86_400, help="Seconds of each of the four phases.")] = 80,
    request_rate: Annotated[float, typer.Option(help="Requests a second at the peak.")] = 1.2,
    max_num_seqs: Annotated[
        int,
        typer.Option(min=2, help="Most sequences of a worker; few of them fill a pool before the processor is busy."),
    ] = 4,
    step_ms: StepMs = 0.0,
    known: KnownRequestFlags = _SCALED_REQUESTS,
    dtype: Dtype = "float32",
    num_threads: Threads = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Let a local cluster scale under a load that rises, turns from prompts to answers, and falls.

    The requests have the policy's objectives. Each answer is checked against one engine alone.
    """
    from pdserve.autoscaler.actuator import sizes_at_start
    from pdserve.autoscaler.schema import load
    from pdserve.measure import scale as scaling
    from pdserve.measure.outcomes import Objective

    objectives, sizes = load(policy).objectives, sizes_at_start(policy)
    own = OwnClusterFlags(model, sizes.prefill, sizes.decode, num_threads, dtype)
    patience = {"max_hold_s": objectives.ttft_s}  # requests wait while pools grow
    spec = replace(
        own.spec("scale", patience, max_num_seqs=max_num_seqs, test_step_s=step_ms / 1e3 or None),
        max_workers=sizes.max_workers,
        autoscaling=policy.absolute(),
        elsewhere=sizes.elsewhere,
    )
    goal = Objective(objectives.ttft_s, objectives.tpot_s)
    phases = scaling.phases(checked_rate(request_rate), known.input_len, known.output_len)
    plan = scaling.ScalePlan(phases, seconds, goal, known.distinct, known.seed)
    report("computing the right answers")
    found = run(scaling.measure_scale(spec, plan, scaling.known(plan, spec.model, dtype), report))
    results = scaling.phase_results(found)
    title, all_ = (
        f"{seconds:g} s each; {goal}",
        {"runs": results, "moments": found.moments, "decisions": found.decisions},
    )
    table = show(json_file, results, title, *scaling.orders(found), results=all_)
    draw(html, "A policy followed", title, table, scaling.charts(found))
    ended = [outcome for outcomes in found.outcomes for outcome in outcomes]
    if any(outcome.wrong or (outcome.status != "OK" and not outcome.is_refused) for outcome in ended):
        raise CommandError("not every request was answered with the right tokens, or refused")
