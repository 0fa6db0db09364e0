"""Leading pages of a prompt that another worker holds: fetched where they come in time, computed where they do not."""

import random
from dataclasses import replace

import pytest
from wired_cores import PAGE_SIZE, ROUTER, WiredCores, core_worker, job, wanted

from pdserve.base.ids import AttemptKey
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Capsule, Commit, PagesLanded, Quiesced, Withdrawn
from pdserve.protocol.prefix_hash import EVERYONE
from pdserve.protocol.reports import Stage
from pdserve.worker import fetches
from pdserve.worker.messages import (
    Cancelled,
    Command,
    DrainAsked,
    Due,
    Event,
    Failed,
    Fetch,
    Placed,
    Progress,
    RouterLost,
    ShareAsked,
)

TURN = job(1, 22)  # what the holder has computed, page by page of 4
DUE_S = 5.0


def next_turn(num_tokens: int = 30) -> Job:
    """Return a request whose prompt begins with that of TURN."""
    return replace(job(2, num_tokens), token_ids=(*TURN.token_ids, *range(num_tokens - len(TURN.token_ids))))


def cluster(num_pages: int = 32) -> WiredCores:
    """Return a worker `p` that has nothing, a worker `d` with a cached prompt, and `t`, another one."""
    cores = WiredCores({name: core_worker(name, num_pages) for name in ("p", "d", "t")})
    cores.queue("d", Placed(ROUTER, TURN, 1e9))
    cores.run(random.Random(0))
    assert cores.output(TURN) == wanted(TURN)
    return cores


def share(cores: WiredCores, each: Job, num_tokens: int = 24, deadline_s: float = DUE_S) -> ShareAsked:
    tokens = each.token_ids[:num_tokens]
    return ShareAsked(AttemptKey(*each.key), tokens, EVERYONE, cores.nodes["p"].peer, "p", deadline_s)


def placed(cores: WiredCores, each: Job, target: str = "", num_tokens: int = 24) -> Placed:
    fetch = Fetch(cores.nodes["d"].peer, num_tokens, DUE_S)
    there = cores.nodes[target].peer if target else None
    return Placed(ROUTER, each, 1e9, target=there, target_address=target, fetch=fetch)


class Computing:
    """Worker `p` alone, whose prompt waits for what it fetches; nothing else of the cluster moves by itself."""

    def __init__(self, num_pages: int = 32) -> None:
        self.cores = cluster(num_pages)
        self.worker, self.holder = self.cores.nodes["p"], self.cores.nodes["d"].peer
        self.core, self.each = self.worker.core, next_turn()
        self.handle(doors.SenderAttached(self.holder))

    def handle(self, event: Event, now_s: float = 0.0) -> list[Command]:
        return self.core.handle(event, now_s)

    def place(self) -> list[Command]:
        return self.handle(placed(self.cores, self.each))

    def starts(self, now_s: float = 0.0) -> bool:
        """Compute what there is to compute; return whether the prompt was."""
        reported: list[Command] = []
        while (plan := self.core.plan(now_s)) is not None:
            reported += self.core.commit(plan, self.worker.runner.run(plan), now_s)
        assert not any(isinstance(each, Failed) for each in reported)
        return any(isinstance(each, Progress) and each.stage.name == "PREFILL_STARTED" for each in reported)

    def assert_nothing_held(self) -> None:
        pool = self.worker.scheduler.cache.pool
        self.worker.scheduler.cache.check()
        assert self.core.idle
        assert not [pages for claim in self.core.claims() for pages in (claim.held, claim.granted) if pages]
        assert pool.num_free == pool.num_pages


def fetched(commands: list[Command]) -> list[tuple[int, int]]:
    """Return how many tokens fetches have brought, and how many pages were here."""
    reports = [c for c in commands if isinstance(c, Progress) and c.stage is Stage.FETCHED]
    return [(each.cached_tokens, each.pages_reused) for each in reports]


