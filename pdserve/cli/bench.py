"""Measurements of a running cluster, of clusters that are started for them, and of a router's processes."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdserve.base.errors import CommandError, ConfigError
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    APIS,
    DEFAULT_MODEL,
    DOORS,
    THIS_MACHINES_ROUTER,
    WORKLOAD_HELP,
    Goodput,
    HttpServer,
    KnownRequestFlags,
    LoadFlags,
    Model,
    OwnClusterFlags,
    Placements,
    RouterFlags,
    WorkloadFlags,
    checked_rate,
    one_of,
)
from pdserve.cli.results import HtmlFile, JsonFile, fail_unless_right, report, run, show

if TYPE_CHECKING:
    from pdserve.measure.frontend import Load as FrontendLoad
    from pdserve.measure.outcomes import Objective
    from pdserve.measure.overload import Findings
    from pdserve.measure.sessions import Shape as SessionShape
    from pdserve.measure.sessions import TurnRow

_SIZES, _SHORT_SIZES = WorkloadFlags(), WorkloadFlags(num_prompts=2000, scale=0.125, max_length=1024)
_LOADS, _SHORT_LOADS = LoadFlags(), LoadFlags(seconds=40)
_SERVING, _FOUR = OwnClusterFlags(dtype="auto"), OwnClusterFlags(prefill=2, decode=2)
_CHAOS_REQUESTS = KnownRequestFlags(distinct=200, input_len=512, output_len=48)


@grouped_flags
def load(
    more: Annotated[list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="More workloads.")] = None,
    workload: Annotated[list[str] | None, typer.Option(metavar="W", help=f"{WORKLOAD_HELP} Repeatable.")] = None,
    sizes: WorkloadFlags = _SIZES,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests a second on average: traces are stretched to it, others come at random moments. By default "
            "traces keep their times, and others come all at once. Repeatable: each workload is sent at each rate."
        ),
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests under way at once, at most.")] = None,
    goodput: Goodput = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0 takes the likeliest tokens.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from this much probability.")] = 1.0,
    door: Annotated[
        list[str] | None, typer.Option(**DOORS, help="Repeatable: then they take turns. By default grpc.")
    ] = None,
    server: HttpServer = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each workload is sent.")] = 1,
    json_file: JsonFile = None,
    html: HtmlFile = None,
    router: RouterFlags = THIS_MACHINES_ROUTER,
) -> None:
    """Send workloads of random prompts, answered to full length, and measure what a client sees.

    Exit status 1 if a request had no whole answer and was not refused for lack of room either.
    """
    from pdserve.measure.client import Sampling
    from pdserve.measure.load import Load, door_notes, measure_load
    from pdserve.measure.outcomes import parse_objective

    rates = [checked_rate(rate) for rate in request_rate] if request_rate else [None]
    read = [sizes.read(text) for text in (*(workload or ()), *(more or ()))]
    workloads = [(each, rate) for each in read for rate in rates]
    if not workloads:
        raise ConfigError("--workload is needed, for example --workload 16x32x128")
    goal = parse_objective(*goodput or ())
    sampling = Sampling(temperature, top_p, sizes.seed)
    doors = router.doors(door or ["grpc"], server)
    runs = run(measure_load(doors, Load(workloads, goal, sizes.seed, max_concurrency, sampling, rounds)))
    summaries = [each.summary for each in runs]
    notes = [f"goodput counts requests that ended well ({goal})", *door_notes(runs)]
    show(json_file, summaries, "", *notes, results={"objective": goal, "runs": summaries})
    if html is not None:
        from pdserve.measure.html_report import write_report

        write_report(html, ", ".join(each.name for each in read), runs, goal)
    fail_unless_right(summaries)


@dataclass(frozen=True, slots=True)
class SessionFlags:
    """What sessions of agents look like; lengths are means, in tokens."""

    sessions: Annotated[int, typer.Option(min=1, max=10_000, help="Sessions of a round.")] = 16
    turns: Annotated[int, typer.Option(min=1, max=1_000, help="Turns of a session.")] = 6
    shared_tokens: Annotated[int, typer.Option(min=1, help="Of the system prompt that all sessions share.")] = 512
    first_tokens: Annotated[int, typer.Option(min=1, help="Of a session's first message.")] = 256
    tool_tokens: Annotated[int, typer.Option(min=1, help="That a tool brings to each later turn.")] = 48
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32
    pause: Annotated[float, typer.Option(min=0, max=3600, help="Seconds that a tool runs, on average.")] = 0.5
    branches: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the sessions that begin as a branch of another one.")
    ] = 0.25

    def shape(self) -> "SessionShape":
        from pdserve.measure.sessions import Shape

        given = asdict(self)
        return Shape(pause_s=given.pop("pause"), **given)


SESSIONS = SessionFlags()


@grouped_flags
def agents(
    shape: SessionFlags = SESSIONS,
    way: Annotated[
        list[str] | None,
        typer.Option(
            **one_of("unnamed", "named", "prepared"),
            help="Whether turns name their session, and also ask that the next turn is prepared; repeatable. By "
            "default all three.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often sessions are played each way.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the sessions of the first round.")] = 0,
    json_file: JsonFile = None,
    router: RouterFlags = THIS_MACHINES_ROUTER,
) -> None:
    """Play sessions of agents: turns with tools between them, and branches. Measure the turns by their numbers.

    Exit status 1 if a turn had no whole answer.
    """
    from pdserve.measure.load import grpc_client
    from pdserve.measure.sessions import Way, measure_sessions

    asked, ways = shape.shape(), [Way(each) for each in way or ("unnamed", "named", "prepared")]

    async def measure() -> "list[TurnRow]":
        async with grpc_client(*router.router()) as client:
            return await measure_sessions(client, asked, list(dict.fromkeys(ways)), rounds, seed)

    found = run(measure())
    show(json_file, found, "shares are of the prompts' tokens; moved: of the turns")
    if failed := [f"{row.name}: {row.failures}" for row in found if row.failures]:
        raise CommandError(f"turns failed: {'; '.join(failed)}")


@dataclass(frozen=True, slots=True)
class FrontendFlags:
    """Loads of a router's processes: all combinations of what is given."""

    door: Annotated[list[str] | None, typer.Option(**APIS, help="Repeatable; by default all.")] = None
    step_ms: Annotated[list[float] | None, typer.Option(help="Milliseconds of a decode step; repeatable.")] = None
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeatable.")] = None
    output_len: Annotated[list[int] | None, typer.Option(help="Tokens of an answer; repeatable.")] = None
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each stream, after one that is not counted.")] = 4
    num_frontends: Annotated[
        list[int] | None, typer.Option(help="Frontends in processes of their own; 0, the default: none. Repeatable.")
    ] = None

    def loads(self) -> "list[FrontendLoad]":
        from pdserve.measure.frontend import Load
        from pdserve.measure.streams import Api

        doors, counts = map(Api, self.door or Api), self.num_frontends or (0,)
        kinds = product(
            self.step_ms or (20.0, 2.0), doors, self.streams or (64, 256), self.output_len or (64, 8), counts
        )
        return [Load(door, ms / 1e3, num, tokens, self.rounds, count) for ms, door, num, tokens, count in kinds]


