"""Measurements of a running cluster."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.base.errors import CommandError, ConfigError
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    DOORS,
    THIS_MACHINES_ROUTER,
    WORKLOAD_HELP,
    Goodput,
    HttpServer,
    RouterFlags,
    WorkloadFlags,
    checked_rate,
    one_of,
)
from pdserve.cli.results import HtmlFile, JsonFile, fail_unless_right, run, show

if TYPE_CHECKING:
    from pdserve.measure.sessions import Shape as SessionShape
    from pdserve.measure.sessions import TurnRow

_SIZES = WorkloadFlags()


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

    sessions: Annotated[int, typer.Option(help="Sessions of a round.")] = 16
    turns: Annotated[int, typer.Option(help="Turns of a session.")] = 6
    shared_tokens: Annotated[int, typer.Option(help="Of the system prompt that all sessions share.")] = 512
    first_tokens: Annotated[int, typer.Option(help="Of a session's first message.")] = 256
    tool_tokens: Annotated[int, typer.Option(help="That a tool brings to each later turn.")] = 48
    answer_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 32
    pause: Annotated[float, typer.Option(help="Seconds that a tool runs, on average.")] = 0.5
    branches: Annotated[float, typer.Option(help="Share of the sessions that begin as a branch of another one.")] = 0.25

    def shape(self) -> "SessionShape":
        from pdserve.measure.sessions import Shape

        given = asdict(self)
        shape = Shape(pause_s=given.pop("pause"), **given)
        shape.check()
        return shape


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
