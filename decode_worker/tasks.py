"""What a decode worker has in hand."""

from dataclasses import dataclass, field

from pdserve.engine.prefix import PageName
from pdserve.engine.sequence import Job, Sequence
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer
from pdserve.worker.words import RouterRef


@dataclass(slots=True, eq=False)
class Task:
    """One placement: first a hand-off that waits for pages or content, then running sequences."""

    router: RouterRef
    job: Job
    deadline_s: float
    order: int
    peer: Peer | None
    names: list[PageName] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # continuations cancelled one by one

    @property
    def key(self) -> HandoffKey:
        return HandoffKey(self.job.request_id, self.job.attempt)


@dataclass(slots=True, eq=False)
class Inbound:
    """One hand-off under way, from its grant until its pages are a sequence's or free."""

    key: HandoffKey
    peer: Peer
    receiver: receiver.Receiver
    reused: Pages  # leading pages held since the grant
    num_sequences: int
    quarantined: bool = False
