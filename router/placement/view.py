"""What the router knows of one worker: what it last reported, plus what was sent to it since."""

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.perfmodel.curve import Step
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.router.requests.events import Registration

_FAILING_STEPS = 2  # one may be the fault of the only request in it


@dataclass(slots=True, eq=False)
class Share:
    """What one placement asks of a worker."""

    num_sequences: int
    prefill_tokens: int  # 0 once they are computed
    prefill_work: int = 0  # of attention, the same
    kv_tokens: int = 0  # of one sequence when it starts to decode here
    arriving: bool = False  # its prompt is not computed yet
    priority: int = 0
    is_overtaken: bool = False  # while its prompt waited, by one that came later


@value
class RunningStep:
    """What a worker's running step probably computes of prompts: what waited when it began."""

    prefill_tokens: int
    prefill_work: int
    since_s: float


class WorkerView:
    def __init__(self, registration: Registration, now_s: float) -> None:
        self.link = registration.link
        self.registration = registration
        self.name: str = registration.worker_id  # who registers again under another name is dropped
        self.load: ReportedLoad | None = None  # as last reported
        self.asked = registration.role, registration.role_epoch  # the role last asked for, of this epoch
        self.draining = False
        self.is_drain_asked = False  # by this router, and the worker has yet to report it
        self.is_failing = False  # its last steps brought nothing: it looks idle, and fails what it is given
        self.last_heard_s = now_s
        self.num_placed = 0  # since it attached
        self.step_s = 0.0  # that its last step took
        self.shares: dict[AttemptKey, Share] = {}
        self._sequences = self._tokens = self._work = 0  # sums over the shares
        self._computed_tokens = self._computed_work = 0  # of prompts that are computed in part
        self._stepped_tokens = self._stepped_work = 0  # of all routers' prompts, computed since the last report
        self.others = LoadPart()  # what other routers have sent, as last reported
        self._num_arriving = self._kv_tokens = 0  # of ours
        self._new_pages = 0  # taken by what was assigned since the last report, less what has ended since
        # Shares whose prompts are to be computed, in that order: first those that have begun, then by priority.
        # A prompt that has begun is overtaken by none.
        self._prompts: list[Share] = []
        self._num_begun = 0
        self.running = RunningStep(0, 0, now_s)
        self.kind = 0  # equal for workers that can hand KV over to each other

    def __repr__(self) -> str:
        return f"WorkerView({self.name})"

    @property
    def role(self) -> Role:
        """What it does, as last reported."""
        return self.registration.role

    def has(self, adapter: AdapterDigest) -> bool:
        """Whether it can compute with an adapter, or without any."""
        return adapter == NO_ADAPTER or any(each.digest == adapter for each in self.registration.adapters)

    @property
    def coming_role(self) -> Role:
        """What it will do once it has taken the role that it was asked to take, if it has yet to."""
        role, epoch = self.asked
        return role if epoch > self.registration.role_epoch else self.role

    @property
    def max_num_tokens(self) -> int:
        known = self.registration
        return known.layout.paging.most_tokens(known.num_pages, known.step_tokens, known.max_model_len)

    def report(self, load: ReportedLoad) -> LoadPart:
        """Take a load report; return what other routers have sent between the last one and this."""
        before, now = self.others, load.others
        sent = LoadPart(
            num_taken=now.num_taken - before.num_taken,
            taken_tokens=now.taken_tokens - before.taken_tokens,
            taken_work=now.taken_work - before.taken_work,
        )
        if self.load is None or min(sent.num_taken, sent.taken_tokens, sent.taken_work) < 0:
            sent = LoadPart()  # they began before this router heard of it
        else:  # what was computed of theirs was counted as ours; what was cached or given up was not computed
            theirs = min(self._stepped_tokens, before.waiting_tokens + sent.taken_tokens - now.waiting_tokens)
            work = min(self._stepped_work, before.waiting_work + sent.taken_work - now.waiting_work)
            self._computed_tokens = max(0, self._computed_tokens - max(0, theirs))
            self._computed_work = max(0, self._computed_work - max(0, work))
        self._stepped_tokens = self._stepped_work = 0
        self.load, self.others, self._new_pages = load, now, 0
        self.is_drain_asked &= not load.draining
        self.draining = self.is_drain_asked or load.draining
        self.is_failing = load.failed_steps >= _FAILING_STEPS
        return sent

    def assign(self, key: AttemptKey, share: Share, now_s: float) -> None:
        if key in self.shares:
            raise InvariantError(f"{self.name} was given one placement twice")
        was_idle = not self.pending_prefill_tokens
        self.shares[key] = share
        self.num_placed += 1
        self._sequences += share.num_sequences
        self._tokens += share.prefill_tokens
        self._work += share.prefill_work
        self._new_pages += self._num_pages(share)
        if share.prefill_tokens:
            place = bisect_right(self._prompts, -share.priority, self._num_begun, key=lambda each: -each.priority)
            for overtaken in self._prompts[place:]:
                overtaken.is_overtaken = True
            self._prompts.insert(place, share)
            if was_idle:
                self._begin(share.prefill_tokens, share.prefill_work, now_s)
        self._decode(share, share.num_sequences)

    def unassign(self, key: AttemptKey) -> None:
        share = self.shares.pop(key, None)
        if share is None:
            raise InvariantError(f"{self.name} does not have this placement")
        self._sequences -= share.num_sequences
        self._tokens -= share.prefill_tokens
        self._work -= share.prefill_work
        self._new_pages -= self._num_pages(share)
        if share is self._first_begun:
            self._computed_tokens = self._computed_work = 0  # of this one
        self._forget_prompt(share)
        self._decode(share, -share.num_sequences)

    def add_prefill(self, key: AttemptKey, num_tokens: int, work: int) -> None:
        """Note that more of a placement's prompt is to be computed here than was expected, if any of it still is."""
        share = self.shares[key]
        if not share.prefill_tokens:
            return
        share.prefill_tokens += num_tokens
        share.prefill_work += work
        self._tokens += num_tokens
        self._work += work

    def prefilled(self, key: AttemptKey) -> None:
        """Note that a placement's prompt needs no more computing, here or elsewhere."""
        share = self.shares[key]
        if share.arriving:
            self._num_arriving -= share.num_sequences
            share.arriving = False
        self._tokens -= share.prefill_tokens
        self._work -= share.prefill_work
        self._computed_tokens -= share.prefill_tokens
        self._computed_work -= share.prefill_work
        self._forget_prompt(share)
        share.prefill_tokens = share.prefill_work = 0

    def _forget_prompt(self, share: Share) -> None:
        if share.prefill_tokens:
            place = self._prompts.index(share)
            del self._prompts[place]
            self._num_begun -= place < self._num_begun

    @property
    def _first_begun(self) -> Share | None:
        """The prompt that is computed in part, if one is."""
        return self._prompts[0] if self._num_begun else None

    def stepped(self, step: Step, now_s: float) -> None:
        """Note that a step has ended, and that the next begins. The prompts that it completed are noted before.

        The rest of what it computed belongs to the first prompt that waits: only one at a time is computed in part. It
        may be another router's, hence the bounds.
        """
        self._stepped_tokens += step.prefill_tokens
        self._stepped_work += step.prefill_work
        computed = self._computed_tokens + step.prefill_tokens
        if not self._num_begun:
            self._begin_prompts(computed)
        head = self._first_begun
        if head is None:
            self._computed_tokens = self._computed_work = 0
        else:
            self._computed_tokens = _within(computed, head.prefill_tokens - 1)
            self._computed_work = _within(self._computed_work + step.prefill_work, head.prefill_work)
        waiting = self.pending_prefill_tokens
        if not waiting:
            self.running = RunningStep(0, 0, now_s)
            return
        self._begin(waiting, self.pending_prefill_work, now_s)

    def _begin(self, num_tokens: int, work: int, now_s: float) -> None:
        """Note that a step begins which computes as much of this as a step may."""
        if num_tokens > self.step_tokens:
            num_tokens, work = self.step_tokens, work * self.step_tokens // num_tokens
        self.running = RunningStep(num_tokens, work, now_s)
        begun_tokens = sum([share.prefill_tokens for share in self._prompts[: self._num_begun]])
        self._begin_prompts(num_tokens - (begun_tokens - max(0, self._computed_tokens)))

    def _begin_prompts(self, num_tokens: int) -> None:
        """Note that a step begins with so many tokens of prompts that have not begun."""
        while num_tokens > 0 and self._num_begun < len(self._prompts):
            num_tokens -= self._prompts[self._num_begun].prefill_tokens
            self._num_begun += 1

    def waiting_before(self, priority: int) -> tuple[int, int]:
        """Return prompt tokens, and their attention's work, that are computed before one more prompt."""
        tokens, work = self.pending_prefill_tokens, self.pending_prefill_work
        if self._num_begun == len(self._prompts) or priority <= self._prompts[-1].priority:
            return tokens, work
        later = [share for share in self._prompts[self._num_begun :] if share.priority < priority]
        later_work = sum([share.prefill_work for share in later])
        return tokens - sum([share.prefill_tokens for share in later]), max(0, work - later_work)

    def sequence_ended(self, key: AttemptKey) -> None:
        share = self.shares[key]
        self._sequences -= 1
        self._decode(share, -1)
        share.num_sequences -= 1

    def _decode(self, share: Share, num_sequences: int) -> None:
        self._kv_tokens += num_sequences * share.kv_tokens
        if share.arriving:
            self._num_arriving += num_sequences

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens that wait in front of one more request: ours, and other routers' as last reported."""
        return self._tokens - max(0, self._computed_tokens) + self.others.waiting_tokens

    @property
    def pending_prefill_work(self) -> int:
        return max(0, self._work - max(0, self._computed_work)) + self.others.waiting_work

    @property
    def step_tokens(self) -> int:
        return self.registration.max_num_batched_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences it runs or will run: ours, and other routers' as last reported."""
        return self._sequences + self.others.num_running + self.others.num_coming

    @property
    def num_arriving(self) -> int:
        """Those of them whose prompts are not computed yet."""
        return self._num_arriving + self.others.num_coming

    @property
    def kv_tokens(self) -> int:
        """KV tokens of all of them, as each starts to decode."""
        return self._kv_tokens + self.others.placed_tokens

    @property
    def num_pages(self) -> int:
        """Pages that it can hold KV in: those in quarantine are no room."""
        return self.registration.num_pages - (self.load.pages_lost if self.load else 0)

    def _num_pages(self, share: Share) -> int:
        step_tokens = self.step_tokens if share.prefill_tokens else 1
        return self.registration.layout.paging.most_pages(share.kv_tokens, step_tokens)

    @property
    def num_free_pages(self) -> float:
        """Pages left for one more request at this moment, as last reported, less what was sent since."""
        load = self.load
        return inf if load is None else load.pages_free - load.pages_wanted - self._new_pages

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing of this router's is assigned to the worker."""
        sums = self._sequences, self._tokens, self._work, self._num_arriving, self._kv_tokens
        if self.shares or self._prompts or any(sums):
            raise InvariantError(f"{self.name} still holds {self.shares}, and {sums}")


def _within(value: int, high: int) -> int:
    return max(0, min(value, high))
