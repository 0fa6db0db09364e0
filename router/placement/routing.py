"""The attached workers, which of them could serve a request, and what a policy may decide about it. Pure."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.base.roles import Role, lacks_pages
from pdserve.base.values import value
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.placement.prefix_index import Hashes
from pdserve.router.placement.sessions import Home
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Fetch
from pdserve.router.requests.events import LinkId, Registration

_WORK = {Role.PREFILL: "computes prompts", Role.DECODE: "decodes"}


@value
class Demand:
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
    adapter: AdapterDigest = NO_ADAPTER  # that both workers must have
    home: Home | None = None  # of its conversation; what the policy may make of it is the policy's to say
    output_tokens: int = 0  # that the client expects of each answer, still to come; 0: it did not say


@value
class Group:
    """Workers that can hand KV over to each other; mixed workers are in both pools.

    `local`: the decode workers may compute prompts themselves, as mixed ones do.
    """

    prefills: Seq[WorkerView]
    decodes: Seq[WorkerView]  # none: the first token ends the request
    local: bool = False


@value
class Pair:
    """Who serves a request: a prefill worker alone, a decode worker alone, or both by a hand-off."""

    prefill: WorkerView | None
    decode: WorkerView | None


def paired(prefill: WorkerView | None, decode: WorkerView | None) -> Pair:
    """Return the pair of two workers. A mixed worker that is both serves the request alone, without a hand-off."""
    return Pair(None if prefill is decode else prefill, decode)


@value
class Placed:
    """A placement, and what is expected of it. What a score means is the policy's to say."""

    pair: Pair
    reason: str  # in words
    cached_tokens: int = 0  # that the worker which computes the prompt probably holds, once they are fetched
    ttft_s: float | None = None  # predicted, from now on
    tpot_s: float | None = None
    score: float | None = None  # how good the policy finds it, 0 to 1; None: it does not compare
    fetch: Fetch | None = None  # of cached tokens, before the prompt is computed

    @property
    def summary(self) -> str:
        """What a request's ledger says of it."""
        return self.reason if self.score is None else f"{self.reason}; score {self.score:.2f}"


@value
class Held:
    why: Refused  # with this it is refused in the end
    until_s: float = inf  # when waiting will no longer help

    @property
    def lacks_workers(self) -> bool:
        """Whether no pair of workers could serve it, whatever room they have."""
        return self.why.cause in (Cause.NO_PREFILL, Cause.NO_DECODE, Cause.NO_PAIR)


Decision = Placed | Held | Refused
Policy = Callable[[Seq[Group], Demand], Decision]  # of at least one group with a worker


