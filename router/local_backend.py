"""The `Backend` in the router's own process: for the frontend that runs here, or for links to other processes."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from pdserve.base.ids import RequestId
from pdserve.base.roles import Role
from pdserve.net.credentials import Connections
from pdserve.observe.metrics import E2E, FRONTENDS, FRONTENDS_LOST, INFERENCE, QUEUE, Sample, connection_samples
from pdserve.observe.metrics_server import metrics_text
from pdserve.router.admin import AdminEndpoint
from pdserve.router.config import RouterConfig
from pdserve.router.dispatcher import Answer
from pdserve.router.frontend.backend import PERIOD_S, Abort, EngineState, KeptCounts, Readiness, State
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.limits import Uses
from pdserve.router.live import Live
from pdserve.router.metrics import OK, Ends, router_samples
from pdserve.router.requests.events import ClientGone, RequestArrived
from pdserve.router.shell import Shell


class LocalBackend:
    """A router's core, as frontends see it."""

    def __init__(self, shell: Shell, config: RouterConfig, model: str, is_stopping: Callable[[], bool]) -> None:
        self.clock = shell.clock
        self.tenants = Uses(shell.clock)
        self.outcomes = Ends(model)
        self.clients = Clients(config.api_keys_file, self.tenants)
        self.admin = AdminEndpoint(shell, config.router_id, model)
        self.connections = Connections()  # to the public port
        may_have_tls = config.ssl_certfile is not None or not config.serve_clients
        self.ports = {"public": self.connections} if may_have_tls else {}  # by name; frontends report theirs
        self._live = Live(shell.core, self.admin.status, shell.clock.now_s())
        self._packed = b""  # the last state that frontends in other processes were sent
        self._packed_s = -inf  # when it was made
        self.num_frontends_lost = 0
        self.num_spans: Counter[str] = Counter()  # of frontends in other processes, by what became of them
        self.span_counts: Callable[[], Mapping[str, int]] = lambda: self.num_spans
        self.aborts: list[Abort] = []
        self.kept = KeptCounts()
        self.shell = shell
        self._model = model
        self._shows_metrics, self._serves_clients = config.metrics, config.serve_clients
        self._is_stopping = is_stopping
        self._grace_s, self._scale_to_zero = config.pool_grace_s, config.scale_to_zero
        self._max_model_len: int | None = None  # of the workers, as last seen
        self._ready_until_s = -inf

    def readiness(self) -> Readiness:
        """Return whether the router serves now.

        It counts as ready for `pool_grace_s` after a pair of workers was seen here: requests wait for workers as long.
        Pairs that come and go between two calls are not seen. Where pools scale to zero, it counts as ready without.
        """
        is_live, core, now_s = not self._is_stopping(), self.shell.core, self.clock.now_s()
        has_pair = core.is_ready or self._scale_to_zero
        if has_pair:
            self._ready_until_s = now_s + self._grace_s
        self._max_model_len = core.workers.max_model_len() or self._max_model_len
        was_ready = has_pair or now_s < self._ready_until_s
        return Readiness(
            is_live=is_live,
            is_ready=was_ready and is_live,
            can_serve=has_pair and is_live,
            max_model_len=self._max_model_len,
            adapters=core.workers.adapters(),
            model=self._model,
        )

    def submit(self, event: RequestArrived, answer: Answer) -> None:
        self.shell.post_arrival(event, answer)

    def leave(self, request_id: RequestId) -> None:
        self.shell.post(ClientGone(request_id))

    def fail(self, error: Exception) -> None:
        self.shell.fail(error)

    async def live(self) -> State:
        return self._live.state(self.clock.now_s(), time.time())

    async def packed_live(self) -> bytes:
        """Return the live page's state as MessagePack: made once in PERIOD_S, however many frontends ask."""
        if self.clock.now_s() >= self._packed_s + PERIOD_S:
            self._packed, self._packed_s = msgspec.msgpack.encode(await self.live()), self.clock.now_s()
        return self._packed

    async def live_request(self, name: str) -> dict[str, Any] | None:
        return self._live.request(name, self.clock.now_s(), time.time())

    async def metrics(self) -> bytes:
        return await metrics_text(self.samples) if self._shows_metrics else b""

    def samples(self) -> Iterator[Sample]:
        yield Sample(FRONTENDS, len(self.admin.frontends) + self._serves_clients)
        yield Sample(FRONTENDS_LOST, self.num_frontends_lost)
        yield from self.kept.samples()
        yield from connection_samples(self.ports)
        counts = self.span_counts()
        yield from router_samples(self.shell, self.outcomes, self.clients, self.tenants, counts, self._model)

    async def engine(self) -> EngineState:
        core, num_tokens, max_num_tokens, max_num_seqs = self.shell.core, 0, 0, 0
        for worker in core.workers:
            known = worker.registration
            if not (known.ready and known.role.is_in(Role.DECODE)):
                continue
            num_free = known.num_pages if worker.load is None else worker.load.pages_free
            num_tokens += known.layout.paging.whole_tokens(known.num_pages - num_free)
            max_num_tokens += known.layout.paging.whole_tokens(known.num_pages)
            max_num_seqs += known.max_num_seqs
        ended, ends = core.placements.ended, self.outcomes
        return EngineState(
            is_ready=self.readiness().can_serve,
            num_running=core.placements.num_asked,
            num_waiting=core.num_held,
            num_tokens=num_tokens,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            answered=ends.span(E2E),
            queued=ends.span(QUEUE),
            computed=ends.span(INFERENCE),
            num_failed=ended.total() - ended[OK] + ends.num_invalid + self.tenants.over_limit.total(),
        )

    def abort(self, tenant: str, names: Sequence[str]) -> None:
        for abort in self.aborts:
            abort(tenant, names)
