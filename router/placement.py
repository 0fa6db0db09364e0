"""Which prefill and which decode worker serve a request. Pure functions of the view and the request."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf, lcm

from pdserve.kvtransfer.plan import refusal
from pdserve.router.events import LinkId, Refused, Role
from pdserve.router.prefix_index import Hashes
from pdserve.router.view import Workers, WorkerView
from pdserve.values import value


@value
class Demand:
    """What a placement has to serve."""

    num_tokens: int  # to prefill
    num_sequences: int
    needs_decode: bool  # False: the first token ends it
    max_tokens: int  # still to come
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    avoid: frozenset[LinkId]  # workers that failed this request; used only where there is no other
    turn: int  # placements made so far, all requests
    hashes: Hashes = ()  # of the prompt's blocks before its last token, which is always computed
    draw: int = 0  # random bits
    now_s: float = 0.0
    waited_s: float = 0.0  # since the request was received
    is_admitted: bool = False
    may_wait_s: float = inf  # for room; then it is refused
    priority: int = 0  # workers compute prompts of a higher one first


@value
class Group:
    """Workers that can hand KV over to each other. `local`: the decode workers may compute prompts themselves."""

    prefills: Seq[WorkerView]
    decodes: Seq[WorkerView]  # none: the first token ends the request
    local: bool = False


@value
class Pair:
    """Who serves a request: a prefill worker alone, a decode worker alone, or both by a hand-off."""

    prefill: WorkerView | None
    decode: WorkerView | None


@value
class Placed:
    """A placement, and what is expected of it. What a score means is the policy's to say."""

    pair: Pair
    reason: str  # in words
    cached_tokens: int = 0  # that the worker which computes the prompt probably holds
    ttft_s: float | None = None  # predicted, from now on
    tpot_s: float | None = None
    score: float | None = None  # how good the policy finds it, 0 to 1; None: it does not compare

    @property
    def told(self) -> str:
        """What a request's ledger says of it."""
        return self.reason if self.score is None else f"{self.reason}; score {self.score:.2f}"


@value
class Held:
    reason: str
    until_s: float = inf  # when waiting will no longer help


@value
class Unserved:
    """No pair of workers could serve it; one may come."""

    reason: str
    until_s: float = inf  # when it has waited long enough for one


Decision = Placed | Held | Unserved | Refused
Policy = Callable[[Seq[Group], Demand], Decision]  # of at least one group with a worker


def least_loaded(groups: Seq[Group], demand: Demand) -> Decision:
    """Take the fewest prompt tokens to wait for and the emptiest decode batch; then take turns.

    The score is the share that is free: of the batch, or of the longest prompt's room in the queue if that is less.
    """
    del demand
    best = min((_emptiest(group) for group in groups), key=_pair_load)
    waiting = [] if best.prefill is None else [f"{best.prefill.name} has {_queue(best.prefill)} prompt tokens waiting"]
    if best.decode is not None:
        waiting.append(f"{best.decode.name} {best.decode.num_sequences} sequences")
    queue = 0.0 if best.prefill is None else _queue_share(best.prefill)
    batch = 0.0 if best.decode is None else _batch_share(best.decode)
    return Placed(best, f"least loaded: {', '.join(waiting)}", score=max(0.0, 1 - max(queue, batch)))


def _emptiest(group: Group) -> Pair:
    prefill = min(group.prefills, key=lambda w: (_queue_share(w), w.num_placed, w.name), default=None)
    decode = min(group.decodes, key=lambda w: (_batch_share(w), w.num_placed, w.name), default=None)
    return Pair(prefill, decode)


def _pair_load(pair: Pair) -> tuple[bool, float]:
    batch = 0.0 if pair.decode is None else _batch_share(pair.decode)
    return batch >= 1.0, batch + (0.0 if pair.prefill is None else _queue_share(pair.prefill))


def _queue(worker: WorkerView) -> int:
    return worker.pending_prefill_tokens


def _queue_share(worker: WorkerView) -> float:
    """Return the prompt tokens in front, in units of the longest prompt."""
    return worker.pending_prefill_tokens / worker.registration.max_model_len


