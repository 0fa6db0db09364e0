"""The simulated world does what the real one was seen to do."""

import pytest

from faultsim.engine import FakeRunner
from faultsim.memory import Memory
from faultsim.mover import Host, Mover
from faultsim.network import KEEPALIVE_S, End, Network
from faultsim.simulation import simulate
from faultsim.witness import WorkerWitness
from faultsim.world import Process, ViolationError, World
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.engine.prompt_room import PromptRoom
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import Chunk, StepPlan
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage, StartCopy
from pdserve.kvtransfer.session import Grant, Withdrawn
from pdserve.protocol.page_tables import Pages, PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import EVERYONE, PrefixHasher
from pdserve.protocol.sampling import SampledToken, SamplingParams
from pdserve.worker.messages import Placed, RouterRef, Tokens

KEY = AttemptKey(RequestId(b"request-00000001"), Attempt(0))
NUM_PAGES = 4


class Listener(Process):
    """Hears everything said to it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, Incarnation(1))
        self.heard: list[object] = []

    def listen(self, end: End) -> None:
        end.receive = self.heard.append
        end.lost = self.heard.append

    def accept(self, end: End) -> None:
        self.listen(end)


class Line:
    """Two processes with a stream between them."""

    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world, 0.001)
        self.near, self.far = Listener(self.world, "near"), Listener(self.world, "far")
        ends: list[End] = []
        self.network.processes["far"] = self.far
        self.network.dial(self.near, "far", ends.append, self.near.heard.append)
        self.world.run(1.0)
        (self.end,) = ends
        self.near.listen(self.end)


def test_a_stream_delivers_in_order() -> None:
    line = Line()
    for number in range(100):
        line.end.send(number)
    line.world.run(2.0)
    assert line.far.heard == list(range(100))


def test_a_healed_path_delivers_what_it_held() -> None:
    line = Line()
    line.network.cut(line.near, line.far)
    line.end.send("held")
    line.world.run(5.0)
    assert line.far.heard == []
    line.end.peer.send("the other way")
    line.network.heal(line.near, line.far)
    line.end.send("later")
    line.world.run(6.0)
    assert line.far.heard == ["held", "later"]
    assert line.near.heard == ["the other way"]


def test_keepalive_tells_both_ends_of_a_path_that_stays_cut() -> None:
    line = Line()
    line.network.cut(line.near, line.far)
    line.end.send("lost")
    line.world.run(2 * KEEPALIVE_S)
    assert line.far.heard == line.near.heard == ["keepalive time-out"]


def test_a_crash_ends_a_stream_after_what_was_said() -> None:
    line = Line()
    line.end.send("last words")
    line.near.crash()
    line.world.run(2.0)
    assert line.far.heard == ["last words", "its process ended"]


def test_a_thawed_process_hears_what_was_said_meanwhile() -> None:
    line = Line()
    line.far.freeze()
    line.end.send("while frozen")
    line.world.run(2.0)
    assert line.far.heard == []
    line.far.thaw()
    assert line.far.heard == ["while frozen"]


def test_what_a_cut_held_comes_before_what_a_freeze_deferred() -> None:
    line = Line()
    line.network.cut(line.near, line.far)
    line.end.send("held")
    line.world.run(2.0)
    line.far.freeze()
    line.end.send("deferred")
    line.world.run(3.0)
    line.network.heal(line.near, line.far)
    line.world.run(4.0)
    line.far.thaw()
    assert line.far.heard == ["held", "deferred"]


class Transfer:
    """A writer half way through a copy into another process's granted pages."""

    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world, 0.001)
        self.writer, self.target = Host(self.world, "p0", Incarnation(1)), Host(self.world, "d0", Incarnation(2))
        self.caches = {host: self._equip(host) for host in (self.writer, self.target)}
        self.reports: list[ReceiverMessage] = []
        self.mover = Mover(self.writer, self.writer.memory, self.network, lambda _: self.target, self.reports.append)
        self.peer = Peer(WorkerId("d0"), Incarnation(2))
        src = self.caches[self.writer].take(NUM_PAGES) or ()
        self.pages = self.caches[self.target].grant(NUM_PAGES) or ()
        for page in src:
            self.runners[self.writer].page(page)[:] = bytes([page + 1]) * self.writer.memory.page_bytes
        generations = self.caches[self.target].pool.generations(self.pages)
        self.mover.copy(StartCopy(self.peer, KEY, src, self.pages), Grant(0, self.pages, generations, b"", 4.0))
        self.world.run(0.0004)
        assert 0 < self.num_written < NUM_PAGES

    def _equip(self, host: Host) -> KvCache:
        cache, runner = KvCache(NUM_PAGES, Paging.of(4), None), FakeRunner(NUM_PAGES, 4, 100)
        host.memory = Memory(host.name, runner, cache)
        self.runners = {**getattr(self, "runners", {}), host: runner}
        return cache

    @property
    def num_written(self) -> int:
        return sum(any(self.target.memory.content(PageId(page))) for page in self.pages)


