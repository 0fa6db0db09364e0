"""What one seed is about: the cluster, the requests, and which things go wrong in it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from faultsim.clients import Wish
from faultsim.conversations import converse
from faultsim.mover import CopyFaults
from faultsim.ranks import DIVIDED, ONE_RANK
from faultsim.registration import VOCAB_SIZE, Size
from pdserve.base.ids import RequestId
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.adapters import DIGEST_BYTES, NO_ADAPTER, Adapter
from pdserve.protocol.paging import PageShape
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.sampling import SamplingParams

PERIOD = 8  # of so many seeds, the first is calm, the fifth has impatient clients but no faults, the last has zombies
NUM_ZOMBIES = 8
NO_ROUTE_SEEDS = 0.4  # share of the seeds with faults

# Groups of layers after the first, in half of the seeds.
GROUPS = ((), (), (PageShape(2, window=6),), (PageShape(4, window=3), PageShape(2)))
# In a part of the other seeds there are states; then nothing guesses, since a state cannot be taken back.
STATES, STATES_SEEDS = (PageShape(4, window=2, is_state=True),), 0.4
# Tokens of a prefill worker's step. In short steps, most pages of a prompt leave its windows while it is computed.
STEP_TOKENS = (32, 12, 8)
MORE_TOKENS = (0, 0, 20, 40)  # in these seeds, of some prompts
MAX_MODEL_LEN = 96

# In half of the seeds a third of the requests is for the model alone, the others for these.
ADAPTERS = tuple(Adapter(name, name.encode() * (DIGEST_BYTES // 4)) for name in ("blue", "gold"))
LACKING = 0.3  # of the workers after the first of each role: those that have loaded one adapter only

RANKS_SEEDS = 0.4  # share of the seeds in which workers have ranks with memory of their own

FAULTS = (
    "crash_worker",
    "freeze_worker",
    "crash_router",
    "freeze_router",
    "reset_link",
    "reset_handoff",
    "cut_one_way",
    "blackhole",
    "slow",
    "drain",
    "break_step",
    "hostile",
    "failed_copies",
    "corrupted_pages",
    "stuck_copies",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything drawn before the first event."""

    seed: int
    num_routers: int
    num_prefill: int
    num_decode: int
    prefill_size: Size
    decode_size: Size
    mean_delay_s: float
    span_s: float  # over which requests arrive and faults happen
    wishes: tuple[Wish, ...]
    faults: frozenset[str]
    num_faults: int
    num_zombies: int
    copy_faults: CopyFaults
    no_route: tuple[str, str] | None  # a worker that can open no stream to another, until all faults have healed
    lease_s: float
    site_chance: float  # of a fault at a moment chosen to hurt
    lacking: frozenset[str]  # workers that have not loaded the second adapter

    is_calm: bool  # no faults, and clients that wait: every request has to succeed


