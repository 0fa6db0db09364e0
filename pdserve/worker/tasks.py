"""What a worker has in hand."""

from dataclasses import dataclass, field

from pdserve.engine.kvcache import Prefix
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.kvtransfer.doors import Admitted
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.load import LoadPart
from pdserve.perfmodel.curve import attention_work
from pdserve.worker.messages import RouterRef


@dataclass(slots=True, eq=False)
class Task:
    """One placement.

    With a target, its prompt is computed here and goes there with its first tokens. With a source, its prompt arrives
    from there and is decoded here. With neither, all of it is computed here.
    """

    router: RouterRef
    job: Job
    deadline_s: float
    order: int  # of arrival at this worker
    source: Peer | None
    target: Peer | None
    sequences: list[Sequence] = field(default_factory=list)  # that the engine computes, or is to compute
    dropped: set[int] = field(default_factory=set)  # continuations cancelled one by one, of later attempts too
    first_tokens: tuple[tuple[int, int], ...] = ()  # (index, token) of continuations that go on at the target
    key: HandoffKey = field(init=False)
    prefix: Prefix | None = None  # of the prompt, if it is to arrive

    def __post_init__(self) -> None:
        self.key = HandoffKey(self.job.request_id, self.job.attempt)

    @property
    def is_unstarted(self) -> bool:
        """Whether it waits here for its first pages."""
        return bool(self.sequences) and not any(sequence.pages or sequence.has_run for sequence in self.sequences)

    @property
    def load_part(self) -> LoadPart:
        """What it asks of the worker."""
        num_running, num_coming, tokens, work = 0, 0, 0, 0
        for sequence in self.sequences:
            missing = sequence.num_missing
            if missing > 1:
                tokens, work = tokens + missing, work + attention_work(missing, sequence.computed)
                num_coming += len(sequence.indices)
            else:
                num_running += len(sequence.indices)
        if self.target is not None:
            return LoadPart(0, 0, 0, tokens, work)  # it is decoded elsewhere
        if not self.sequences:
            num_coming = sum(index not in self.dropped for index in self.job.indices)
        return LoadPart(num_running, num_coming, (num_running + num_coming) * len(self.job.token_ids), tokens, work)


def arrived(scheduler: Scheduler, task: Task, admitted: Admitted) -> list[Sequence]:
    """Return the sequences that a hand-off has become. They share the prompt's pages."""
    capsule, job = admitted.capsule, task.job
    prompt = Sequence(
        job=job,
        indices=capsule.indices,
        tokens=list(job.token_ids),
        order=task.order,
        computed=capsule.num_tokens,
        pages=list(admitted.pages),
        num_published=admitted.num_reused,
    )
    if task.prefix is not None:
        prompt.prefix.hashes += task.prefix.hashes
    scheduler.publish(prompt)
    return scheduler.split(prompt, zip(capsule.indices, capsule.first_tokens, strict=True))
