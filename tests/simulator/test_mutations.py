import re

import pytest
from mutations import MUTATIONS

from faultsim.simulation import simulate

MAX_SEEDS = 300  # several times what the slowest of them takes


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_catches(name: str) -> None:
    for seed in range(MAX_SEEDS):
        with MUTATIONS[name]():
            if simulate(seed).violation:
                return
    pytest.fail(f"{MAX_SEEDS} seeds passed in spite of {name}")


def test_a_seed_that_fails_tells_the_story_of_its_request() -> None:
    with MUTATIONS["write_into_shared_pages"]():
        outcome = simulate(0)
    name = re.findall("request-[0-9]+", outcome.violation)[0]
    about = outcome.story[: outcome.story.index("...")]
    assert len(about) > 5
    assert all(name in line for line in about)
    assert len(outcome.story) > len(about) + 1


def test_a_switched_off_mutation_leaves_nothing_behind() -> None:
    before = simulate(1, num_requests=40)
    for mutation in MUTATIONS.values():
        with mutation():
            pass
    assert simulate(1, num_requests=40) == before