def draw(seed: int, num_requests: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    calm, faultless = seed % PERIOD == 0, seed % PERIOD in (0, 4)
    faults = frozenset() if faultless else frozenset(fault for fault in FAULTS if rng.random() < 0.5)
    has_zombies = seed % PERIOD == PERIOD - 1
    span_s = num_requests * max(rng.choice((0.005, 0.01, 0.03)), 0.04 if has_zombies else 0.0)
    step_s = rng.choice((0.002, 0.004, 0.008))
    max_model_len, most_drafts = MAX_MODEL_LEN, random.Random(f"guesses {seed}").choice((0, 0, 1, 3))
    others = random.Random(f"groups {seed}").choice(GROUPS)
    if not others and random.Random(f"states {seed}").random() < STATES_SEEDS:
        others = STATES
    adapters = ADAPTERS if random.Random(f"adapters {seed}").random() < 0.5 else ()
    step_tokens = random.Random(f"chunks {seed}").choice(STEP_TOKENS) if others else STEP_TOKENS[0]
    prefill_pages, decode_pages = (_pages_for_one(others, count) for count in (step_tokens, STEP_TOKENS[0]))
    page_s = max(rng.choice((0.0001, 0.0005, 0.002)), 0.015 if has_zombies else 0.0)  # most of the time a copy goes on
    copy_faults = CopyFaults(
        failed=1 / 16 if "failed_copies" in faults else 0.0,
        corrupted=1 / 100 if "corrupted_pages" in faults else 0.0,
        in_doubt=0.3 if "failed_copies" in faults and seed % 2 else 0.0,
        stuck=0.5 if "stuck_copies" in faults else 0.0,
        page_s=page_s,
    )
    return Scenario(
        seed=seed,
        num_routers=rng.choice((1, 2, 2)),
        num_prefill=(num_prefill := rng.choice((1, 2, 2, 3))),
        num_decode=(num_decode := rng.choice((1, 2, 2, 3))),
        prefill_size=Size(
            int(rng.choice((32, 64, 128)) * prefill_pages),
            max_num_batched_tokens=step_tokens,
            max_model_len=max_model_len,
            step_s=step_s,
            most_drafts=most_drafts,
            others=others,
            adapters=adapters,
            shares=_shares(seed, 0),
        ),
        decode_size=Size(
            int(rng.choice((32, 64, 128)) * decode_pages),
            max_num_seqs=rng.choice((8, 16)),
            max_model_len=max_model_len,
            step_s=step_s,
            most_drafts=most_drafts,
            others=others,
            adapters=adapters,
            shares=_shares(seed, 1),
        ),
        mean_delay_s=rng.choice((0.0003, 0.001) if faultless else (0.0003, 0.001, 0.004)),
        span_s=span_s,
        wishes=converse(seed, _changed(seed, _wishes(rng, num_requests, span_s, calm), step_tokens, adapters), others),
        faults=faults,
        num_faults=rng.randrange(3, 14),
        num_zombies=NUM_ZOMBIES if has_zombies else 0,
        copy_faults=copy_faults,
        no_route=None if faultless else _no_route(seed, num_prefill, num_decode),
        lease_s=rng.choice((1.0, 1.0, 2.0)),
        is_calm=calm,
        site_chance=rng.choice((0.0, 0.002, 0.01)),
        lacking=frozenset() if faultless else _lacking(seed, num_prefill, num_decode),
    )


def _shares(seed: int, pool: int) -> tuple[Share, ...]:
    """Return how pages are divided between the ranks of a prefill worker (0), or of a decode worker (1)."""
    rng = random.Random(f"ranks {seed}")
    return rng.choices(DIVIDED, k=2)[pool] if rng.random() < RANKS_SEEDS else ONE_RANK


def _pages_for_one(others: tuple[PageShape, ...], step_tokens: int) -> float:
    """Return how many pages the longest sequence needs for each that it would need without other groups."""
    return Size(0, max_num_batched_tokens=step_tokens, others=others).max_num_pages / Size(0).max_num_pages


def _no_route(seed: int, num_prefill: int, num_decode: int) -> tuple[str, str] | None:
    """Return which worker cannot dial which, in some of the seeds: mostly decode workers, so that moves alone fail."""
    rng = random.Random(f"no route {seed}")
    if num_decode < 2 or rng.random() >= NO_ROUTE_SEEDS:
        return None
    names = [f"d{number}" for number in range(num_decode)]
    source, target = rng.sample(names, 2)
    return (source if rng.random() < 0.8 else f"p{rng.randrange(num_prefill)}"), target


def _lacking(seed: int, num_prefill: int, num_decode: int) -> frozenset[str]:
    rng = random.Random(f"lacking {seed}")
    names = [f"p{number}" for number in range(1, num_prefill)] + [f"d{number}" for number in range(1, num_decode)]
    return frozenset([name for name in names if rng.random() < LACKING])


def _changed(seed: int, wishes: list[Wish], step_tokens: int, adapters: Sequence[Adapter]) -> list[Wish]:
    return _with_vectors(seed, _with_adapters(seed, _longer(seed, wishes, step_tokens), adapters))


def _longer(seed: int, wishes: list[Wish], step_tokens: int) -> list[Wish]:
    """Let some prompts be longer where steps are short, so that their pages leave windows for many steps."""
    rng = random.Random(f"longer {seed}")
    if step_tokens == max(STEP_TOKENS):
        return wishes
    longer = (replace(wish, prompt=(*wish.prompt, *_tokens(rng, rng.choice(MORE_TOKENS)))) for wish in wishes)
    return [
        each if len(each.prompt) + each.params.max_tokens <= MAX_MODEL_LEN else wish
        for each, wish in zip(longer, wishes, strict=True)
    ]


def _with_adapters(seed: int, wishes: Sequence[Wish], adapters: Sequence[Adapter]) -> list[Wish]:
    rng, digests = random.Random(f"wanted {seed}"), [NO_ADAPTER, *(each.digest for each in adapters)]
    return [replace(wish, adapter=rng.choice(digests)) for wish in wishes]


def _with_vectors(seed: int, wishes: Sequence[Wish]) -> list[Wish]:
    """Let some clients that want one token want a vector of their prompt."""
    rng = random.Random(f"vectors {seed}")
    kinds = [rng.choice((None, Pooling("last"), Pooling("mean"))) for _ in wishes]
    return [
        replace(wish, params=SamplingParams(max_tokens=1, pooling=pooling), stops_at=None)
        if pooling is not None and (wish.params.max_tokens, wish.params.n) == (1, 1)
        else wish
        for wish, pooling in zip(wishes, kinds, strict=True)
    ]


def _wishes(rng: random.Random, num_requests: int, span_s: float, calm: bool) -> list[Wish]:
    stems = [_tokens(rng, rng.choice((8, 15, 24))) for _ in range(4)]
    tenants = ("", "", "red", "blue")
    at_s = 0.8
    wishes = []
    for number in range(num_requests):
        at_s += rng.expovariate(num_requests / span_s)
        stem = rng.choice(stems)[: rng.randrange(25)] if rng.random() < 0.6 else []
        tail = _tokens(rng, rng.choice((1, 2, 3, 4, 5, 11, 30)))
        max_tokens = rng.choice((1, 2, 3, 8, 8, 16, 30, 41))
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=rng.getrandbits(64),
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            stop_token_ids=tuple(_tokens(rng, 40)) if rng.random() < 0.1 else (),
        )
        mood = rng.random() if not calm else 1.0
        wishes.append(
            Wish(
                request_id=RequestId(b"request-%08d" % number),
                at_s=at_s,
                prompt=(*stem, *tail),
                params=params,
                tenant=rng.choice(tenants),
                priority=rng.choice((0, 0, 0, 1)),
                deadline_s=rng.uniform(0.02, 2.0) if mood < 0.06 else 120.0,
                leaves_after_s=rng.expovariate(10.0) if 0.06 < mood < 0.12 else None,
                leaves_at_first_token=0.12 < mood < 0.16,
                stops_at=rng.randrange(1, max_tokens + 1) if 0.16 < mood < 0.22 else None,
            )
        )
    return wishes


def _tokens(rng: random.Random, count: int) -> list[int]:
    """Draw tokens: random bits, those that are over the vocabulary again."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = rng.getrandbits(10)
        if token < VOCAB_SIZE:
            tokens.append(token)
    return tokens
