"""Sequences under a scheduler, whose steps are planned, computed, and committed in their order."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Finish, Job, Outcome, Sampled, Sequence
from pdserve.engine.step import Matcher, StepPlan, StepResult
from pdserve.protocol.sampling import SamplingParams

Name = tuple[int, int]  # of a request, and of a continuation of it


def sequence_of(
    number: int,
    prompt: Seq[int],
    params: SamplingParams,
    indices: tuple[int, ...] | None = None,
    priority: int = 0,
    matcher: Matcher | None = None,
) -> Sequence:
    """Return a request's sequence. indices: by default, all continuations that its parameters ask for."""
    indices = tuple(range(params.n)) if indices is None else indices
    new_matcher = None if matcher is None else lambda: matcher
    key = RequestId(number.to_bytes(16)), Attempt(0)
    job = Job(*key, tuple(prompt), len(prompt), params, indices, priority=priority, new_matcher=new_matcher)
    return Sequence(job, indices, list(prompt), number)


class Scheduled:
    """A scheduler, up to `depth` of whose steps are planned before the oldest one ends."""

    def __init__(
        self, cache: KvCache, limits: Limits, compute: Callable[[StepPlan], StepResult], depth: int = 1
    ) -> None:
        self.scheduler = Scheduler(cache, limits)
        self.compute = compute
        self.depth = depth
        self.running = deque[tuple[StepPlan, Callable[[], StepResult]]]()
        self.num_ahead = 0  # steps that were begun while another one was under way, each counted for all of these
        self.answers: dict[Name, list[int]] = {}
        self.ends: dict[Name, Finish] = {}
        self.broken: dict[int, Broken] = {}

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; return what waits for its end."""
        result = self.compute(plan)
        return lambda: result

    def turn(self) -> bool:
        """Plan a step if one may be, else let the oldest one end; False if there is nothing to do."""
        plan = self.scheduler.plan() if len(self.running) < self.depth else None
        if plan is not None:
            self.num_ahead += len(self.running)
            self.running.append((plan, self.begin(plan)))
        elif self.running:
            self.end_oldest()
        else:
            return False
        return True

    def end_oldest(self) -> None:
        plan, end = self.running.popleft()
        for outcome in self.scheduler.commit(plan, end()):
            self.note(outcome)

    def note(self, outcome: Outcome) -> None:
        number = outcome.sequence.order
        if isinstance(outcome, Sampled):
            answer = self.answers.setdefault((number, outcome.index), [])
            assert len(answer) == outcome.position
            answer += [token.token_id for token in outcome.tokens]
            if outcome.finish is not None:
                self.ends[number, outcome.index] = outcome.finish
        elif isinstance(outcome, Broken):
            self.broken[number] = outcome
            self.scheduler.remove(outcome.sequence)

    def run(self) -> None:
        """Compute until nothing is left that can be."""
        while self.turn():
            pass
        self.scheduler.cache.check()
