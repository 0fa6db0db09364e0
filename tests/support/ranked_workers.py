"""Two workers of two ranks each, whose hand-offs are copied in two parts: each rank's in its own time."""

import random
from collections.abc import Callable

from joined_cores import PAGE_SIZE
from two_ranks import NUM_RANKS, TwoRanks
from two_workers import Workers

from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Pages, of_parts


class RankedEngine:
    """An executor of two ranks, one step after the other, with the bytes of each rank's part of a page."""

    def __init__(self, new_runner: Callable[[], Runner]) -> None:
        self.executor = TwoRanks(new_runner, PAGE_SIZE)

    def run(self, plan: StepPlan) -> StepResult:
        return self.executor.start(plan).result(60)

    def read(self, page: PageId, part: int = 0) -> bytes:
        return bytes(self.executor.regions[part].view[page])

    def write(self, page: PageId, content: bytes, part: int = 0) -> None:
        self.executor.regions[part].view[page] = memoryview(content)

    def digests(self, pages: Pages) -> tuple[int, ...]:
        return of_parts([region.digests(pages) for region in self.executor.regions])


class RankedWorkers(Workers):
    def __init__(self, new_runner: Callable[[int], Runner], rng: random.Random | None = None) -> None:
        super().__init__(rng, new_runner=lambda size: RankedEngine(lambda: new_runner(size)), num_parts=NUM_RANKS)
        self.broken: list[tuple[int, bool]] = []  # parts whose next copy fails, and whether in doubt

    def close(self) -> None:
        for name in self.nodes:
            self.engine(name).executor.close()

    def engine(self, worker: str) -> RankedEngine:
        engine = self.nodes[worker].runner
        assert isinstance(engine, RankedEngine)
        return engine

    def perform(self, worker: str, commands: list[object]) -> None:
        for command in commands:
            match command:
                case doors.StartCopy(peer):
                    for part in range(NUM_RANKS):
                        self.stream(f"part {part}", worker, peer.worker_id).append((part, command))
                case _:
                    super().perform(worker, [command])

    def deliver(self, what: str, source: str, target: str) -> bool:
        stream = self.stream(what, source, target)
        if not what.startswith("part") or not stream:
            return super().deliver(what, source, target)
        part, copy = stream.popleft()  # type: ignore[misc]
        broken = next((each for each in self.broken if each[0] == part), None)
        if broken is not None:
            self.broken.remove(broken)
            self._stopped(source, copy, doors.CopyStopped(None, "broken by the test", broken[1], part))
            return True
        for src, dst in zip(copy.src, copy.dst, strict=True):
            self.engine(target).write(dst, self.engine(source).read(src, part), part)
        digests = self.engine(source).executor.regions[part].digests(copy.src)
        self._stopped(source, copy, doors.CopyStopped(digests, part=part))
        return True

    def _stopped(self, worker: str, copy: doors.StartCopy, stopped: doors.CopyStopped) -> None:
        self.handle(worker, doors.ReceiverMessage(copy.peer, copy.key, stopped))

    def _check(self, worker: str, check: doors.CheckDigests) -> None:
        found = zip(self.engine(worker).digests(check.pages), check.digests, strict=True)
        wrong = [place for place, (here, there) in enumerate(found) if here != there]
        self.handle(worker, doors.DigestsChecked(check.key, wrong[0] if wrong else None))
