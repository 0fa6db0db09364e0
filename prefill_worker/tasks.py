"""What a prefill worker has in hand."""

from dataclasses import dataclass, field

from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import sender
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.worker.messages import RouterRef

STUCK_S = 10.0  # until copies that do not stop count as those to a frozen peer; a peer is lost after 4 s


@dataclass(slots=True, eq=False)
class Task:
    """One placement: its sequence, and its hand-off if there is one."""

    router: RouterRef
    key: HandoffKey
    sequence: Sequence
    peer: Peer | None
    sender: sender.Sender
    deadline_s: float
    num_announced: int = 0  # pages told to the sender
    is_granted: bool = False  # or needs no grant
    has_started: bool = False  # the scheduler has it
    pages_ahead: int = 0  # pages it takes, or will take, before it is granted any
    first_tokens: tuple[tuple[int, int], ...] = ()  # (index, token) of continuations that go on
    dropped: set[int] = field(default_factory=set)  # continuations cancelled one by one
    sendable_s: float = 0.0  # when the last page was final, or its room known
    ended: bool = False  # its end was reported, or nobody wants it
    draining_s: float = 0.0  # given up, and waiting for its copies to stop

    @property
    def is_stuck(self) -> bool:
        """Whether its copies do not stop: their peer may be frozen, and its pages come back with one process's end."""
        return self.draining_s >= STUCK_S

    def wait_for_copies(self, seconds: float) -> None:
        """Note that time has passed."""
        if self.sender.state is sender.State.DRAINING:
            self.draining_s += seconds

    def drop(self, cancelled: tuple[int, ...]) -> bool:
        """Note that these continuations (none named: all) are not wanted; return whether none is any more."""
        self.dropped.update(cancelled or self.sequence.indices)
        return self.dropped.issuperset(self.sequence.indices)


def key_of(sequence: Sequence) -> HandoffKey:
    return HandoffKey(sequence.job.request_id, sequence.job.attempt)
