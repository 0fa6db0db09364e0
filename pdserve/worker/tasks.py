"""The tasks of a worker. Pure.

Invariant: a task ends once: with its last sequence, or when it is given up. Nothing of it is computed from then on.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pdserve.base.ids import Attempt, AttemptKey, Peer, RequestId
from pdserve.engine.kvcache import Prefix
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job, Sequence, split
from pdserve.engine.step import Phase
from pdserve.kvtransfer.doors import Admitted
from pdserve.kvtransfer.session import Capsule, Tail
from pdserve.perfmodel.curve import attention_work
from pdserve.prefill_worker.starting import Starting
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.reports import LoadPart
from pdserve.worker.messages import Cancelled, RouterRef, Tokens


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
    tails: tuple[Tail, ...] = ()  # first tokens of continuations that go on at the target
    key: AttemptKey = field(init=False)
    prefix: Prefix | None = None  # of the prompt, if it is to arrive

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.job.request_id, self.job.attempt)

    @property
    def is_unstarted(self) -> bool:
        """Whether it waits here for its first pages."""
        return bool(self.sequences) and not any(sequence.pages or sequence.has_run for sequence in self.sequences)

    def decoding(self, index: int) -> Sequence | None:
        """Return the sequence that decodes this continuation alone, or None."""
        found = [s for s in self.sequences if s.indices == (index,) and s.phase is Phase.DECODE]
        return found[0] if found else None

    @property
    def load_part(self) -> LoadPart:
        num_running, num_coming, tokens, work = 0, 0, 0, 0
        for sequence in self.sequences:
            if sequence.phase is Phase.PROMPT:
                missing = sequence.num_missing
                tokens, work = tokens + missing, work + attention_work(missing, sequence.computed)
                num_coming += len(sequence.indices)
            else:
                num_running += len(sequence.indices)
        if self.target is not None:
            return LoadPart(0, 0, 0, tokens, work)  # it is decoded elsewhere
        if not self.sequences:
            num_coming = sum(index not in self.dropped for index in self.job.indices)
        return LoadPart(num_running, num_coming, (num_running + num_coming) * len(self.job.token_ids), tokens, work)


def final_pages(scheduler: Scheduler, task: Task, sequence: Sequence) -> Pages:
    """Return the pages of a prompt that no step writes to any more, in the order of its hand-off."""
    paging, computed = scheduler.cache.paging, sequence.computed
    num_final = computed if sequence.num_missing == 0 else computed // paging.span * paging.span
    return sequence.pages.ordered(PageOrder(paging, len(task.job.token_ids)), num_final)


def arrived(scheduler: Scheduler, task: Task, admitted: Admitted) -> list[Sequence]:
    """Return the sequences that go on with the pages of a hand-off. They share these pages."""
    capsule, job = admitted.capsule, task.job
    prompt = Sequence(
        job=job,
        indices=tuple(tail.index for tail in capsule.tails),
        tokens=list(job.token_ids),
        order=task.order,
        computed=capsule.num_tokens,
        pages=admitted.pages,
        num_published=admitted.num_reused,
    )
    for token in capsule.tails[0].tokens[:-1]:
        prompt.append(token)
    if task.prefix is not None:
        prompt.prefix.hashes += task.prefix.hashes
    cache = scheduler.cache
    # What came for pages that have left their windows is not what they held: it must not be found as theirs.
    cache.pool.release(prompt.pages.take_unneeded(cache.paging, capsule.num_tokens))
    scheduler.publish(prompt)
    return split(cache.pool, prompt, [(tail.index, tail.tokens[-1:]) for tail in capsule.tails])


def tail_tokens(task: Task, capsule: Capsule) -> list[Tokens]:
    """Return the tokens that came with a hand-off, as reports."""
    start = len(task.job.token_ids) - task.job.num_prompt_tokens
    return [Tokens(task.router, task.key, tail.index, start, tail.tokens, None) for tail in capsule.tails]


class Tasks:
    def __init__(self, scheduler: Scheduler, starting: Starting) -> None:
        self._scheduler = scheduler
        self._starting = starting
        self._tasks: dict[tuple[RequestId, Attempt], Task] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def get(self, key: tuple[RequestId, Attempt]) -> Task | None:
        return self._tasks.get(key)

    def runs(self, task: Task, sequence: Sequence) -> bool:
        """Whether a task has not ended, and this is still one of its sequences."""
        return self._tasks.get(task.key) is task and sequence in task.sequences

    def add(self, task: Task) -> None:
        self._tasks[task.key] = task

    def end(self, task: Task) -> None:
        """Drop a task and its sequences. Its hand-off goes on until the pages are safe."""
        del self._tasks[task.key]
        self._starting.remove(task.key)
        for sequence in task.sequences:
            self._scheduler.remove(sequence)

    def cancel(self, cancelled: Cancelled) -> list[Task]:
        """Stop continuations that are no longer wanted; return the tasks of which none is wanted."""
        unwanted: list[Task] = []
        for task in list(self._tasks.values()):
            request_id, attempt = task.key
            if request_id != cancelled.request_id or attempt > cancelled.attempt:
                continue
            task.dropped.update(cancelled.indices or task.job.indices)
            if task.dropped.issuperset(task.job.indices):
                unwanted.append(task)
            else:
                self.drop_sequences(task)
        return unwanted

    def drop_sequences(self, task: Task) -> None:
        """Stop continuations that are no longer wanted, once each runs by itself."""
        for sequence in [s for s in task.sequences if task.dropped.issuperset(s.indices)]:
            self._scheduler.remove(sequence)
            self.replace(task, sequence, ())

    def replace(self, task: Task, sequence: Sequence, children: Seq[Sequence]) -> None:
        """Replace one of a task's sequences; end the task after its last."""
        task.sequences.remove(sequence)
        task.sequences += children
        if not task.sequences:
            self.end(task)