@pytest.mark.parametrize("target", ["", "t", "d"])
@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_is_computed_from_where_the_fetched_pages_end_and_gives_the_same_tokens(
    seed: int, target: str
) -> None:
    """Also where it then goes to the holder itself: its two hand-offs have one name, and go two ways."""
    cores, each = cluster(), next_turn()
    started: list[Progress] = []
    perform = cores.perform
    cores.perform = lambda name, commands: (  # type: ignore[method-assign]
        started.extend(c for c in commands if isinstance(c, Progress) and c.stage.name == "PREFILL_STARTED"),
        perform(name, commands),
    )[1]
    cores.queue("d", share(cores, each))
    cores.queue("p", placed(cores, each, target))
    if target:
        cores.queue(target, Placed(ROUTER, each, 1e9, source=cores.nodes["p"].peer))
    cores.run(random.Random(seed))
    assert not cores.failed
    assert cores.output(each) == wanted(each)
    assert [progress.cached_tokens for progress in started] == [5 * PAGE_SIZE]
    cores.assert_nothing_held()


def test_what_was_fetched_is_held_until_the_prompt_has_started() -> None:
    cores, each = cluster(), next_turn()
    cores.queue("d", share(cores, each))
    cores.queue("p", placed(cores, each))
    while ready := [name for name, stream in cores.streams.items() if stream]:
        cores.deliver(*ready[0])  # everything arrives, and no step begins
    cache = cores.nodes["p"].scheduler.cache
    others = cache.take(cache.pool.num_free)
    assert others is not None
    cache.pool.release(others)
    plan = cores.nodes["p"].core.plan(0.0)
    assert plan is not None
    assert [chunk.start for chunk in plan.chunks] == [5 * PAGE_SIZE]


def test_a_holder_that_has_nothing_says_so_and_the_prompt_starts() -> None:
    cores, each = cluster(), job(9, 30)
    cores.queue("d", share(cores, each))
    cores.queue("p", placed(cores, each))
    cores.run(random.Random(1))
    assert cores.output(each) == wanted(each)
    cores.assert_nothing_held()


def test_pages_that_are_here_are_not_fetched() -> None:
    cores, each = cluster(), next_turn()
    cores.queue("p", Placed(ROUTER, TURN, 1e9))
    cores.run(random.Random(0))
    commands = cores.nodes["p"].core.handle(placed(cores, each, num_tokens=20), 0.0)
    assert not any(isinstance(command, doors.ToSender) for command in commands)
    assert cores.nodes["p"].core.plan(0.0) is not None


def test_a_fetch_finds_room_at_once_or_is_none() -> None:
    computing = Computing(num_pages=12)
    computing.handle(Placed(ROUTER, job(5, 26), 1e9))
    assert computing.core.plan(0.0) is not None
    commands = computing.place()
    assert not any(isinstance(command, doors.ToSender) for command in commands)
    assert computing.core.due_s > 1e9
    assert fetched(commands) == [(0, 0)]


def test_a_fetch_that_is_late_when_it_arrives_is_reported_with_what_is_here() -> None:
    computing = Computing()
    computing.handle(Placed(ROUTER, TURN, 1e9))
    assert computing.starts()
    assert fetched(computing.handle(placed(computing.cores, computing.each), DUE_S)) == [(0, 5)]
    assert computing.starts()


def test_a_fetch_whose_name_is_still_that_of_a_former_one_is_reported_as_none() -> None:
    computing = Computing()
    computing.place()
    computing.handle(Cancelled(*computing.each.key))
    assert fetched(computing.place()) == [(0, 0)]
    assert computing.starts()


def test_a_prompt_waits_for_its_fetch_until_that_is_due_and_no_longer() -> None:
    computing = Computing()
    computing.place()
    assert computing.core.due_s == DUE_S
    assert not computing.starts()
    commands = computing.handle(Due(), DUE_S)
    withdrawn = [c.message for c in commands if isinstance(c, doors.ToSender)]
    assert withdrawn == [Withdrawn("it is late")]
    assert computing.starts(DUE_S)
    assert computing.core.due_s > 1e9
    quiesced = doors.SenderMessage(computing.holder, computing.each.key, Quiesced("late"))
    computing.handle(replace(quiesced, key=AttemptKey(*computing.each.key)))
    computing.assert_nothing_held()


@pytest.mark.parametrize(
    "lost",
    [
        lambda c: doors.SenderLost(c.holder, "cut"),
        lambda c: doors.PeerGone(c.holder),
        lambda c: doors.SenderMessage(c.holder, AttemptKey(*c.each.key), Quiesced("no")),
    ],
    ids=["stream lost", "process gone", "refused"],
)
def test_a_prompt_starts_when_its_holder_is_lost_or_refuses(lost: object) -> None:
    computing = Computing()
    computing.place()
    reported = computing.handle(lost(computing))  # type: ignore[operator]
    assert not any(isinstance(command, Failed) for command in reported)
    assert computing.starts()
    computing.handle(doors.PeerGone(computing.holder))
    computing.assert_nothing_held()


