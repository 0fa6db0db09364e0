"""How long answers stand still that move, where workers, each with a device of its own, change roles and drain."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from faultsim.clients import Answer
from faultsim.scenario import Scenario, draw
from faultsim.simulation import Simulation
from lab.moves import MovedGap, moved_gaps
from pdserve.measure.outcomes import Outcome, percentiles

STEP_S = 0.05  # and half of it more for each page: prompts make a step up to nine times as long
SPAN_S = 30.0
SEEDS = range(0, 96, 8)  # without faults, and with some three hundred moves between them
NUM_DRAINS = 8


def slow(scenario: Scenario) -> Scenario:
    """Return a scenario whose steps take as long as a large model's: messages and copies take next to nothing.

    Nobody guesses: where tokens come several at a time, the gaps between them do not show how long a step takes.
    """
    factor = SPAN_S / scenario.span_s
    pages, steps = {"num_pages": 256}, {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    size = replace(scenario.decode_size, **pages, **steps, step_s=STEP_S, token_s=STEP_S / 8, most_drafts=0)
    return replace(
        scenario,
        num_prefill=2,
        num_decode=2,
        prefill_size=size,
        decode_size=size,
        span_s=SPAN_S,
        wishes=tuple(replace(wish, at_s=factor * wish.at_s) for wish in scenario.wishes),
        faults=frozenset({"drain"}),
        num_faults=NUM_DRAINS,
        is_calm=False,
    )


def gaps_of(answer: Answer) -> list[MovedGap]:
    return moved_gaps(Outcome(0.0, 0, 0, times_s=dict(enumerate(answer.came_s)), moves=answer.moves))


def served(seed: int) -> Iterator[MovedGap]:
    """Serve a seed's requests; yield the gap of each move."""
    simulation = Simulation(slow(draw(seed, num_requests=200)))
    simulation.run()
    for answer in simulation.answers:
        yield from gaps_of(answer)


@pytest.mark.long
def test_of_a_hundred_moves_99_take_three_steps_and_the_last_page_at_most() -> None:
    gaps = [gap for seed in SEEDS for gap in served(seed)]
    found = percentiles(gap.first_s / gap.allowed_s for gap in gaps)
    assert len(gaps) > 100
    assert found is not None
    assert found.p99 <= 1.0, found
