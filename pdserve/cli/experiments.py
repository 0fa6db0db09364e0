"""Measurements of clusters that are started for them: under load, under faults, and while an operator changes them."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    DEFAULT_MODEL,
    Decode,
    Dtype,
    Goodput,
    Loads,
    Model,
    Prefill,
    Sizes,
    Threads,
    checked_rate,
    started,
)
from pdserve.cli.results import JsonFile, PlotFile, report, run, show, writable

Seed = Annotated[int, typer.Option(help="Of the requests, their times and the faults.")]
_SIZES = Sizes(num_prompts=2000, scale=0.125, max_length=1024)
_LOADS, _SHORT_LOADS = Loads(), Loads(seconds=40)
_FOUR_WORKERS = Loads(prefill=2, decode=2, num_threads=1, seconds=45)


@grouped_flags
def accuracy(
    loads: Loads = _LOADS,
    sizes: Sizes = _SIZES,
    profile: Annotated[Path | None, typer.Option(help="To start from; by default OPT-13B on A100, wrong here.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.measure.accuracy import accuracy_json, error_table, measure_accuracy
    from pdserve.perfmodel.profile import shipped_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9))
    spec = loads.spec(placement="goodput", profile=profile or shipped_profile())
    found = run(measure_accuracy(spec, trial, report))
    show(json_file, accuracy_json(found), error_table(found.findings))


@grouped_flags
def overload(
    loads: Loads = _SHORT_LOADS,
    sizes: Sizes = _SIZES,
    placement: Annotated[list[str] | None, typer.Option(help="How requests are placed; repeatable.")] = None,
    goodput: Goodput = "",
    json_file: JsonFile = None,
) -> None:
    """Load clusters up to twice their capacity: goodput, what admitted requests attain, how fast others are refused.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.measure.overload import measure_overload, overload_table

    trial = loads.trial(sizes, (0.5, 0.75, 1.0, 1.5, 2.0), goodput)
    policies = placement or ["goodput", "round_robin"]
    found = run(measure_overload(lambda name: loads.spec(placement=name), policies, trial, report))
    show(json_file, found, overload_table(found))


@grouped_flags
def simulator(
    loads: Loads = _LOADS,
    sizes: Sizes = _SIZES,
    placement: Annotated[str, typer.Option(help="How requests are placed.")] = "goodput",
    goodput: Goodput = "",
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None, typer.Option(help="Also write what was learnt.", callback=writable("--profile"))
    ] = None,
) -> None:
    """Serve a load live, and simulate the same requests with the step times that the live router has learnt.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.capacity.replay import measure_simulator, replay_table
    from pdserve.perfmodel.profile import write_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9, 1.2), goodput)
    found, learnt = run(measure_simulator(loads.spec(placement=placement), placement, trial, report))
    show(json_file, found, replay_table(found))
    if profile is not None:
        write_profile(profile, learnt)


@grouped_flags
def routers(
    loads: Loads = _FOUR_WORKERS,
    sizes: Sizes = _SIZES,
    num_routers: Annotated[int, typer.Option("--routers", min=2, help="Routers over the same workers.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Compare one router's predictions with those of several, and see whether late ones know what is cached."""
    from pdserve.measure.routers import measure_routers, routers_tables

    trial = loads.trial(sizes, (0.6,))
    found = run(measure_routers(loads.spec(placement="goodput"), num_routers, trial, report))
    show(json_file, {**asdict(found.findings), "late": found.late}, *routers_tables(found))


