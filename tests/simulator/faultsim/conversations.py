"""Conversations: requests whose prompt is an earlier request's, its answer, and some more.

The pages of an answer are where it was decoded: a later turn finds most of its prompt there.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from faultsim.clients import Wish, whole_answer
from faultsim.registration import VOCAB_SIZE
from pdserve.protocol.paging import PageShape

NUM_TURNS = 3
ONE_IN = 24  # requests, of which one begins a conversation
MAX_ADDED = 6  # tokens that a client adds to an answer
MAX_TOKENS = 16  # of an answer
MAX_FIRST = 24  # tokens of a first prompt


def converse(seed: int, wishes: Sequence[Wish], others: Sequence[PageShape]) -> tuple[Wish, ...]:
    """Return the requests of a seed with some of them made turns of conversations, in every other seed."""
    rng = random.Random(f"conversations {seed}")
    changed = list(wishes)
    if rng.random() < 0.5:
        return tuple(changed)
    places = list(range(len(changed)))
    rng.shuffle(places)
    for number in range(len(changed) // ONE_IN):
        turns = sorted(places[number * NUM_TURNS : (number + 1) * NUM_TURNS])
        first = changed[turns[0]]
        params = replace(first.params, max_tokens=min(MAX_TOKENS, first.params.max_tokens))
        changed[turns[0]] = replace(first, prompt=first.prompt[:MAX_FIRST], params=params)
        for before, after in pairwise(turns):
            changed[after] = _next_turn(rng, changed[before], changed[after], others)
    return tuple(changed)


def _next_turn(rng: random.Random, before: Wish, wish: Wish, others: Sequence[PageShape]) -> Wish:
    """Return a request that goes on where another, of the same tenant and adapter, has ended."""
    answer = whole_answer(before, 0, others)
    added = (rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, MAX_ADDED)))
    params = replace(wish.params, max_tokens=min(MAX_TOKENS, wish.params.max_tokens))
    return replace(
        wish, prompt=(*before.prompt, *answer, *added), params=params, tenant=before.tenant, adapter=before.adapter
    )
