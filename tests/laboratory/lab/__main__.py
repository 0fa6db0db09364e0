"""Runs measurements for those who change pdserve: `python -m lab NAME`, with tests/laboratory in PYTHONPATH."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from lab import conversation as conversations
from lab import scale as scaling
from lab.cancel import measure_cancels
from lab.cpu_share import held
from lab.decoding import FAMILIES, measure_decoding
from lab.drafting import DraftBench, Drafted
from lab.drain import measure_drain
from lab.handoffs import SHAPES, measure_handoffs
from lab.mixtures import measure_mixtures
from lab.moves import OperationsPlan, run_moves
from lab.placing import measure_policies, measure_steps
from lab.planning import measure_planning
from lab.ranks import measure_ranks
from lab.sessions import measure_rounds
from lab.simulator import measure_simulator
from lab.speculating import SpeculationBench, measure_speculation
from lab.versus import rivals
from pdserve.autoscaler.actuator import sizes_at_start
from pdserve.autoscaler.schema import load as load_policy
from pdserve.base.errors import CommandError
from pdserve.capacity.scaling import follow
from pdserve.capacity.worker import Shape as ClusterShape
from pdserve.checkpoint.fetch import resolve_model
from pdserve.cli.app import main
from pdserve.cli.autoscale import SCENE, WHOLE_TRACE, PolicyFile, SceneFlags, show_scaled
from pdserve.cli.bench import FRONTENDS, FrontendFlags, Repeats, SessionFlags, objective_of, show_findings
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    DEFAULT_MODEL,
    Dtype,
    Goodput,
    KnownRequestFlags,
    LoadFlags,
    Model,
    OwnClusterFlags,
    Threads,
    WorkloadFlags,
    WorkloadText,
    checked_rate,
    one_of,
)
from pdserve.cli.results import HtmlFile, JsonFile, draw, report, run, show, writable
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.layers import use_matrix_unit
from pdserve.kernels.cpu.library import library
from pdserve.measure.frontend import PROMPT_WORDS, gains, measure_frontend
from pdserve.measure.known_answers import Lengths, known_requests
from pdserve.measure.outcomes import Objective
from pdserve.perfmodel.profile import write_profile
from pdserve.protocol.paging import PageShape
from pdserve.router.config import PolicyName
from pdserve.settings.speculative import SpeculativeConfig

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

Form = Literal["none", "int8", "int4", "gguf"]
Seed = Annotated[int, typer.Option(help="Seed of the requests and their times.")]
StepMs = Annotated[
    float, typer.Option(min=0, max=10_000, help="Least time of a step, as if each worker had a device; 0: as it comes.")
]
_SIZES, _LOADS = WorkloadFlags(num_prompts=2000, scale=0.125, max_length=1024), LoadFlags()
_SERVING = OwnClusterFlags(dtype="auto")
_CHECKED, _LONE_THREAD = OwnClusterFlags(), OwnClusterFlags(num_threads=1)
_FOUR_LONE_THREADS = OwnClusterFlags(prefill=2, decode=2, num_threads=1)
_MOVED_REQUESTS, _DRAINED_REQUESTS = KnownRequestFlags(), KnownRequestFlags(distinct=5, input_len=64, output_len=500)
_LONG_SESSIONS = SessionFlags(
    sessions=120, turns=8, shared_tokens=2048, first_tokens=1024, tool_tokens=384, answer_tokens=64, pause=3.0
)
_SCALED_REQUESTS = KnownRequestFlags(distinct=30, input_len=1900, output_len=96)


def router(
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 64,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests placed.")] = 2000,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    json_file: JsonFile = None,
) -> None:
    """Measure decisions per second of one core, for each policy, without network or engine; and what a step takes."""
    found = measure_policies(prefill, decode, num_prompts, input_len)
    core = measure_steps(num_sequences=256, num_steps=64)
    title = f"{prefill} + {decode} workers, {num_prompts} requests of {input_len} tokens"
    times = f"{1e3 * core.core_s:.2f} ms of the core, {1e3 * core.wire_s:.2f} ms to read it off the link"
    show(json_file, found, title, f"a step of 256 sequences: {times}", results={"runs": found, "core": core})


def scheduler(
    sequences: Annotated[int, typer.Option(min=1, max=4096, help="That decode in every step.")] = 256,
    steps: Annotated[int, typer.Option(min=1, max=4096, help="That are measured.")] = 150,
    json_file: JsonFile = None,
) -> None:
    """Measure what the scheduler adds to a decode step; with one group of layers, and with one more under a window."""
    shapes: tuple[tuple[PageShape, ...], ...] = ((), (PageShape(16, window=64),))
    found = [measure_planning(sequences, steps, others) for others in shapes]
    show(json_file, found, f"decode steps of {sequences} sequences", "CPU time of planning and taking in")


def decoding(
    family: Annotated[list[str] | None, typer.Option(help="As transformers names it. Repeatable.")] = None,
    sequences: Annotated[list[int] | None, typer.Option(help="That decode in every step. Repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="That are measured.")] = 60,
    json_file: JsonFile = None,
) -> None:
    """Measure decode steps of small random models of some families in one thread on this CPU."""
    torch.set_num_threads(1)
    counts = tuple(sequences or (1, 16))
    found = [speed for each in family or FAMILIES for speed in measure_decoding(each, counts, steps)]
    show(json_file, found, "decode steps, int8, hidden 1024, 8 layers, contexts of 256", "CPU time of a step")


def experts(
    quantization: Annotated[Form, typer.Option(help="Of weights.")] = "none",
    layers: Annotated[int, typer.Option(min=1, help="Of each model.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="In which all models compute a step, in turn.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="That compute.")] = 1,
    vectors: Annotated[bool, typer.Option("--vectors", help="As on a processor without AMX.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure steps of a mixture of experts beside a dense model of the active size, and beside a loop over experts.

    64 experts, of which each token takes 8; hidden 1024, inner 512; 1.2 billion parameters with 12 layers.
    """
    torch.set_num_threads(threads)
    if vectors and not isinstance(loaded := library(), Missing):
        torch.cpu._is_amx_tile_supported = lambda: False
        use_matrix_unit(loaded, wanted=False)
    found = []
    for each in measure_mixtures(quantization, layers, ((1, 1), (16, 1), (1, 512)), rounds):
        report(f"{each.step}: {each.mixture_to_dense:.2f} of the dense model, {each.mixture_to_loop:.2f} of a loop")
        found.append(each)
    title = f"steps of sequences x tokens, weights {quantization}, {layers} layers, {threads} threads"
    show(json_file, found, title, "CPU time of a step")


