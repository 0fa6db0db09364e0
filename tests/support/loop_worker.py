"""A worker's own loop, around an executor of the test's, that computes prompts and reports to the test."""

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from default_rules import default_rules

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import PeerFault
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.executor import StartStep
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.inbox import Inbox
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.messages import Failed, Load, Placed, RouterRef, Tokens

ROUTER = RouterRef(1)


class Carried:
    """What a worker reports, and how often it said that it lives."""

    due_s = inf  # nothing is held back

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.failed: asyncio.Queue[Failed] = asyncio.Queue()
        self.num_finished = 0
        self.loads: list[Load] = []
        self.news = asyncio.Event()

    def expect(self, placed: Placed) -> None:
        """Nothing is traced."""

    def perform(self, commands: Sequence[object], step: tuple[StepPlan, StepResult] | None) -> None:
        for command in commands:
            if isinstance(command, Failed):
                self.failed.put_nowait(command)
            elif isinstance(command, Tokens):
                number = int.from_bytes(command.key.request_id)
                self.tokens.setdefault(number, []).extend(token.token_id for token in command.tokens)
                self.num_finished += command.finish is not None
        self.news.set()

    def beat(self, load: Load, num_steps: int) -> None:
        self.loads.append(load)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        pass

    def refuse(self, refusal: PeerFault) -> None:
        raise AssertionError(refusal)

    async def finished(self, count: int) -> None:
        """Wait until so many continuations have ended."""
        while self.num_finished < count:
            self.news.clear()
            await self.news.wait()


def placed(number: int, prompt: list[int], n: int = 1, **params: object) -> Placed:
    given = {"max_tokens": 6, "seed": number, "n": n, **params}
    request_id = RequestId(number.to_bytes(16))
    sampling = SamplingParams(**given)  # type: ignore[arg-type]
    return Placed(ROUTER, Job(request_id, Attempt(0), tuple(prompt), len(prompt), sampling, tuple(range(n))), 1e9, None)


class LoopWorker:
    """The loop of a decode worker that computes prompts itself."""

    def __init__(self, scheduler: Scheduler, start_step: StartStep, vocab_size: int) -> None:
        self.scheduler = scheduler
        self.core = WorkerCore(scheduler, vocab_size, 64, b"secret", default_rules())
        self.inbox, self.carried = Inbox(), Carried()
        self.loop = WorkerLoop(self.core, start_step, self.inbox, self.carried, MonotonicClock(), 60.0)