def chaos(
    model: Model,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests sent.")] = 1000,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 8,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests; they are sent in turn.")] = 200,
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
    kill_every: Annotated[float, typer.Option(min=0, help="Seconds between two kills of a worker; 0: none.")] = 5.0,
    freeze_for: Annotated[
        float | None, typer.Option(help="Freeze workers for so many seconds instead of killing.")
    ] = None,
    fail_copies: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the copies between workers that are made to fail.")
    ] = 0.0,
    baseline: Annotated[int, typer.Option(min=0, help="Requests sent without any fault first, to compare.")] = 0,
    prefill: Prefill = 2,
    decode: Decode = 2,
    dtype: Dtype = "float32",
    mover: Annotated[str | None, typer.Option(help="The workers' --mover.")] = None,
    num_threads: Threads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Kill workers of a local cluster while requests run; check each answer against one engine alone.

    Fails unless every request was answered with the right tokens and every page was free in the end.
    """
    from rich.console import Console

    from pdserve.errors import CommandError
    from pdserve.measure.chaos import ChaosTrial, FaultPlan, chaos_json, chaos_table, failures, run_chaos
    from pdserve.measure.known_answers import Lengths, known_requests

    spec = started("chaos", model, seed, prefill, decode, dtype=dtype, mover=mover, num_threads=num_threads)
    faulty = replace(spec, worker_flags={**spec.worker_flags, "test_fail_copies": fail_copies or None})
    faults = FaultPlan(kill_every, freeze_for, seed) if kill_every else None
    trials = [ChaosTrial("chaos", faulty, num_prompts, max_concurrency, faults)]
    if baseline:
        trials.insert(0, ChaosTrial("faultless", spec, baseline, max_concurrency, None))
    requests = known_requests(spec.model, dtype, distinct, Lengths(input_len, output_len), seed)
    verdicts = [run(run_chaos(trial, requests, Console(stderr=True))) for trial in trials]
    show(json_file, chaos_json(verdicts), chaos_table(verdicts), *failures(verdicts))
    if not all(verdict.is_clean for verdict in verdicts):
        raise CommandError("not every request was answered as it had to be, or pages were not given back")


def cancel(
    model: Model,
    count: Annotated[int, typer.Option(min=1, help="Requests cancelled at each moment.")] = 50,
    input_len: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt; computing it should take over a second.")
    ] = 3000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 900,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Cancel requests on an idle local cluster, while they are computed and while they decode."""
    from pdserve.measure.cancel import CancelPlan, cancel_table, measure_cancels

    spec = started("cancel", model, seed, dtype=dtype, max_num_batched_tokens=64)
    found = run(measure_cancels(spec, CancelPlan(count, input_len, output_len, seed)))
    show(json_file, {"runs": found}, cancel_table(found))


