"""`pdserve sim` and `pdserve plan`: what a cluster could serve, without one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.output import JsonFile, PlotFile

if TYPE_CHECKING:
    from pdserve.capacity.measure import Question
    from pdserve.capacity.shape import Objective
    from pdserve.capacity.workload import Workload

WorkloadText = Annotated[
    str,
    typer.Option(
        help="A trace (.csv of Azure, .jsonl of Mooncake, .json list), a slice that comes with pdserve (azure-conv, "
        "azure-code, mooncake), or random lengths INxOUT or INxOUT~S, with S the deviation of their logarithms.",
        metavar="W",
    ),
]
SloText = Annotated[str, typer.Option(help="Objectives: ttft=MS,tpot=MS.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Step costs; by default OPT-13B on A100.", show_default=False, exists=False)
]
Requests = Annotated[
    int, typer.Option(min=2, help="Most requests to simulate at each rate; what they do not settle is said to be so.")
]
Scale = Annotated[float, typer.Option(min=1e-3, help="Factor for all lengths.")]
OutputScale = Annotated[
    float | None, typer.Option(min=1e-3, help="Factor for outputs, if another.", show_default=False)
]
MaxPrompt = Annotated[int, typer.Option(min=2, help="Longer prompts are cut.")]
Poisson = Annotated[
    bool, typer.Option(help="Random arrivals instead of the trace's, and another order when it is repeated.")
]
Seed = Annotated[int, typer.Option(help="Of random lengths and arrivals.")]
Attainment = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of all requests to serve within both.")]


def sim(
    workload: WorkloadText = "512x128",
    slo: SloText = "ttft=250,tpot=100",
    profile: ProfileFile = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Devices of a prefill worker.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Devices of a decode worker.")] = 1,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill worker's step.")] = 2048,
    decode_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step that mixes prompts and decoding.")] = 512,
    policy: Annotated[list[str] | None, typer.Option(help="Of the router; may be repeated.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second and GPU; none: the highest.")] = None,
    attainment: Attainment = 0.9,
    requests: Requests = 10_000,
    scale: Scale = 1.0,
    output_scale: OutputScale = None,
    max_prompt: MaxPrompt = 1_000_000,
    poisson: Poisson = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Simulate a cluster under load: attainment, goodput, percentiles, utilization."""
    from pdserve.capacity import report
    from pdserve.capacity.measure import measure
    from pdserve.capacity.search import highest_rate
    from pdserve.capacity.shape import Shape
    from pdserve.cli.output import show
    from pdserve.errors import CommandError, ConfigError
    from pdserve.router.policies import POLICIES

    for each in rate or ():
        if not 0 < each < float("inf"):
            raise ConfigError(f"--rate: {each:g} requests/s, more than 0 and finitely many are possible")
    names = policy or ["goodput"]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is none of {', '.join(POLICIES)}")
    question = _question(workload, slo, profile, _Cut(requests, (scale, output_scale), max_prompt, poisson, seed))
    shape = Shape(prefill, decode, prefill_tp, decode_tp, prefill_chunk, decode_chunk)
    title = f"{question.profile.model}, {question.workload.name}, {slo}"
    found = [] if rate else [highest_rate(question, shape, name, attainment) for name in names]
    points = [measure(question, shape, name, each) for name in names for each in rate or ()]
    points += [each.point for each in found if each.point is not None]
    notes = [f"{name}: {report.rate_note(each)}" for name, each in zip(names, found, strict=False)]
    if not points:
        raise CommandError(f"no rate is known to keep {attainment:.0%} within {slo}: {'; '.join(notes)}")
    show(json_file, report.as_json(points, title, found), report.sheet(points, title, notes))
    if plot is not None:
        report.plot(points, title, attainment, plot)


def plan(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs there are.")],
    slo: SloText = "ttft=250,tpot=100",
    workload: WorkloadText = "512x128",
    profile: ProfileFile = None,
    attainment: Attainment = 0.9,
    requests: Requests = 5_000,
    scale: Scale = 1.0,
    output_scale: OutputScale = None,
    max_prompt: MaxPrompt = 1_000_000,
    poisson: Poisson = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Search the split into prefill and decode workers that serves most within the objectives."""
    from rich.console import Console

    from pdserve.capacity import planner, report
    from pdserve.cli.output import show
    from pdserve.errors import CommandError

    question = _question(workload, slo, profile, _Cut(requests, (scale, output_scale), max_prompt, poisson, seed))
    with Console(stderr=True).status("searching") as status:
        found = planner.plan(question, gpus, attainment, lambda shape, _: status.update(f"tried {shape}"))
    if found is None:
        raise CommandError(
            f"no cluster of {gpus} GPUs is known to serve {attainment:.0%} within {slo} at any rate, "
            f"by {requests} requests at each (--requests)"
        )
    points = [found.best] + ([found.colocated] if found.colocated and found.colocated is not found.best else [])
    title = f"{found.best.shape}: {found.best.rate_per_gpu * gpus:.1f} requests/s on {gpus} GPUs"
    notes = (
        report.rate_note(found.known),
        f"{found.num_tried} clusters tried. What binds: {found.binds}.",
        f"It takes {found.kv_share:.0%} of the KV pages that fit.",
    )
    show(json_file, report.as_json(points, title, [found.known]), report.sheet(points, title, notes))


class _Cut:
    """How a workload is cut to size, and how many of its requests are simulated at most."""

    def __init__(
        self, requests: int, scales: tuple[float, float | None], max_prompt: int, poisson: bool, seed: int
    ) -> None:
        self.requests = requests
        self.scales = scales  # of prompts, and of outputs if another
        self.max_prompt = max_prompt
        self.poisson = poisson
        self.seed = seed

    def apply(self, workload: "Workload") -> "Workload":
        cut = workload.scaled(self.scales[0], self.max_prompt, self.scales[1])
        return cut.poisson(self.seed) if self.poisson else cut


def _question(workload: str, slo: str, profile: Path | None, cut: _Cut) -> "Question":
    from pdserve.capacity.measure import Question
    from pdserve.capacity.workload import parse_lengths, random_lengths, read_workload, trace_path
    from pdserve.perfmodel.profile import read_profile, shipped_profile

    parsed = parse_lengths(workload)
    if parsed is None:
        requests = read_workload(trace_path(workload))
    else:
        prompt_tokens, output_tokens, spread = parsed
        requests = random_lengths(cut.requests, prompt_tokens, output_tokens, cut.seed, spread)
    return Question(read_profile(profile or shipped_profile()), cut.apply(requests), _objective(slo), cut.requests)


def _objective(slo: str) -> "Objective":
    from pdserve.bench.summary import parse_slo
    from pdserve.capacity.shape import Objective
    from pdserve.errors import ConfigError

    parsed = parse_slo(slo)
    if parsed.ttft_ms is None or parsed.tpot_ms is None:
        raise ConfigError(f"--slo: {slo!r} has to name both ttft and tpot")
    return Objective(parsed.ttft_ms / 1e3, parsed.tpot_ms / 1e3)
