"""Conversations whose prompts grow turn by turn: time to first token with earlier answers fetched, cached, or computed.

Three kinds of conversations go turn by turn beside each other, each with prompts and a tenant of its own. In one the
prefill worker may fetch what the decode worker holds of earlier answers. In one it is made to hold the past before the
turn is sent. In one, on a cluster that fetches nothing, it has to compute the answers with the turn.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from pdserve.base.errors import CommandError
from pdserve.launch.plan import ClusterSpec, Flags
from pdserve.measure.client import new_tenant, request_of
from pdserve.measure.live import LiveCluster, Report, live_cluster
from pdserve.measure.outcomes import ANY, Outcome
from pdserve.measure.workload import Arrival
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.link import layout_from_proto

Kind = Literal["fetched", "cached", "computed"]
KINDS: tuple[Kind, ...] = ("fetched", "cached", "computed")
WITHOUT_FETCHING: Flags = {"kv_events": "off"}  # a router that does not know who holds answers
_WARM_UPS, _WARM_TURNS, _WARM_ANSWER = 3, 3, 64


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """How long conversations are, and how many."""

    turns: int
    prompt_tokens: int  # of the last turn
    answer_tokens: int  # of each turn
    repeats: int  # conversations of each kind
    seed: int

    @property
    def said_tokens(self) -> int:
        """Return how many tokens each turn adds beside the answer before it."""
        return max(1, (self.prompt_tokens - (self.turns - 1) * self.answer_tokens) // self.turns)


@dataclass(frozen=True, slots=True)
class Turn:
    kind: Kind
    number: int  # from 1
    prompt_tokens: int
    computed_tokens: int  # of the prompt, on the prefill worker
    fetched_tokens: int
    ttft_s: float
    fetch_s: float  # from its arrival at the prefill worker until the fetched pages were there
    again_ttft_s: float  # of the same prompt sent once more


@dataclass(frozen=True, slots=True)
class ConversationFindings:
    """All turns, and how fast pages go from the decode to the prefill worker."""

    turns: tuple[Turn, ...]
    token_bytes: int  # of KV
    bytes_per_s: float


async def measure_conversations(spec: ClusterSpec, plan: ConversationPlan, report: Report) -> ConversationFindings:
    """Start a cluster that fetches and one that does not, and hold conversations with both."""
    without = replace(spec, name=f"{spec.name}-without", router_flags=WITHOUT_FETCHING, router_port=0)
    turns: list[Turn] = []
    async with AsyncExitStack() as stack:
        fetching = await stack.enter_async_context(live_cluster(spec, report))
        computing = await stack.enter_async_context(live_cluster(without, report))
        clusters: dict[Kind, LiveCluster] = {"fetched": fetching, "cached": fetching, "computed": computing}
        await _warm_up(clusters, plan, report)
        for repeat in range(plan.repeats):
            report(f"conversation {repeat + 1} of {plan.repeats}")
            talks = [_Talk(clusters[kind], kind, plan, repeat) for kind in KINDS]
            for number in range(1, plan.turns + 1):
                turns += [await talk.turn(number) for talk in talks]
        status = await fetching.status()
    token_bytes = layout_from_proto(status.workers[0].registration.layout).token_bytes
    return ConversationFindings(tuple(turns), token_bytes, _bandwidth(status))


async def _warm_up(clusters: Mapping[Kind, LiveCluster], plan: ConversationPlan, report: Report) -> None:
    """Let workers meet in both directions, and routers learn what steps and transfers cost."""
    report("warming up")
    for repeat in range(_WARM_UPS):
        for kind in KINDS:
            talk = _Talk(clusters[kind], kind, replace(plan, answer_tokens=_WARM_ANSWER), f"warm-up {repeat}")
            for number in range(1, _WARM_TURNS + 1):
                await talk.turn(number)


class _Talk:
    def __init__(self, cluster: LiveCluster, kind: Kind, plan: ConversationPlan, name: object) -> None:
        self._cluster = cluster
        self._kind = kind
        self._plan = plan
        self._rng = random.Random(f"conversation {plan.seed} {kind} {name}")
        self._tenant = new_tenant()
        self._past: list[int] = []

    async def turn(self, number: int) -> Turn:
        if self._kind == "cached" and self._past:
            await self._send(1)  # has the past cached where the next prompt will be
        self._past += [self._rng.randrange(3, self._cluster.vocab_size) for _ in range(self._plan.said_tokens)]
        outcome = await self._send(self._plan.answer_tokens)
        again = await self._send(2)
        stages = outcome.stages_s
        turn = Turn(
            kind=self._kind,
            number=number,
            prompt_tokens=len(self._past),
            computed_tokens=len(self._past) - outcome.cached_tokens,
            fetched_tokens=outcome.fetched_tokens,
            ttft_s=outcome.ttft_s or 0.0,
            fetch_s=stages["fetched"] - stages["prefill_queued"] if "fetched" in stages else 0.0,
            again_ttft_s=again.ttft_s or 0.0,
        )
        self._past += outcome.tokens[0]
        return turn

    async def _send(self, num_tokens: int) -> Outcome:
        arrival = Arrival(0.0, len(self._past), num_tokens)
        outcome = await self._cluster.client.send(request_of(arrival, self._past, self._tenant, ANY))
        if not outcome.is_good:
            raise CommandError(f"a turn of {len(self._past)} tokens ended with {outcome.status}: {outcome.detail}")
        return outcome


def _bandwidth(status: admin.ClusterStatus) -> float:
    """Return how fast pages go back to the prefill worker, or to a decode worker where none ever did."""
    pairs = [pair for worker in status.workers for pair in worker.pairs]
    back = [pair for pair in pairs if pair.decode_worker_id.startswith("prefill")] or pairs
    return max((float(pair.bytes_per_s) for pair in back), default=float("nan"))


@dataclass(frozen=True, slots=True)
class TurnMedians:
    """One turn: medians over the conversations of a kind."""

    name: str
    prompt_tokens: float
    fetched_tokens: float
    computed_tokens: Mapping[Kind, float]  # of the prompt, on the prefill worker
    ttft_s: Mapping[Kind, float]
    transfer_s: float  # of the fetched tokens at the measured bandwidth
    ratio: float  # of TTFT with the past fetched, to that with the past cached plus the transfer
    fetch_s: float  # from the prompt's arrival until the fetched pages were there
    again_ttft_s: float  # of the same prompt sent once more


def medians(found: ConversationFindings) -> list[TurnMedians]:
    return [_medians(found, number) for number in sorted({turn.number for turn in found.turns})]


def _medians(found: ConversationFindings, number: int) -> TurnMedians:
    def of(value: Callable[[Turn], float], kind: Kind = "fetched") -> float:
        turns = (turn for turn in found.turns if (turn.kind, turn.number) == (kind, number))
        return float(median(map(value, turns)))

    ttft_s = {kind: of(lambda turn: turn.ttft_s, kind) for kind in KINDS}
    fetched_tokens = of(lambda turn: turn.fetched_tokens)
    transfer_s = fetched_tokens * found.token_bytes / found.bytes_per_s
    return TurnMedians(
        name=f"turn {number}",
        prompt_tokens=of(lambda turn: turn.prompt_tokens),
        fetched_tokens=fetched_tokens,
        computed_tokens={kind: of(lambda turn: turn.computed_tokens, kind) for kind in KINDS},
        ttft_s=ttft_s,
        transfer_s=transfer_s,
        ratio=ttft_s["fetched"] / (ttft_s["cached"] + transfer_s),
        fetch_s=of(lambda turn: turn.fetch_s),
        again_ttft_s=of(lambda turn: turn.again_ttft_s),
    )


def conversation_notes(found: ConversationFindings) -> list[str]:
    with_, without = (
        sum(turn.computed_tokens for turn in found.turns if turn.kind == kind) for kind in ("fetched", "computed")
    )
    worst = max((turn.ratio for turn in medians(found)[1:]), default=float("nan"))
    return [
        f"prompt tokens computed: {with_:,} with fetching, {without:,} without ({1 - with_ / without:.0%} fewer)",
        f"worst ratio from turn 2 on: {worst:.2f}",
        f"{found.bytes_per_s / 1e6:.0f} MB/s, {found.token_bytes:,} bytes of KV a token",
    ]
