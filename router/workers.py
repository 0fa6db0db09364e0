"""The attached workers, the pools that they form, and why nothing is placed on one."""

from collections.abc import Iterator
from dataclasses import replace

from pdserve.errors import ProtocolError
from pdserve.ids import PROTOCOL_VERSION
from pdserve.kvlayout import KvLayout
from pdserve.roles import Role, lacks_pages
from pdserve.router.events import LinkId, Registration
from pdserve.router.view import WorkerView

_WORK = {Role.PREFILL: "computes prompts", Role.DECODE: "decodes"}


class Workers:
    """All attached workers, by link. A name is attached once: its next stream takes the place of the last."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._by_link: dict[LinkId, WorkerView] = {}
        self._kinds: dict[tuple[int, KvLayout], int] = {}
        self._pools: dict[Role, list[WorkerView]] = {}  # that serve the model, until a worker registers or leaves

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
        self._pools.clear()
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

    def _kind(self, told: Registration) -> int:
        if len(self._kinds) > 2 * len(self._by_link) + 16:
            present = {(w.registration.protocol_version, w.registration.layout): w.kind for w in self}
            self._kinds = present
        name = (told.protocol_version, told.layout)
        return self._kinds.setdefault(name, max(self._kinds.values(), default=0) + 1)

    def remove(self, link: LinkId) -> WorkerView | None:
        self._pools.clear()
        return self._by_link.pop(link, None)

    def routable(self, role: Role) -> list[WorkerView]:
        """Return the workers of a pool, PREFILL or DECODE, that may be given requests."""
        pool = self._pools.get(role)
        if pool is None:
            ready = [w for w in self if w.role.is_in(role) and w.registration.ready]
            pool = self._pools[role] = [worker for worker in ready if not self._strangeness(worker)]
        return [worker for worker in pool if not worker.draining]

    def unroutable(self, worker: WorkerView) -> str:
        """Return why nothing is placed on a worker, whatever its peers are; empty when things are."""
        if not worker.registration.ready:
            return "it is loading"
        if worker.draining:
            return "it is draining"
        return self._strangeness(worker)

    def refusal(self, worker: WorkerView) -> str:
        """Return, for an operator, why a worker takes no orders; empty when it does."""
        why = self.unroutable(worker)
        return f"{worker.name} takes nothing: {why}" if why else ""

    def role_refusal(self, worker: WorkerView, role: Role, *, force: bool) -> str:
        """Return why a worker cannot take a role, or nothing. With `force` others need not do what it no longer does.

        Others: that can hand KV over to the same workers as this one.
        """
        if why := self.refusal(worker):
            return why
        known = worker.registration
        longest = -(-known.max_model_len // known.layout.page_size)
        if why := lacks_pages(role, known.num_pages, longest):
            return f"{worker.name}: {why}: lower max_model_len, or raise num_pages"
        for pool, work in _WORK.items():
            leaves = worker.role.is_in(pool) and not role.is_in(pool)
            alike = [other for other in self.routable(pool) if other.kind == worker.kind and other is not worker]
            if leaves and not force and not any(other.coming_role.is_in(pool) for other in alike):
                return f"{worker.name} is the only worker that {work}: make it mixed, or force this"
        return ""

    def _strangeness(self, worker: WorkerView) -> str:
        """Return what will never let this router and a worker work together; empty when nothing does."""
        known = worker.registration
        if known.protocol_version != PROTOCOL_VERSION:
            return f"protocol_version: {known.protocol_version} != {PROTOCOL_VERSION}"
        return "" if known.model == self._model else f"model: {known.model} != {self._model}"

    def max_model_len(self) -> int | None:
        """Return the longest sequence that every routable worker can hold; None while there is none."""
        lengths = [worker.max_num_tokens for worker in self if not self.unroutable(worker)]
        return min(lengths, default=None)
