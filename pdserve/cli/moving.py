"""Measurements of roles that change, answers that move, and pages that travel back, on clusters started for them."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from pdserve.cli.bench import Seed
from pdserve.cli.options import DEFAULT_MODEL, Decode, Dtype, Model, Prefill, started
from pdserve.cli.results import JsonFile, report, run, show


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
