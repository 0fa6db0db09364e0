"""Messages that no honest peer sends: forged, misdirected, repeated. Each is refused, and changes nothing."""

from dataclasses import replace

from faultsim.cluster import Cluster
from faultsim.worker import WorkerProcess
from faultsim.world import ViolationError
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.doors import DigestsChecked, ReceiverMessage, SenderMessage, ToReceiver
from pdserve.kvtransfer.session import Capsule, Commit, FromSender, PagesLanded, Quiesced, Tail, Taken, Withdrawn
from pdserve.protocol.sampling import SampledToken
from pdserve.worker.messages import Cancelled

NOBODY = Peer(WorkerId("p0"), Incarnation(1))  # an incarnation that ended long ago
UNKNOWN = AttemptKey(RequestId(b"request-of-nobody"[:16]), Attempt(0))
CAPSULE = Capsule(1, (Tail(0, (SampledToken(1),)),))
STRANGER = Tail(1 << 20, (SampledToken(1),))  # of a continuation that nobody asked for
LATE_NEWS = DigestsChecked(UNKNOWN, None)  # honest, and of nothing that goes on

Forged = ReceiverMessage | SenderMessage | Cancelled


class Hostile:
    """Sends one forged message at a time to a worker that can be in any state."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.world.rng

    def strike(self) -> None:
        if self._rng.random() < 0.3:
            self._repeat_a_step()
        else:
            self._speak_to_a_worker()

    def _repeat_a_step(self) -> None:
        routers = [router for router in self._cluster.routers.values() if router.alive and not router.frozen]
        if routers:
            router = self._rng.choice(routers)
            for link_id, message in list(router.recent):
                self._cluster.world.note("mallory", message)
                router.take(link_id, message)

    def _speak_to_a_worker(self) -> None:
        workers = [worker for worker in self._cluster.workers.values() if worker.alive]
        if workers:
            self.speak_to(self._rng.choice(workers))

    def speak_to(self, worker: WorkerProcess) -> None:
        """Forge a message; raise ViolationError unless it is refused, and changes nothing."""
        if not worker.alive or not worker.can_listen:
            return
        worker.handle(LATE_NEWS)  # brings the grants that a step made room for: they are no answer to ours
        forged = self._forge(worker)
        self._cluster.world.note("mallory", forged)
        before = _state(worker)
        try:
            commands = worker.core.handle(forged, self._cluster.world.now)
        except ProtocolError:
            commands = []
        except Exception as error:
            raise ViolationError("I7", f"{worker.name} broke on a forged {forged}: {error!r}") from error
        answers = [command for command in commands if not _is_harmless(command)]
        if answers or _state(worker) != before:
            request_id = forged.request_id if isinstance(forged, Cancelled) else forged.key.request_id
            raise ViolationError("I1", f"{worker.name} took a forged {forged} and did {answers}", request_id)

    def _forge(self, worker: WorkerProcess) -> Forged:
        if self._rng.random() < 0.1:
            return Cancelled(UNKNOWN.request_id, Attempt(3))
        doors = worker.doors
        is_receiver = bool(doors.granted) and (not doors.placed or self._rng.random() < 0.5)
        return self._forge_as_sender(worker) if is_receiver else self._forge_as_receiver(worker)

    def _forge_as_sender(self, worker: WorkerProcess) -> SenderMessage:
        """Speak as the sender of a hand-off with something wrong about it."""
        granted = list(worker.doors.granted)
        if not granted or self._rng.random() < 0.2:
            return SenderMessage(NOBODY, UNKNOWN, Commit(b"?" * 16, CAPSULE))
        peer, key, grant, length = self._rng.choice(granted)
        good = Commit(grant.capability, Capsule(length, CAPSULE.tails))
        past = Peer(peer.worker_id, Incarnation(peer.incarnation - 500))
        events: list[tuple[Peer, FromSender]] = [
            (peer, replace(good, capability=b"?" * 16)),
            (peer, PagesLanded((0,) * (len(grant.pages) + 1))),
            (peer, replace(good, capsule=Capsule(length, (*CAPSULE.tails, STRANGER)))),
            (peer, replace(good, capsule=Capsule(length, ()))),
            (peer, replace(good, capsule=Capsule(length + 1, CAPSULE.tails))),
            (past, good),
            (past, Quiesced("q")),
        ]
        who, event = self._rng.choice(events)
        return SenderMessage(who, key, event)

    def _forge_as_receiver(self, worker: WorkerProcess) -> ReceiverMessage:
        sending = list(worker.doors.placed)
        if not sending or self._rng.random() < 0.2:
            return ReceiverMessage(NOBODY, UNKNOWN, Taken())
        peer, key = self._rng.choice(sending)
        past = Peer(peer.worker_id, Incarnation(peer.incarnation - 500))
        return ReceiverMessage(past, key, self._rng.choice((Taken(), Withdrawn("forged"))))


def _state(worker: WorkerProcess) -> tuple[object, ...]:
    """Return what a refused message may not change."""
    load = worker.core.load()
    pool = worker.scheduler.cache.pool
    return load, pool.generations(map(PageId, range(pool.num_pages)))


def _is_harmless(command: object) -> bool:
    """Saying that nothing is under way for an unknown hand-off promises nothing to anybody."""
    return isinstance(command, ToReceiver) and isinstance(command.message, Quiesced)
