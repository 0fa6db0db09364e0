"""One-sided copies from one process's pages into another's: in slices, over virtual time.

What NIXL does, as measured: a writer's end stops its writes for good and may leave a page half written; a frozen
writer's outstanding writes go on when it thaws, whatever anybody released meanwhile; a lost receiver is an error soon,
or never until the writer is told to forget it; after an error, what was on its way may still land.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Concatenate, ParamSpec

from faultsim.memory import Memory, Stamp
from faultsim.network import Network
from faultsim.ranks import Piece, digest_of_sent, pieces
from faultsim.world import Process
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.copies import Copy, CopyQueue
from pdserve.kvtransfer.session import Grant

P = ParamSpec("P")

DISCONNECT_S = 0.03  # until a write into a dead process is an error
STALLED_S = 18.0  # until a write along a cut path is an error
RETRY_S = 0.25
LATE_S = 1.0  # until all has landed that was on its way when a copy failed


@dataclass(frozen=True, slots=True)
class CopyFaults:
    """How often copies go wrong by themselves."""

    failed: float = 0.0  # share of copies that break off half way
    corrupted: float = 0.0  # share of pages that land with a wrong bit and are reported well
    in_doubt: float = 0.0  # share of these whose page lands nevertheless, late
    stuck: float = 0.0  # share of copies into dead processes that never err
    page_s: float = 0.0002


class Host(Process):
    """A process whose pages can be written from outside."""

    memory: Memory


@dataclass(slots=True, eq=False)
class Op:
    """One copy under way. A slice is a page."""

    peer: Peer
    copy: Copy
    src: tuple[Stamp, ...]
    dst: tuple[Stamp, ...]
    digests: list[int] = field(default_factory=list)
    num_stalls: int = 0
    over: bool = False

    @property
    def key(self) -> AttemptKey:
        return self.copy.handoff


class Mover:
    """The copies of one rank of a process: one slice to each peer at a time, in the order that the real movers take."""

    def __init__(
        self,
        owner: Process,
        memory: Memory,
        network: Network,
        find: Callable[[Peer], Host | None],
        report: Callable[[doors.ReceiverMessage], object],
        part: int = 0,
    ) -> None:
        """part: which rank of the worker it is. Any but the first one is a process of its own."""
        self.faults = CopyFaults()
        self.process = Process(owner.world, f"{owner.name}/rank-{part}", owner.incarnation) if part else owner
        self._part, self._share = part, memory.shares[part]
        self.site: Callable[[str, Process], object] = lambda site, process: None
        self._owner = owner
        self._world = owner.world
        self._memory = memory
        self._network = network
        self._find = find
        self._report = report
        name = f"doubt {owner!r} {owner.world.seed}{part or ''}"
        self._doubt = random.Random(name)  # changes no other fault of a seed
        self.num_in_doubt = 0
        self._ops: dict[Copy, Op] = {}  # outstanding
        self._copies: dict[Peer, CopyQueue] = {}
        self._posted: dict[Peer, Op] = {}  # whose slice is on its way

    @property
    def idle(self) -> bool:
        return not self._ops

    def order(self, act: Callable[Concatenate["Mover", P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the rank do something: at once if it is the first one, else once its process has read that."""
        if self._part:
            self._world.after(0.0, self.process, partial(act, self, *args, **kwargs))
        else:
            act(self, *args, **kwargs)

    def copy(self, command: doors.StartCopy, grant: Grant) -> None:
        """Start a copy into pages of a grant; CopyStopped follows."""
        generation = dict(zip(grant.pages, grant.generations, strict=True))
        dst = tuple(Stamp(page, generation[page]) for page in command.dst)
        copy = Copy(command.peer, command.key, command.src, command.dst)
        self._ops[copy] = Op(command.peer, copy, tuple(map(self._memory.stamp, command.src)), dst)
        self._copies.setdefault(command.peer, CopyQueue()).add(copy)
        self._go_on(command.peer)

    def cancel(self, peer: Peer, key: AttemptKey) -> None:
        """Copy nothing more of a hand-off than the slice on its way."""
        if peer in self._copies:
            self._copies[peer].cancel(key, "cancelled")
            self._go_on(peer)

    def forget(self, peer: Peer) -> None:
        """Report every copy to a process that has ended as stopped."""
        self._posted.pop(peer, None)
        for copy in self._copies.pop(peer, ()):
            op = self._ops.pop(copy)
            op.over = True
            self._tell(op, self._stopped(None, "its process ended"))

    def check(self) -> None:
        """Raise ViolationError where a page was released that a copy will read or write."""
        for op in self._ops.values():
            done, target = len(op.digests), self._target(op.peer)
            for src in op.src[done:]:
                self._memory.check_source(src, op.key)
            if target is not None:
                for dst in op.dst[done:]:
                    target.memory.check_target(dst, op.key)

    def _go_on(self, peer: Peer) -> None:
        """Report what is over, and post the next slice unless one is on its way."""
        copies = self._copies[peer]
        for copy in tuple(copies.pop_finished()):
            op = self._ops.pop(copy)
            op.over = True
            digests = None if copy.failure else tuple(op.digests)
            stopped = self._stopped(digests, copy.failure, in_doubt=copy.in_doubt)
            self._tell(op, stopped)
        if self._copies.get(peer) is not copies or peer in self._posted:
            return  # a report has led here, and on
        following = copies.next()
        if following is None:
            return
        copies.posted(following, 1, has_landed=False)
        op = self._posted[peer] = self._ops[following]
        self._world.after(self.faults.page_s * (0.5 + self._world.rng.random()), self.process, self._slice, op)

    def _tell(self, op: Op, stopped: doors.CopyStopped) -> None:
        """Report an end to the first rank, which hears it while it is there and not frozen."""
        message = doors.ReceiverMessage(op.peer, op.key, stopped)
        if self._part:
            self._world.after(0.0, self._owner, self._report, message)
        else:
            self._report(message)

    def _stopped(self, digests: tuple[int, ...] | None, why: str, *, in_doubt: bool = False) -> doors.CopyStopped:
        return doors.CopyStopped(digests, why, in_doubt, self._part)

    def _target(self, peer: Peer) -> Host | None:
        process = self._find(peer)
        return process if process is not None and process.alive else None

    def _slice(self, op: Op) -> None:
        if op.over:
            return
        chance = self._world.rng.random()
        target = self._target(op.peer)
        if target is None:
            stuck = op.num_stalls > 0 or chance < self.faults.stuck
            op.num_stalls += stuck
            if not stuck:
                self._world.after(DISCONNECT_S, self.process, self._stop, op, "the peer disconnected")
        elif self._network.cuts and self._network.is_cut(self._owner, target):
            op.num_stalls += 1
            if op.num_stalls * RETRY_S > STALLED_S:
                self._stop(op, "the peer does not answer")
            else:
                self._world.after(RETRY_S, self.process, self._slice, op)
        elif chance < self.faults.failed / len(op.src):
            self._fail(op, target)
        else:
            self._write(op, target.memory)

    def _fail(self, op: Op, target: Host) -> None:
        """Break a copy off in the middle of a page. In doubt, the target reads all of it late, while both live."""
        content, dst = self._memory.read(op.src[len(op.digests)], op.key), op.dst[len(op.digests)]
        whole = list(pieces(content, self._share, target.memory.shares))
        target.memory.write(dst, op.key, whole[: len(whole) // 2])
        if self._doubt.random() < self.faults.in_doubt:
            op.copy.in_doubt = True
            self.num_in_doubt += 1
            self._world.after(self._doubt.random() * LATE_S, target, self._land_late, target, dst, op.key, whole)
        self._stop(op, "the transfer failed")

    def _land_late(self, target: Host, dst: Stamp, key: AttemptKey, whole: list[Piece]) -> None:
        if self.process.alive:
            target.memory.write(dst, key, whole)

    def _write(self, op: Op, target: Memory) -> None:
        place = len(op.digests)
        content = self._memory.read(op.src[place], op.key)
        landed = pieces(content, self._share, target.shares)
        if self._world.rng.random() < self.faults.corrupted:
            broken = [(where, bytes((first[0] ^ 1, *first[1:]))) for where, first in islice(landed, 1)]
            landed = chain(broken, landed)
        target.write(op.dst[place], op.key, landed)
        op.digests.append(digest_of_sent(content, self._share))
        if len(op.digests) < len(op.src):
            self.site("mid_copy", self._owner)
        self._end_slice(op)

    def _stop(self, op: Op, failure: str) -> None:
        if not op.over:
            self._copies[op.peer].fail(op.copy, failure)
            self._end_slice(op)

    def _end_slice(self, op: Op) -> None:
        if not op.over:
            del self._posted[op.peer]
            self._copies[op.peer].slice_ended(op.copy)
            self._go_on(op.peer)