def moves(
    model: Model = DEFAULT_MODEL,
    count: Annotated[int, typer.Option("--moves", min=0, help="Answers to move.")] = 200,
    flips: Annotated[int, typer.Option(min=0, help="Changes of a worker's role.")] = 20,
    drains: Annotated[int, typer.Option(min=0, help="Drains of each worker, which then starts again.")] = 2,
    cycles: Annotated[int, typer.Option(min=0, help="Workers that come and go.")] = 0,
    load: Annotated[float, typer.Option(min=0.01, max=2, help="Share of the capacity that is sent.")] = 0.7,
    pause: Annotated[float, typer.Option(min=0.01, help="Mean seconds between flips, drains and cycles.")] = 2.0,
    within: Annotated[float, typer.Option(min=1, help="Seconds for all that is planned.")] = 240.0,
    calibration: Annotated[float, typer.Option(min=2, help="Seconds of full load before.")] = 15.0,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests; they are sent in turn.")] = 100,
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    prefill: Prefill = 2,
    decode: Decode = 2,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Flip roles, move answers, drain, add and remove workers of a local cluster under load; check each answer.

    Fails unless all of it was done, every answer has the tokens of one engine alone, and every page is free in the end.
    """
    from pdserve.errors import CommandError
    from pdserve.measure.known_answers import Lengths, known_requests
    from pdserve.measure.moves import MovesTrial, moves_json, moves_table, run_moves
    from pdserve.measure.operations import OperationsPlan

    spec = started("moves", model, seed, prefill, decode, dtype=dtype, num_threads=1)
    spec = replace(spec, max_workers=spec.num_workers + 1)
    trial = MovesTrial(spec, load, calibration, OperationsPlan(flips, count, drains, cycles, pause, within, seed))
    requests = known_requests(spec.model, dtype, distinct, Lengths(input_len, output_len), seed)
    verdict = run(run_moves(trial, requests, report))
    wrong = [*verdict.tally.wrong_examples, *(f"{n} x {error}" for error, n in verdict.tally.errors.items())]
    show(json_file, moves_json(verdict), moves_table(verdict), *wrong, *verdict.record.refused)
    if not verdict.is_clean:
        raise CommandError("not all of it was done, or not every answer was right, or pages were not given back")


def drain(
    model: Model = DEFAULT_MODEL,
    answers: Annotated[int, typer.Option(min=1, help="Answers that run.")] = 50,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests among them.")] = 5,
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 500,
    begun: Annotated[float, typer.Option(min=0, max=1, help="Share of the answers that is there by then.")] = 0.5,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Drain a decode worker with many running answers; compare how soon it leaves with the time of the bytes moved."""
    from pdserve.errors import CommandError
    from pdserve.measure.drains import drain_table, measure_drain
    from pdserve.measure.known_answers import Lengths, known_requests

    pages = answers * (2 + (input_len + output_len) // 16)
    flags = {"num_threads": 1, "max_num_seqs": max(64, answers), "num_pages": pages}
    spec = started("drain", model, seed, num_decode=2, dtype=dtype, **flags)
    lengths = Lengths(input_len, output_len, are_answers_equal=True)
    requests = known_requests(spec.model, dtype, distinct, lengths, seed)
    found = run(measure_drain(spec, requests, answers, begun, report))
    show(json_file, {**asdict(found), "transfer_s": found.transfer_s}, drain_table(found), *found.failed)
    if found.failed or found.left_over:
        raise CommandError("an answer was not as it had to be, or pages were not given back")


def conversation(
    model: Model = DEFAULT_MODEL,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 8,
    input_len: Annotated[int, typer.Option(min=16, help="Tokens of the last prompt.")] = 4000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 250,
    repeats: Annotated[int, typer.Option(min=1, help="Conversations of each kind.")] = 3,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Hold conversations whose earlier answers are fetched from the decode worker, cached, or computed again."""
    from pdserve.measure.conversation import ConversationPlan, conversation_table, measure_conversations

    spec = started("conversation", model, seed, dtype=dtype, num_threads=1)
    found = run(measure_conversations(spec, ConversationPlan(turns, input_len, output_len, repeats, seed), report))
    show(json_file, found, conversation_table(found))


def scale(
    model: Model,
    policy: Annotated[Path, typer.Option("--policy", help="The policy to follow.")],
    seconds: Annotated[float, typer.Option(min=5, max=86_400, help="Of each of the four phases.")] = 80,
    request_rate: Annotated[float, typer.Option(help="Requests a second at the peak.")] = 1.2,
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 1900,
    output_len: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    max_num_seqs: Annotated[
        int, typer.Option(min=2, help="Sequences of a worker: with few, a pool fills before the processor does.")
    ] = 4,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests of a phase; they are sent in turn.")] = 30,
    dtype: Dtype = "float32",
    num_threads: Threads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Let a local cluster scale under a load that rises, turns from prompts to answers, and falls.

    The requests have the policy's objectives. Each answer is checked against one engine alone.
    """
    from pdserve.autoscaler.loading import load
    from pdserve.autoscaler.process import sizes_at_start
    from pdserve.errors import CommandError
    from pdserve.measure.outcomes import Objective
    from pdserve.measure.scale import ScalePlan, known, measure_scale, phases, plot, scale_table

    objectives, sizes = load(policy).objectives, sizes_at_start(policy)
    flags = {"dtype": dtype, "num_threads": num_threads, "max_num_seqs": max_num_seqs}
    patience = {"max_hold_s": objectives.ttft_s}  # requests wait while pools grow
    spec = started("scale", model, seed, sizes.prefill, sizes.decode, **flags)
    spec = replace(
        spec,
        router_flags=patience,
        max_workers=sizes.max_workers,
        autoscaling=policy.absolute(),
        elsewhere=sizes.elsewhere,
    )
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