@pytest.mark.parametrize("end", ["cancel", "router lost", "drain"])
def test_a_fetching_prompt_that_ends_gives_all_pages_back(end: str) -> None:
    computing = Computing()
    computing.place()
    key = AttemptKey(*computing.each.key)
    match end:
        case "cancel":
            computing.handle(Cancelled(*key))
        case "router lost":
            computing.handle(RouterLost(ROUTER))
        case _:
            computing.handle(DrainAsked())
            assert not computing.core.drained, "what was taken in is served"
            computing.handle(Due(), DUE_S)
            assert computing.starts(DUE_S)
    computing.handle(doors.SenderMessage(computing.holder, key, Quiesced("withdrawn")))
    assert not computing.starts()
    computing.assert_nothing_held()


def test_a_share_that_is_late_gives_its_pages_back() -> None:
    cores, each = cluster(), next_turn()
    holder = cores.nodes["d"]
    holder.core.handle(share(cores, each), 0.0)
    assert holder.scheduler.cache.pool.num_held == 5
    assert holder.core.due_s == DUE_S
    assert sorted(page for claim in holder.core.claims() for page in claim.held)
    holder.core.handle(Due(), DUE_S)
    assert holder.core.idle
    assert holder.scheduler.cache.pool.num_held == 0


@pytest.mark.parametrize("why", ["late", "one too many"])
def test_a_prompt_whose_share_is_not_even_begun_does_not_wait_until_it_is_due(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "one too many":
        monkeypatch.setattr(fetches, "MAX_SHARES", 0)
    cores, each = cluster(), next_turn()
    cores.queue("d", share(cores, each, deadline_s=0.0 if why == "late" else DUE_S))
    cores.queue("p", placed(cores, each))
    cores.run(random.Random(0))
    assert cores.output(each) == wanted(each)
    cores.assert_nothing_held()


def test_a_share_of_a_stream_that_is_lost_gives_its_pages_back() -> None:
    cores, each = cluster(), next_turn()
    holder = cores.nodes["d"]
    holder.core.handle(share(cores, each), 0.0)
    reported = holder.core.handle(doors.ReceiverLost(cores.nodes["p"].peer, "cut"), 1.0)
    assert not any(isinstance(command, Failed) for command in reported)
    assert holder.scheduler.cache.pool.num_held == 0


def committed(computing: Computing, offered: list[Command]) -> list[Command]:
    """Let all that was granted to the holder land; return what the worker does when it reads the commit."""
    (grant,) = [c.message for c in offered if isinstance(c, doors.ToSender) and c.peer == computing.holder]
    key, num_pages = AttemptKey(*computing.each.key), len(grant.pages)
    computing.handle(doors.SenderMessage(computing.holder, key, PagesLanded((7,) * num_pages)))
    computing.handle(doors.DigestsChecked(key, None))
    commit = Commit(grant.capability, Capsule((grant.first_page + num_pages) * PAGE_SIZE, ()))
    return computing.handle(doors.SenderMessage(computing.holder, key, commit))


def test_a_fetch_ends_with_its_prompt_when_that_can_go_nowhere() -> None:
    computing = Computing()
    offered = computing.handle(placed(computing.cores, computing.each, "t"))
    computing.handle(doors.ReceiverLost(computing.cores.nodes["t"].peer, "cut"))
    committed(computing, offered)
    assert not computing.starts()
    computing.handle(doors.PeerGone(computing.holder))
    computing.assert_nothing_held()


def test_a_prompt_that_lost_its_target_and_its_holder_in_one_process_does_not_start() -> None:
    computing = Computing()
    computing.handle(placed(computing.cores, computing.each, "d"))
    computing.handle(doors.PeerGone(computing.holder))
    assert not computing.starts()
    computing.assert_nothing_held()


def test_a_commit_that_crosses_the_end_of_a_late_fetch_reports_nothing_of_the_prompt() -> None:
    computing = Computing()
    offered = computing.place()
    computing.handle(Due(), DUE_S)
    assert not any(isinstance(command, Progress) for command in committed(computing, offered))
