"""What a decode worker has in hand."""

from dataclasses import dataclass, field

from pdserve.engine.kvcache import Prefix
from pdserve.engine.sequence import Job, Sequence
from pdserve.errors import ProtocolError
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import Capsule, HandoffKey, Pages, Peer
from pdserve.load import LoadPart
from pdserve.worker.audit import Claim
from pdserve.worker.load import waiting
from pdserve.worker.messages import RouterRef


@dataclass(slots=True, eq=False)
class Task:
    """One placement: first a hand-off that waits for pages or content, then running sequences."""

    router: RouterRef
    job: Job
    deadline_s: float
    order: int
    peer: Peer | None
    sequences: list[Sequence] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # continuations cancelled one by one, of later attempts too
    key: HandoffKey = field(init=False)
    prefix: Prefix = field(init=False)

    def __post_init__(self) -> None:
        self.key = HandoffKey(self.job.request_id, self.job.attempt)
        self.prefix = Prefix(self.job.token_ids, self.job.cache_salt)

    @property
    def part(self) -> LoadPart:
        """What it asks of the worker."""
        num_running, num_coming, tokens, work = 0, 0, 0, 0
        for sequence in self.sequences:
            if sequence.num_missing > 1:
                missing, missing_work = waiting(sequence)
                tokens, work = tokens + missing, work + missing_work
                num_coming += len(sequence.indices)
            else:
                num_running += len(sequence.indices)
        if not self.sequences:
            num_coming = sum(index not in self.dropped for index in self.job.indices)
        return LoadPart(num_running, num_coming, (num_running + num_coming) * len(self.job.token_ids), tokens, work)


@dataclass(slots=True, eq=False)
class Inbound:
    """One hand-off under way, from its grant until its pages are a sequence's or free."""

    key: HandoffKey
    peer: Peer
    receiver: receiver.Receiver
    reused: Pages  # leading pages held since the grant
    num_sequences: int
    quarantined: bool = False

    @property
    def claim(self) -> Claim:
        pages = self.receiver.grant.pages
        if self.quarantined:
            return Claim(held=self.reused, quarantined=pages)
        return Claim(held=self.reused, granted=pages)


def check_capsule(job: Job, capsule: Capsule, vocab_size: int) -> None:
    """Raise ProtocolError unless a capsule is about this job."""
    if capsule.num_tokens != len(job.token_ids):
        raise ProtocolError(f"capsule: {capsule.num_tokens} tokens for {len(job.token_ids)}")
    if not set(capsule.indices) <= set(job.indices) or max(capsule.first_tokens, default=0) >= vocab_size:
        raise ProtocolError("capsule: not the continuations, or tokens, of this request")
