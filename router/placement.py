"""Which prefill and which decode worker serve a request. Pure functions of the view and the request."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pdserve.errors import Status
from pdserve.router.events import LinkId, Registration, Role
from pdserve.router.view import Workers, WorkerView


@dataclass(frozen=True, slots=True)
class Demand:
    """What a placement has to serve."""

    num_tokens: int  # to prefill
    num_sequences: int
    needs_decode: bool  # False: the first token ends it
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    avoid: frozenset[LinkId]  # workers that failed this request; used only where there is no other
    turn: int  # placements made so far, all requests


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers that can hand KV over to each other."""

    prefill: WorkerView
    decode: WorkerView | None


@dataclass(frozen=True, slots=True)
class Placed:
    pair: Pair
    reason: str  # in words, for the request's ledger


@dataclass(frozen=True, slots=True)
class Held:
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    status: Status
    reason: str


Decision = Placed | Held | Rejected
Policy = Callable[[Seq[Pair], Demand], Decision]  # of at least one pair


def least_loaded(pairs: Seq[Pair], demand: Demand) -> Decision:
    """Take the pair with the fewest prompt tokens to wait for and the emptiest decode batch; then take turns."""
    del demand

    def cost(pair: Pair) -> tuple[float, float, int, str]:
        decode = pair.decode
        share = 0.0 if decode is None else decode.num_sequences / decode.registration.max_num_seqs
        turns = pair.prefill.num_placed + (0 if decode is None else decode.num_placed)
        return share >= 1.0, share + _queue_share(pair.prefill), turns, _names(pair)

    best = min(pairs, key=cost)
    waiting = f"{best.prefill.name} has {best.prefill.pending_prefill_tokens} prompt tokens waiting"
    if best.decode is not None:
        waiting += f", {best.decode.name} {best.decode.num_sequences} sequences"
    return Placed(best, f"least loaded of {len(pairs)}: {waiting}")


def _queue_share(prefill: WorkerView) -> float:
    """Return the prompt tokens in front, in units of the longest prompt."""
    return prefill.pending_prefill_tokens / prefill.registration.max_model_len


def round_robin(pairs: Seq[Pair], demand: Demand) -> Decision:
    """Take the pairs in turn, in the order of their names."""
    ordered = sorted(pairs, key=_names)
    return Placed(ordered[demand.turn % len(ordered)], f"turn {demand.turn} of {len(ordered)} pairs")


def _names(pair: Pair) -> str:
    return f"{pair.prefill.name} {'' if pair.decode is None else pair.decode.name}"


POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def decide(workers: Workers, demand: Demand, policy: Policy) -> Decision:
    """Find the pairs that could serve the demand and let the policy choose; reject where there are none."""
    prefills, decodes = workers.routable(Role.PREFILL), workers.routable(Role.DECODE)
    if not prefills:
        return Rejected(Status.UNAVAILABLE, f"no prefill worker is ready{_why_not(workers, Role.PREFILL)}")
    if not demand.needs_decode:
        return policy(_preferred([Pair(prefill, None) for prefill in prefills], demand.avoid), demand)
    if not decodes:
        return Rejected(Status.UNAVAILABLE, f"no decode worker is ready{_why_not(workers, Role.DECODE)}")
    pairs = [Pair(p, d) for p in prefills for d in decodes if difference(p, d) is None]
    if not pairs:
        return Rejected(Status.UNAVAILABLE, f"no compatible pair: {difference(prefills[0], decodes[0])}")
    return policy(_preferred(pairs, demand.avoid), demand)


def difference(prefill: WorkerView, decode: WorkerView) -> str | None:
    """Return what keeps two workers from handing KV over, or None."""
    mine, theirs = prefill.registration, decode.registration
    if mine.protocol_version != theirs.protocol_version:
        return f"protocol_version: {mine.protocol_version} != {theirs.protocol_version}"
    return _layout_difference(mine, theirs)


def _layout_difference(mine: Registration, theirs: Registration) -> str | None:
    return None if mine.layout == theirs.layout else mine.layout.difference(theirs.layout)


def peerless(workers: Workers, worker: WorkerView) -> str:
    """Return why a routable worker has no routable peer; empty when it has one."""
    other_role = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
    peers = workers.routable(other_role)
    if not peers:
        return f"no {other_role.value} worker is ready"
    if worker.role is Role.PREFILL:
        differences = [difference(worker, peer) for peer in peers]
    else:
        differences = [difference(peer, worker) for peer in peers]
    return "" if None in differences else f"no compatible {other_role.value} worker: {differences[0]}"


def _preferred(pairs: list[Pair], avoid: frozenset[LinkId]) -> list[Pair]:
    """Leave out pairs with a worker to avoid, unless none is left."""
    clean = [p for p in pairs if p.prefill.link not in avoid and (p.decode is None or p.decode.link not in avoid)]
    return clean or pairs


def _why_not(workers: Workers, role: Role) -> str:
    reasons = [f"{w.name}: {workers.unroutable(w)}" for w in workers if w.role is role]
    return f" ({'; '.join(reasons)})" if reasons else ""