Repeats = Annotated[int, typer.Option(min=1, help="Measurements of each, in turn; medians are shown.")]
FRONTENDS = FrontendFlags()


@grouped_flags
def frontend(
    model: Model = DEFAULT_MODEL,
    loads: FrontendFlags = FRONTENDS,
    repeats: Repeats = 1,
    json_file: JsonFile = None,
) -> None:
    """Measure the CPU time that a streamed request takes of a router, with workers that replay known tokens."""
    from pdserve.measure.frontend import PROMPT_WORDS, gains, measure_frontend

    found = run(measure_frontend(model, loads.loads(), repeats, report))
    show(json_file, found, f"Prompts of {PROMPT_WORDS} words", *gains(found))


@grouped_flags
def accuracy(
    own: OwnClusterFlags = _SERVING,
    loads: LoadFlags = _LOADS,
    sizes: WorkloadFlags = _SHORT_SIZES,
    profile: Annotated[
        Path | None, typer.Option(help="Step costs to start from; by default those of OPT-13B on A100.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.measure.outcomes import ANY
    from pdserve.measure.overload import measure_loads
    from pdserve.perfmodel.profile import shipped_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9), ANY)
    spec = own.spec("accuracy", {"placement": "goodput", "profile": profile or shipped_profile()})
    show_findings(json_file, run(measure_loads({"goodput": spec}, trial, report)))


@grouped_flags
def overload(
    own: OwnClusterFlags = _SERVING,
    loads: LoadFlags = _SHORT_LOADS,
    sizes: WorkloadFlags = _SHORT_SIZES,
    placement: Placements = None,
    goodput: Goodput = None,
    json_file: JsonFile = None,
) -> None:
    """Load clusters up to twice their capacity: goodput, what admitted requests attain, how fast others are refused.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.measure.overload import measure_loads

    trial = loads.trial(sizes, (0.5, 0.75, 1.0, 1.5, 2.0), objective_of(goodput))
    policies = placement or ["goodput", "round_robin"]
    specs = {policy: own.spec("overload", {"placement": policy}) for policy in policies}
    show_findings(json_file, run(measure_loads(specs, trial, report)))


def objective_of(goodput: Goodput) -> "Objective | None":
    from pdserve.measure.outcomes import parse_objective

    return parse_objective(*goodput) if goodput and any(goodput) else None


def show_findings(json_file: Path | None, found: "Findings") -> None:
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
    requests = known.requests(own, spec.model)
    verdicts = [run(run_chaos(trial, requests, report)) for trial in trials]
    results = [verdict.result for verdict in verdicts]
    show(json_file, results, "", *(problem for verdict in verdicts for problem in verdict.tally.problems))
    if not all(verdict.is_clean for verdict in verdicts):
        raise CommandError("not every request was answered as it had to be, or pages were not given back")
