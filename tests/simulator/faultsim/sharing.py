"""A policy under which prompts are fetched far more often than pays, from whoever may have them."""

import random
from collections.abc import Sequence
from dataclasses import replace

from pdserve.router.placement.policies import least_loaded
from pdserve.router.placement.routing import Decision, Demand, Group, Placed
from pdserve.router.requests.commands import Fetch

SHARE = 0.5  # of placements


class Sharing:
    """Places as `least_loaded` does. It has a source of chance of its own, so that it changes no fault of a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"sharing {seed}")
        self._share = SHARE if self._rng.random() < 0.5 else 0.0  # every other seed has none

    def __call__(self, groups: Sequence[Group], demand: Demand) -> Decision:
        decision = least_loaded(groups, demand)
        if not isinstance(decision, Placed) or self._rng.random() >= self._share:
            return decision
        computing = decision.pair.prefill or decision.pair.decode
        workers = {worker.link: worker for group in groups for worker in (*group.prefills, *group.decodes)}
        others = [worker for worker in workers.values() if worker is not computing]
        if not others:
            return decision
        num_tokens, within_s = self._rng.randint(1, demand.num_tokens), self._rng.choice((0.0, 0.05, 0.3))
        fetch = Fetch(self._rng.choice(others).registration, num_tokens, num_tokens, 0.0, within_s, 0.0, is_taken=True)
        return replace(decision, fetch=fetch)