def _batch_share(worker: WorkerView) -> float:
    return worker.num_sequences / worker.registration.max_num_seqs


def round_robin(groups: Seq[Group], demand: Demand) -> Decision:
    """Take the workers of each pool in turn, in the order of their names; in time, every pair."""
    turn = demand.turn
    group = groups[turn % len(groups)]
    turn //= len(groups)
    round_length = lcm(max(1, len(group.prefills)), max(1, len(group.decodes)))
    prefill, decode = _in_turn(group.prefills, turn), _in_turn(group.decodes, turn + turn // round_length)
    return Placed(Pair(prefill, decode), f"turn {demand.turn}")


def _in_turn(workers: Seq[WorkerView], turn: int) -> WorkerView | None:
    return sorted(workers, key=lambda worker: worker.name)[turn % len(workers)] if workers else None


def decide(workers: Workers, demand: Demand, policy: Policy, *, local: bool = False) -> Decision:
    """Find who could serve the demand and let the policy choose.

    With `local`, decode workers may compute prompts themselves: none else is needed.
    """
    prefills, decodes = workers.routable(Role.PREFILL), workers.routable(Role.DECODE)
    if not prefills and not (local and decodes):
        return Unserved(f"no prefill worker is ready{_why_not(workers, Role.PREFILL)}")
    if not decodes and demand.needs_decode:
        return Unserved(f"no decode worker is ready{_why_not(workers, Role.DECODE)}")
    clean = _preferred(prefills, demand.avoid), _preferred(decodes, demand.avoid)
    if not demand.needs_decode:
        return policy([Group(clean[0], ()) if prefills else Group((), clean[1], local)], demand)
    groups = _groups(*clean, local) or _groups(prefills, decodes, local)
    if not groups:
        return Unserved(f"no compatible pair: {difference(prefills[0], decodes[0])}")
    return policy(groups, demand)


def _groups(prefills: list[WorkerView], decodes: list[WorkerView], local: bool) -> list[Group]:
    if prefills and decodes and len({worker.kind for worker in (*prefills, *decodes)}) == 1:
        return [Group(prefills, decodes, local)]
    kinds: dict[int, tuple[list[WorkerView], list[WorkerView]]] = {}
    for worker in prefills:
        kinds.setdefault(worker.kind, ([], []))[0].append(worker)
    for worker in decodes:
        kinds.setdefault(worker.kind, ([], []))[1].append(worker)
    paired = [Group(ps, ds, local) for ps, ds in kinds.values() if ps and ds]
    alone = [Group((), ds, local) for ps, ds in kinds.values() if local and ds and not ps]
    return paired or alone


def difference(prefill: WorkerView, decode: WorkerView) -> str | None:
    """Return what keeps two workers from handing KV over, or None."""
    mine, theirs = prefill.registration, decode.registration
    if mine.protocol_version != theirs.protocol_version:
        return f"protocol_version: {mine.protocol_version} != {theirs.protocol_version}"
    return refusal(mine.layout, theirs.layout)


def peerless(workers: Workers, worker: WorkerView) -> str:
    """Return why a routable worker has no routable peer; empty when it has one."""
    other_role = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
    peers = workers.routable(other_role)
    if not peers:
        return f"no {other_role.value} worker is ready"
    if any(peer.kind == worker.kind for peer in peers):
        return ""
    pair = (worker, peers[0]) if worker.role is Role.PREFILL else (peers[0], worker)
    return f"no compatible {other_role.value} worker: {difference(*pair)}"


def _preferred(workers: list[WorkerView], avoid: frozenset[LinkId]) -> list[WorkerView]:
    """Leave out workers whose last steps failed, and those to avoid, unless none is left."""
    sound = [worker for worker in workers if not worker.is_failing] or workers
    if not avoid:
        return sound
    return [worker for worker in sound if worker.link not in avoid] or sound


def _why_not(workers: Workers, role: Role) -> str:
    reasons = [f"{w.name}: {workers.unroutable(w)}" for w in workers if w.role is role]
    return f" ({'; '.join(reasons)})" if reasons else ""