def test_a_frozen_writer_goes_on_writing_when_it_thaws() -> None:
    transfer = Transfer()
    before = transfer.num_written
    transfer.writer.freeze()
    transfer.world.run(60.0)
    assert transfer.num_written == before
    assert transfer.reports == []
    transfer.writer.thaw()
    transfer.world.run(61.0)
    assert transfer.num_written == NUM_PAGES
    (report,) = transfer.reports
    assert isinstance(report.event, CopyStopped)
    assert report.event.digests is not None


def test_a_killed_writer_leaves_a_part_written() -> None:
    transfer = Transfer()
    before = transfer.num_written
    transfer.writer.crash()
    transfer.world.run(60.0)
    assert transfer.num_written == before
    assert transfer.reports == []


def test_a_copy_into_a_forgotten_process_is_reported_stopped() -> None:
    transfer = Transfer()
    transfer.target.crash()
    transfer.mover.forget(transfer.peer)
    (report,) = transfer.reports
    assert report.event == CopyStopped(None, "its process ended")
    assert transfer.mover.idle


def test_a_write_into_a_page_that_was_given_out_again_is_seen() -> None:
    transfer = Transfer()
    cache = transfer.caches[transfer.target]
    cache.pool.ungrant(transfer.pages)
    cache.take(NUM_PAGES)
    with pytest.raises(ViolationError, match="I5") as caught:
        transfer.world.run(1.0)
    assert caught.value.request_id == KEY.request_id


def test_a_step_that_writes_an_announced_page_is_noticed() -> None:
    runner, cache = FakeRunner(NUM_PAGES, 4, 97), KvCache(NUM_PAGES, Paging.of(4), None)
    memory = Memory("p0", runner, cache)
    pages = cache.take(2) or ()
    plan = StepPlan((Chunk((1, 2), 4, list(pages), (), None),), ())
    memory.check_step(plan, pages[:1])
    with pytest.raises(ViolationError, match="I3"):
        memory.check_step(plan, pages)


def test_a_cached_page_that_does_not_hold_its_prefix_is_noticed() -> None:
    hasher = PrefixHasher(b"secret", "model", block_tokens=4)
    runner, cache = FakeRunner(NUM_PAGES, 4, 97), KvCache(NUM_PAGES, Paging.of(4), hasher)
    memory = Memory("p0", runner, cache)
    tokens, pages = (5, 6, 7, 8, 9, 10, 11, 12), cache.take(2) or ()
    runner.run(StepPlan((Chunk(tokens, 0, list(pages), (), None),), ()))
    cache.publish(Prefix(tokens, EVERYONE), PageTables((list(pages),)), range(2))
    memory.check_cache()
    runner.page(pages[1])[0] ^= 1
    with pytest.raises(ViolationError, match="I3"):
        memory.check_cache()


def handed_over() -> tuple[WorkerWitness, Sequence]:
    job = Job(KEY.request_id, KEY.attempt, (1, 2, 3), 3, SamplingParams(max_tokens=8), (0,))
    witness = WorkerWitness("d0", World(1))
    witness.handed_over(AttemptKey(KEY.request_id, Attempt(1)), [0])
    return witness, Sequence(job, (0,), [1, 2, 3], order=0)


def test_a_continuation_that_is_computed_after_its_commit_left_is_noticed() -> None:
    witness, sequence = handed_over()
    with pytest.raises(ViolationError, match="commit of attempt 1 has left"):
        witness.computes([sequence])


def test_a_continuation_goes_on_when_its_commit_is_withdrawn() -> None:
    witness, sequence = handed_over()
    peer = Peer(WorkerId("d1"), Incarnation(2))
    witness.sees(ReceiverMessage(peer, AttemptKey(KEY.request_id, Attempt(1)), Withdrawn("given up")))
    witness.computes([sequence])


def test_a_token_that_does_not_follow_the_last_is_noticed() -> None:
    witness, sequence = handed_over()
    witness.sees(Placed(RouterRef(1), sequence.job, 1e9))
    witness.reports(Tokens(RouterRef(1), KEY, 0, 0, (SampledToken(7),), None))
    with pytest.raises(ViolationError, match="due was 1"):
        witness.reports(Tokens(RouterRef(1), KEY, 0, 2, (SampledToken(7),), None))


def test_prompts_leave_windows_while_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, original = [0], KvCache.take

    def take(cache: KvCache, count: int) -> Pages | None:
        pages = original(cache, count)
        replaced[0] += len(pages or ())
        return pages

    def refill(room: PromptRoom, sequence: Sequence) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(KvCache, "take", take)
            fill(room, sequence)

    fill = PromptRoom._refill
    monkeypatch.setattr(PromptRoom, "_refill", refill)
    assert simulate(0, num_requests=40).violation == ""
    assert replaced[0] > 50
