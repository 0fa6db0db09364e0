"""An EAGLE-3 head beside an engine over the kernels: it guesses what it guesses beside one in plain torch."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from gpu_device import Device
from gpu_models import random_prompt
from gpu_report import Case, Row
from made_heads import made_head, with_room

from pdserve.base.ids import PageId
from pdserve.engine.head_cuda import CudaHead
from pdserve.engine.head_drafting import HeadDrafter, HeadRunner
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Draft, Phase, SampleSpec, StepPlan, StepResult
from pdserve.engine.verification import Run, verifying
from pdserve.model.family import Model
from pdserve.model.loading import ops_for
from pdserve.protocol.sampling import SamplingParams

PAGES_EACH, PAGE_SIZE, EOS, NUM_GUESSES = 4, 16, 5, 3
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
)
Models = Callable[[torch.device], Model]


def cases(device: Device, models: Models) -> Iterator[Case]:
    yield "engine with a head", lambda: [_agrees(device, models)]


def _agrees(device: Device, models: Models) -> Row:
    lens, num_steps = device.sized(((40, 3, 17), 8), ((18, 3, 2), 3))
    run_here, run_there = _on_kernels(models(device.torch)), _on_cpu(models(torch.device("cpu")))
    prompts = [random_prompt(length, 300, seed) for seed, length in enumerate(lens)]
    here, there = (list(_steps(run, prompts, num_steps)) for run in (run_here, run_there))
    num_guesses = sum(len(guesses) for _, drafts in there for guesses in drafts)
    differ = [number for number, (ours, theirs) in enumerate(zip(here, there, strict=True)) if ours != theirs]
    note = f"steps {differ} differ" if differ else f"{num_steps} steps, {num_guesses} guesses agree"
    return Row("a head's guesses are the CPU's", note=note, failed=bool(differ) or not num_guesses)


def _on_kernels(model: Model) -> Run:
    limits = Limits(len(PARAMS), 64, PAGES_EACH * PAGE_SIZE, frozenset({EOS}), num_speculative_tokens=NUM_GUESSES)
    runner = CudaRunner(with_room(model), PAGES_EACH * len(PARAMS), PAGE_SIZE, limits)
    head = CudaHead(made_head(model, ops_for(model.device, 16)), runner, limits)
    drafter = HeadDrafter(head)
    head.follow(runner, lambda take_in: take_in())
    if model.device.type == "cuda":
        head.capture()
        runner.capture()
    return drafter.beside(verifying(runner.run))


def _on_cpu(model: Model) -> Run:
    runner = Runner(with_room(model), PAGES_EACH * len(PARAMS), PAGE_SIZE, (EOS,))
    return HeadDrafter(HeadRunner(made_head(model, ops_for(model.device, 16)), runner, (EOS,))).beside(
        verifying(runner.run)
    )


_Found = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]  # tokens and guesses, of each sequence


def _steps(run: Run, prompts: Seq[tuple[int, ...]], num_steps: int) -> Iterator[_Found]:
    """Compute prompts, then steps that verify what was guessed; yield the tokens and the guesses of each step."""
    answers, drafts = [list[int]() for _ in prompts], [tuple[int, ...]() for _ in prompts]
    for _ in range(num_steps):
        result = run(StepPlan(tuple([_chunk(*each) for each in enumerate(zip(prompts, answers, drafts, strict=True))])))
        found = _tokens(result)
        drafts = [result.drafts.get(place, ()) for place in range(len(prompts))]
        for answer, gained in zip(answers, found, strict=True):
            answer.extend(gained)
        yield found, drafts


def _tokens(result: StepResult) -> list[tuple[int, ...]]:
    return [tuple([token.token_id for token in of[0]]) for of in result.tokens]


def _chunk(row: int, of: tuple[tuple[int, ...], list[int], tuple[int, ...]]) -> Chunk:
    prompt, answer, guesses = of
    tokens = [*prompt, *answer]
    start = len(tokens) - 1 if answer else 0
    spec = SampleSpec(PARAMS[row], row, len(answer), prompt, tuple(answer), forbid_stops=False, sequence=(row, 0))
    return Chunk(
        [*tokens[start:], *guesses],
        start,
        tuple(PageId(PAGES_EACH * row + page) for page in range(PAGES_EACH)),
        (spec,),
        Phase.DECODE if answer else Phase.PROMPT,
        num_drafts=len(guesses),
        draft=Draft((), start, NUM_GUESSES) if answer else None,
    )