class Workers:
    """All attached workers, by link. A name is attached once: its next stream takes the place of the last."""

    def __init__(self, model: str, *, converts_kv: bool = True) -> None:
        """converts_kv: workers whose layouts differ in `dtype` alone may hand KV over to each other."""
        self._model = model
        self._converts_kv = converts_kv
        self._by_link: dict[LinkId, WorkerView] = {}
        self._kinds: dict[tuple[int, KvLayout], int] = {}
        # Until a worker registers or leaves: those that serve the model, and the adapters that are loaded.
        self._pools: dict[Role, list[WorkerView]] = {}
        self._adapters: dict[str, AdapterDigest] | None = None

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._by_link.values())

    def get(self, link: LinkId) -> WorkerView | None:
        return self._by_link.get(link)

    def known(self, link: LinkId) -> WorkerView:
        return self._by_link[link]

    def named(self, worker_id: str) -> WorkerView | None:
        return next((worker for worker in self if worker.name == worker_id), None)

    def register(self, registration: Registration, now_s: float) -> WorkerView:
        """Attach a worker, or take its news of itself; ProtocolError where it claims to be somebody else now."""
        self._forget()
        worker = self._by_link.get(registration.link)
        if worker is None:
            worker = self._by_link[registration.link] = WorkerView(registration, now_s)
            worker.kind = self._kind(registration)
            return worker
        before = worker.registration
        for name in ("worker_id", "incarnation", *(() if registration.role_epoch > before.role_epoch else ("role",))):
            old, now = getattr(before, name), getattr(registration, name)
            if old != now:
                raise ProtocolError(f"{worker.name} registered again with {name} {now}, was {old}")
        worker.registration = registration
        worker.kind = self._kind(registration)
        return worker

    def take_role(self, worker: WorkerView, role: Role | None, epoch: int) -> bool:
        """Take a role that a worker reports with its load; return whether it is another one than it was."""
        before = worker.registration
        if role is None or epoch <= before.role_epoch:
            return False
        self._pools.clear()
        worker.registration = replace(before, role=role, role_epoch=epoch)
        return role is not before.role

    def _kind(self, registration: Registration) -> int:
        if len(self._kinds) > 2 * len(self._by_link) + 16:
            self._kinds = {self._kind_name(worker.registration): worker.kind for worker in self}
        return self._kinds.setdefault(self._kind_name(registration), max(self._kinds.values(), default=0) + 1)

    def _kind_name(self, known: Registration) -> tuple[int, KvLayout]:
        """Return what is equal for workers that can hand KV over to each other."""
        layout = known.layout
        is_any = self._converts_kv and layout.is_convertible
        return known.protocol_version, replace(layout, dtype="any") if is_any else layout

    def remove(self, link: LinkId) -> WorkerView | None:
        self._forget()
        return self._by_link.pop(link, None)

    def _forget(self) -> None:
        """Forget what was made of all registrations."""
        self._pools.clear()
        self._adapters = None

    def routable(self, role: Role, adapter: AdapterDigest = NO_ADAPTER) -> list[WorkerView]:
        """Return the workers of a pool, PREFILL or DECODE, that may be given requests for an adapter."""
        pool = self._pools.get(role)
        if pool is None:
            ready = [w for w in self if w.role.is_in(role) and w.registration.ready]
            pool = self._pools[role] = [worker for worker in ready if not self._incompatibility(worker)]
        able = [worker for worker in pool if not worker.draining]
        return [worker for worker in able if worker.has(adapter)] if adapter else able

    def adapters(self) -> Mapping[str, AdapterDigest]:
        """Return what the workers have loaded, by name: where contents differ, that of the worker attached first."""
        if self._adapters is None:
            loaded = [adapter for worker in self for adapter in worker.registration.adapters]
            self._adapters = {adapter.name: adapter.digest for adapter in reversed(loaded)}
        return self._adapters

    def unroutable(self, worker: WorkerView) -> str:
        """Return why nothing is placed on a worker, whatever its peers are; empty when things are."""
        if not worker.registration.ready:
            return "it is loading"
        if worker.draining:
            return "it is draining"
        return self._incompatibility(worker)

    def refusal(self, worker: WorkerView) -> str:
        """Return, for an operator, why a worker takes no orders; empty when it does."""
        why = self.unroutable(worker)
        return f"{worker.name} takes nothing: {why}" if why else ""

    def role_refusal(self, worker: WorkerView, role: Role, *, force: bool) -> str:
        """Return why a worker cannot take a role; empty when it can.

        Without `force`, the work that it gives up has to be done by another worker, which can hand KV over to the same
        workers.
        """
        if why := self.refusal(worker):
            return why
        known = worker.registration
        longest = known.layout.paging.most_pages(known.max_model_len, known.step_tokens)
        if why := lacks_pages(role, known.num_pages, longest):
            return f"{worker.name}: {why}: lower max_model_len, or raise num_pages"
        for pool, work in _WORK.items():
            leaves = worker.role.is_in(pool) and not role.is_in(pool)
            alike = [other for other in self.routable(pool) if other.kind == worker.kind and other is not worker]
            if leaves and not force and not any(other.coming_role.is_in(pool) for other in alike):
                return f"{worker.name} is the only worker that {work}: make it mixed, or force this"
        return ""

    def _incompatibility(self, worker: WorkerView) -> str:
        """Return what will never let this router and a worker work together; empty when nothing does."""
        known = worker.registration
        if known.protocol_version != PROTOCOL_VERSION:
            return f"protocol_version: {known.protocol_version} != {PROTOCOL_VERSION}"
        return "" if known.model == self._model else f"model: {known.model} != {self._model}"

    def difference(self, prefill: WorkerView, decode: WorkerView) -> str | None:
        """Return what keeps two workers from handing KV over, or None."""
        mine, theirs = prefill.registration, decode.registration
        if mine.protocol_version != theirs.protocol_version:
            return f"protocol_version: {mine.protocol_version} != {theirs.protocol_version}"
        found = mine.layout.difference(theirs.layout, converts=self._converts_kv)
        could = found is not None and not self._converts_kv and mine.layout.difference(theirs.layout) is None
        return f"{found}, and converts_kv is off" if could else found

    def max_model_len(self) -> int | None:
        lengths = [worker.max_num_tokens for worker in self if not self.unroutable(worker)]
        return min(lengths, default=None)


def choose(workers: Workers, demand: Demand, policy: Policy, *, local: bool = False) -> Decision:
    """Find who could serve the demand and let the policy choose.

    With `local`, decode workers may compute prompts themselves: none else is needed.
    """
    adapter = demand.adapter
    prefills, decodes = workers.routable(Role.PREFILL, adapter), workers.routable(Role.DECODE, adapter)
    if not prefills and not (local and decodes):
        return _held(Cause.NO_PREFILL, f"no prefill worker is ready{_why_not(workers, Role.PREFILL, adapter)}")
    if not decodes and demand.needs_decode:
        return _held(Cause.NO_DECODE, f"no decode worker is ready{_why_not(workers, Role.DECODE, adapter)}")
    clean = _preferred(prefills, demand.avoid), _preferred(decodes, demand.avoid)
    if not demand.needs_decode:
        return policy([Group(clean[0], ()) if prefills else Group((), clean[1], local)], demand)
    groups = _groups(*clean, local) or _groups(prefills, decodes, local)
    if not groups:
        return _held(Cause.NO_PAIR, f"no compatible pair: {workers.difference(prefills[0], decodes[0])}")
    return policy(groups, demand)


def _held(cause: Cause, text: str) -> Held:
    return Held(Refused(cause, text))


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


def peerless(workers: Workers, worker: WorkerView) -> str:
    """Return why a routable worker has no routable peer; empty when it has one, or needs none."""
    if worker.role is Role.MIXED:
        return ""
    other_role = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
    peers = workers.routable(other_role)
    if not peers:
        return f"no {other_role.value} worker is ready"
    if any(peer.kind == worker.kind for peer in peers):
        return ""
    pair = (worker, peers[0]) if worker.role is Role.PREFILL else (peers[0], worker)
    return f"no compatible {other_role.value} worker: {workers.difference(*pair)}"


def _preferred(workers: list[WorkerView], avoid: frozenset[LinkId]) -> list[WorkerView]:
    """Leave out workers whose last steps failed, and those to avoid, unless none is left."""
    sound = [worker for worker in workers if not worker.is_failing] or workers
    if not avoid:
        return sound
    return [worker for worker in sound if worker.link not in avoid] or sound


def _why_not(workers: Workers, role: Role, adapter: AdapterDigest) -> str:
    lacks = "it has not loaded this adapter"
    reasons = [f"{w.name}: {workers.unroutable(w) or lacks}" for w in workers if w.role.is_in(role)]
    return f" ({'; '.join(reasons)})" if reasons else ""