def ranks(
    folder: Annotated[Path, typer.Argument(help="With the config.json of a model; weights are random.", exists=True)],
    quantization: Annotated[Form, typer.Option(help="Of weights.")] = "none",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks, beside one.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Pipeline stages, beside one rank.")] = 1,
    rank_memory: Annotated[
        Literal["shared", "own"], typer.Option(help="Of these; the one rank's is shared.")
    ] = "shared",
    threads: Annotated[int, typer.Option(min=1, help="That ranks share.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="In which both compute a step, in turn.")] = 40,
    json_file: JsonFile = None,
) -> None:
    """Measure steps of a worker with several ranks or stages beside one rank with as many threads."""
    degrees = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    found = list(measure_ranks(folder, {**degrees, "rank_memory": rank_memory}, threads, quantization, rounds))
    title = f"steps of sequences x tokens, weights {quantization}, {threads} threads"
    show(json_file, found, title, "wall clock of a step")


def handoffs(
    pages: Annotated[int, typer.Option(min=1, help="Of 16 tokens, of a hand-off.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="In which each pair hands off once, in turn.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure hand-offs between two processes whose ranks have memory of their own, of equal and unequal degrees."""
    found = [times for model in SHAPES for times in measure_handoffs(model, pages, rounds)]
    show(json_file, found, f"hand-offs of {pages} pages, medians of {rounds} rounds", "GB/s, and times those of 1 -> 1")


def speculation(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "bfloat16",
    quantization: Annotated[Form, typer.Option(help="Of weights.")] = "none",
    streams: Annotated[list[int] | None, typer.Option(help="Answers at once. Repeatable.")] = None,
    config: Annotated[str, typer.Option(help="As --speculative-config of a worker.")] = "{}",
    rounds: Annotated[int, typer.Option(min=1, help="With and without guesses, in turn.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure what guesses gain where a model copies texts, and after random tokens, with one engine in one thread."""
    torch.set_num_threads(1)
    counts = tuple(streams or (1, 8, 32))
    texts = [path.read_text()[300:] for path in sorted((Path(__file__).parents[3] / "docs").glob("*.md"))] * 2
    guessed = SpeculativeConfig.model_validate_json(config)
    bench = SpeculationBench(resolve_model(model), dtype, quantization, max(counts), guessed)
    found = []
    for gain in measure_speculation(bench, counts, texts, rounds):
        report(f"{gain.workload}, {gain.num_streams}: {gain.speedup:.2f}")
        found.append(gain)
    show(json_file, found, f"{model}, {dtype}, weights {quantization}", "CPU time of steps that only decode")


def drafting(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "bfloat16",
    quantization: Annotated[Form, typer.Option(help="Of weights.")] = "none",
    layers: Annotated[list[int] | None, typer.Option(min=1, help="Of the draft model. Repeatable.")] = None,
    streams: Annotated[int, typer.Option(min=1, max=8, help="Answers at once.")] = 1,
    draft_quantization: Annotated[Form, typer.Option(help="Of the draft model's weights.")] = "none",
    rounds: Annotated[int, typer.Option(min=1, help="With and without guesses, in turn.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure what a model's first layers guess right as its draft model, and gain, with one engine in one thread."""
    torch.set_num_threads(1)
    texts = [path.read_text()[300:] for path in sorted((Path(__file__).parents[3] / "docs").glob("*.md"))[:8]]
    found = list[Drafted]()
    for num_layers in layers or (10, 20):
        bench = DraftBench(resolve_model(model), dtype, (quantization, draft_quantization), (num_layers, streams))
        for drafted in bench.measure(texts, rounds):
            report(f"{drafted.num_layers} layers, {drafted.temperature}: {drafted.speedup:.2f}")
            found.append(drafted)
    show(
        json_file,
        found,
        f"{model}, {dtype}, weights {quantization} and {draft_quantization}",
        "CPU time of decode steps",
    )


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
    trial = loads.trial(sizes, (0.3, 0.6, 0.9, 1.2), objective_of(goodput))
    spec = own.spec("simulator", {"placement": placement})
    found, learnt = run(measure_simulator(spec, placement, trial, report))
    if profile is not None:
        write_profile(profile, learnt)
    show_findings(json_file, found)


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
    spec = own.spec("moves", max_num_seqs=max_num_seqs, test_step_s=step_ms / 1e3 or None)
    spec = replace(spec, max_workers=spec.num_workers + 1)
    operations = OperationsPlan(flips, count, drains, cycles, pause, within, known.seed)
    requests = known.requests(own, spec.model)
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
    pages = answers * (2 + (known.input_len + known.output_len) // 16)
    own = OwnClusterFlags(model, decode=2, num_threads=1, dtype=dtype)
    spec = own.spec("drain", max_num_seqs=max(64, answers), num_pages=pages)
    lengths = Lengths(known.input_len, known.output_len, are_answers_equal=True)
    requests = known_requests(spec.model, dtype, known.distinct, lengths, known.seed)
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
    objectives, sizes = load_policy(policy).objectives, sizes_at_start(policy)
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


@grouped_flags
def frontend(
    cpu_share: Annotated[float, typer.Option(min=0.01, help="Cores that the router gets for each of its frontends.")],
    model: Model = DEFAULT_MODEL,
    loads: FrontendFlags = FRONTENDS,
    repeats: Repeats = 1,
    json_file: JsonFile = None,
) -> None:
    """Measure as `pdserve bench frontend` does, with a router's processes held to a share of the cores."""

    def limited(pids: Sequence[int], num_frontends: int) -> AbstractContextManager[None]:
        return held(pids, max(1, num_frontends) * cpu_share)

    found = run(measure_frontend(model, loads.loads(), repeats, report, limited))
    show(json_file, found, f"Prompts of {PROMPT_WORDS} words", *gains(found))


@grouped_flags
def versus(
    policy: PolicyFile,
    workload: WorkloadText,
    rival: Annotated[
        list[str] | None,
        typer.Option(
            **one_of("static", "hpa", "planner"),
            help="The smallest static pools that attain as much; HPA on queue length and KV usage; the published "
            "rules of Dynamo's planner. Repeatable; by default all.",
        ),
    ] = None,
    sizes: WorkloadFlags = WHOLE_TRACE,
    on: SceneFlags = SCENE,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Simulate a policy under a trace as `pdserve autoscale simulate` does, and its rivals on the same trace."""
    wanted = load_policy(policy)
    scene = on.scene(wanted, workload, sizes)
    report("policy")
    scaled = follow(scene, wanted)
    others = rivals(scene, wanted, rival or ("hpa", "planner", "static"), scaled.attainment(scene.objective), report)
    show_scaled([scaled, *others], scene, wanted, json_file, html)


def sessions(
    shape: SessionFlags = _LONG_SESSIONS,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 4,
    kv_share: Annotated[float, typer.Option(min=0.01, help="Of the KV pages that fit, which a worker gets.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of equal sessions, without and with names.")] = 10,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Simulate sessions of agents on OPT-13B's profile, without and with names of their conversations."""
    found = measure_rounds(ClusterShape(prefill, decode, kv_share=kv_share), shape.shape(), rounds, seed, report)
    show(json_file, found, f"{prefill} + {decode} workers, {kv_share:g} of their KV, {rounds} rounds")


for _command in (
    cancel,
    conversation,
    decoding,
    drafting,
    drain,
    experts,
    frontend,
    handoffs,
    moves,
    ranks,
    router,
    scale,
    scheduler,
    sessions,
    simulator,
    speculation,
    versus,
):
    app.command()(_command)

if __name__ == "__main__":
    main(app)
