"""What a frontend does wrong, or leaves undone, costs its own connections alone, and is counted as in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from router_driver import LENGTH, PROMPT, Driver

from pdserve.capacity.wires import Delta
from pdserve.clock import MonotonicClock
from pdserve.errors import CommandError, ProtocolError, Status
from pdserve.ids import RequestId
from pdserve.metrics import ANSWER_TOKENS, FINISHED, Distribution, Metric
from pdserve.router import frontend_processes as frontends_module
from pdserve.router import hub as hub_module
from pdserve.router.commands import Deliver, Finished, Refused, reads_too_slowly
from pdserve.router.config import RouterConfig
from pdserve.router.events import ClientEvent, ClientTooSlow, RequestArrived, StepReported, StopStringFound
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.channel import Channel, core_decoder, frame
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.frontend.process import Remote
from pdserve.router.frontend_link import MAX_UNANSWERED, FrontendLink
from pdserve.router.frontend_processes import Frontends, run_frontends
from pdserve.router.hub import Hub
from pdserve.router.shell import Shell
from pdserve.router.timeline import Ledger, Usage
from pdserve.sampling import SamplingParams
from pdserve.token_ids import pack

CONFIG = RouterConfig(model="m", secret_file=Path("secret"), port=0, num_frontends=2)
ONE = RequestId(bytes(16))
LIMITS = TenantLimits(max_concurrent=1, tokens_per_s=10)


class Reader:
    """Waits for an answer at a frontend; `Answer` and `Intake` in one."""

    def __init__(
        self, remote: Remote, news: ClientEvent | None = None, reads: Finished | Refused | None = None
    ) -> None:
        self.tokens: list[int] = []
        self.ended: asyncio.Future[Finished | Refused] = asyncio.get_running_loop().create_future()
        self._remote = remote
        self._news = news  # of each token
        self._reads = reads  # how it ended for the client, where that differs from what the core says

    def deliver(self, command: Deliver) -> ClientEvent | None:
        self.tokens += command.token_ids
        return self._news

    def end(self, outcome: Finished | Refused) -> None:
        self._remote.outcomes.end(arrival(), self._reads or outcome, [LENGTH])
        self.ended.set_result(outcome)


class Core:
    """A router's core with a pair of workers, and the links of its frontends."""

    def __init__(self) -> None:
        driver, clock = Driver(), MonotonicClock()
        driver.now_s = clock.now_s()
        self._worker, _ = driver.pair()
        self.core = driver.core
        self.shell = Shell(driver.core, clock)
        self.hub = Hub(self.shell, CONFIG, "m", lambda: False)
        self._channels: list[Channel] = []

    async def link(self, ours: Channel) -> FrontendLink:
        """Connect a frontend's end of a channel."""
        link, theirs = await self._open()
        self._channels.append(ours)
        await asyncio.get_running_loop().create_unix_connection(lambda: ours, sock=theirs)
        return link

    async def remote(self) -> tuple[Remote, FrontendLink]:
        remote = Remote()
        link, theirs = await self._open()
        self._channels.append(remote.channel)
        await remote.connect(theirs)
        return remote, link

    async def _open(self) -> tuple[FrontendLink, socket.socket]:
        """Open a channel; return the core's end of it, and the socket of the other end."""
        link, (ours, theirs) = FrontendLink(self.hub, lambda _abort: None), socket.socketpair()
        self._channels.append(link.channel)
        await asyncio.get_running_loop().create_unix_connection(lambda: link.channel, sock=ours)
        return link, theirs

    async def close(self) -> None:
        for channel in self._channels:
            channel.close("the test is over")
        await asyncio.sleep(0)

    def tokens(self, *ids: int, index: int = 0, end: int = 0) -> None:
        self.shell.post(StepReported(self._worker, [Delta(ONE, 0, index, 0, ids, end)]))

    def count(self, metric: Metric, *labels: str) -> float | Distribution:
        """Return what the router counted of its requests' ends."""
        return next(
            each.amount for each in self.hub.outcomes.samples() if (each.metric, each.labels) == (metric, labels)
        )

    def check_nothing_held(self, link: FrontendLink) -> None:
        assert not link._answers
        assert not link._replies
        assert not any(use.num_running for use in self.hub.tenants._uses.values())
        self.core.check_idle()
        assert not self.shell.broken.done()


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    core = Core()
    yield core
    await core.close()


def arrival(n: int = 1, max_tokens: int = 1) -> RequestArrived:
    now_s = MonotonicClock().now_s()
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return RequestArrived(ONE, PROMPT, params, now_s, now_s + 60, tenant="acme", ttft_slo_s=1.0)


def arrive(n: int = 1, token_ids: Sequence[int] = PROMPT) -> messages.Arrive:
    return messages.Arrive(replace(arrival(n), token_ids=()), pack(token_ids).tobytes())


async def settle(remote: Remote) -> None:
    """Return once all that a frontend sent has been taken, what that led to has come back, and was answered."""
    for _ in range(2):
        await remote.engine()


def test_messages_come_whole_and_in_order_however_frames_are_split() -> None:
    got: list[object] = []
    channel = Channel(core_decoder, got.append, got.append)
    sent = [messages.Ping(), messages.Reply(7, b"seven"), messages.Stop()]
    for byte in frame(sent[:2]) + frame([]) + frame(sent[2:]):
        channel.data_received(bytes([byte]))
    assert got == sent
    channel.data_received(frame(sent) + frame(sent))
    assert got == 3 * sent


def test_a_frame_over_the_limit_is_refused_before_it_has_come() -> None:
    channel = Channel(core_decoder, print, print)
    with pytest.raises(ProtocolError, match=f"{messages.MAX_FRAME_BYTES + 1} bytes, over the limit"):
        channel.data_received((messages.MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


BEGIN = messages.Begin(1, "acme", b"{}")
NONSENSE: dict[str, tuple[list[messages._Message], str]] = {
    "has come before": ([arrive(), arrive()], "has come before"),
    "no tokens": ([arrive(token_ids=())], "has no tokens"),
    "parameters": ([arrive(n=99)], "n: 99"),
    "index": ([arrive(n=2), messages.Stopped(ONE, 2)], "index: 2 of a request whose n is 2"),
    "negative index": ([arrive(), messages.Stopped(ONE, -1)], "index: -1"),
    "counted": ([arrive(), messages.Counted(ONE, [], 0, None)], "has not ended"),
    "done": ([BEGIN, messages.Done("acme"), messages.Done("acme")], "no request under way"),
    "spend": ([messages.Spend("acme", 5)], "no request under way"),
    "limits": ([messages.Begin(1, "acme", b"[]")], "ValidationError"),
    "unknown": ([messages.Stop()], "ValidationError"),
}


@pytest.mark.parametrize(("sent", "why"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_channel_that_it_came_on_alone(
    core: Core, sent: list[messages._Message], why: str
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    other, other_link = await core.remote()
    peer = Channel(core_decoder, lambda _message: None, lambda _why: None)
    link = await core.link(peer)
    for message in sent:
        peer.post(message)
    assert why in await link.lost
    core.check_nothing_held(link)
    reader = Reader(other)
    other.admit(arrival(), reader)
    await settle(other)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(other)
    core.check_nothing_held(other_link)


async def test_frontends_share_a_look_at_the_live_page(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD_S", 60.0)
    (one, _), (other, _) = await core.remote(), await core.remote()
    before = await one.live()
    one.admit(arrival(), Reader(one))
    await settle(one)
    assert await other.live() == before
    monkeypatch.setattr(hub_module, "PERIOD_S", 0.0)
    assert list((await other.live())["requests"]) == [ONE.hex()]


async def test_news_of_requests_that_are_over_is_no_nonsense(core: Core) -> None:
    remote, link = await core.remote()
    for late in (
        messages.Leave(ONE),
        messages.TooSlow(ONE, 5),
        messages.Stopped(ONE, 7),
        messages.Counted(ONE, [], 0, None),
    ):
        remote.channel.post(late)
    await settle(remote)
    assert not link.lost.done()


async def test_one_frontend_has_no_say_in_the_requests_of_another(core: Core) -> None:
    (one, one_link), (other, other_link) = await core.remote(), await core.remote()
    reader = Reader(one)
    one.admit(arrival(), reader)
    await settle(one)
    for foreign in (messages.Leave(ONE), messages.TooSlow(ONE, 5), messages.Stopped(ONE, 0)):
        other.channel.post(foreign)
    await settle(other)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(one)
    core.check_nothing_held(one_link)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    one.admit(arrival(), Reader(one))
    await settle(one)
    other.channel.post(arrive())
    assert "has come before" in await other_link.lost
    one.leave(ONE)
    await settle(one)
    core.check_nothing_held(one_link)


async def test_a_client_that_leaves_as_its_answer_ends_leaves_nothing(core: Core) -> None:
    remote, link = await core.remote()
    reader = Reader(remote)
    remote.admit(arrival(), reader)
    await settle(remote)
    remote.leave(ONE)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(remote)
    core.check_nothing_held(link)
    assert core.count(FINISHED, "m", "length") == 1


@pytest.mark.parametrize("stops", [False, True])
async def test_what_a_reader_does_ends_its_answer(core: Core, stops: bool) -> None:
    remote, link = await core.remote()
    news = StopStringFound(ONE, 0) if stops else ClientTooSlow(ONE, 77)
    reader = Reader(remote, news)
    remote.admit(arrival(n=2), reader)
    await settle(remote)
    core.tokens(9, end=LENGTH if stops else 0)
    if stops:
        core.tokens(8, index=1, end=LENGTH)
    outcome = await reader.ended
    if not stops:
        assert outcome == Refused(Status.RESOURCE_EXHAUSTED, "client reads too slowly: 77 bytes of its answer wait")
    await settle(remote)
    core.check_nothing_held(link)


async def test_a_client_that_leaves_before_it_may_begin_uses_nothing(core: Core) -> None:
    remote, link = await core.remote()
    beginning = asyncio.create_task(remote.tenants.begin("acme", LIMITS))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    await settle(remote)
    core.check_nothing_held(link)
    assert await remote.tenants.begin("acme", LIMITS) is None
    over = await remote.tenants.begin("acme", LIMITS)
    assert over is not None
    assert over.message.startswith("max_concurrent: 1 requests")
    remote.channel.close("the test is over")
    await link.lost


@pytest.mark.parametrize("max_tokens", [11, 16], ids=["it has ended", "it runs"])
async def test_what_died_with_a_frontend_counts_as_if_its_clients_had_left(core: Core, max_tokens: int) -> None:
    remote, link = await core.remote()
    assert await remote.tenants.begin("acme", LIMITS) is None
    remote.admit(arrival(max_tokens=max_tokens), Reader(remote))
    await settle(remote)
    core.tokens(*range(11))
    remote.channel.close("its process was killed")
    await link.lost
    core.check_nothing_held(link)
    assert core.count(FINISHED, "m", "length") == (max_tokens == 11)
    over = core.hub.tenants.admit("acme", LIMITS)
    assert over is not None
    assert over.message == "tokens_per_s: this tenant may use 10 tokens a second", "it had 11 at once, and no request"


async def test_answers_count_as_long_as_clients_have_them(core: Core) -> None:
    remote, link = await core.remote()
    for read in (Finished(Usage(3, 5, 0), Ledger()), reads_too_slowly(77)):
        remote.admit(arrival(max_tokens=11), Reader(remote, reads=read))
        await settle(remote)
        core.tokens(*range(11))
        await settle(remote)
        core.check_nothing_held(link)
    answers = core.count(ANSWER_TOKENS, "m")
    assert isinstance(answers, Distribution)
    assert (answers.total, core.count(FINISHED, "m", "length")) == (5, 1)


async def test_a_frontend_that_answers_no_pings_is_given_up(core: Core) -> None:
    remote, link = await core.remote()
    for _ in range(2 * MAX_UNANSWERED):
        link.ping()
        await settle(remote)
    hanging = await core.link(Channel(core_decoder, lambda _message: None, lambda _why: None))
    for _ in range(MAX_UNANSWERED):
        hanging.ping()
    assert not hanging.lost.done()
    hanging.ping()
    assert "it hangs: 10 pings" in await hanging.lost
    await settle(remote)
    assert not link.lost.done()


async def test_a_frontend_that_does_not_read_is_given_up(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD_BYTES", 1 << 20)
    loop, (left, right) = asyncio.get_running_loop(), socket.socketpair()
    link = FrontendLink(core.hub, lambda _abort: None)
    with right:
        await loop.create_unix_connection(lambda: link.channel, sock=left)
        link.channel.post(messages.Reply(1, bytes(1 << 20)))
        link.channel.post(messages.Reply(2, bytes(1 << 20)))
        assert "it does not read" in await link.lost


async def test_a_start_that_fails_says_why(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_left)
    with pytest.raises(ExceptionGroup) as failed:
        async with asyncio.timeout(10), run_frontends(CONFIG, core.hub):
            pass
    assert failed.group_contains(CommandError, match="frontend 0 ended as it started: .*no processes are left")


async def test_an_error_of_ours_stops_the_router_while_its_frontends_start(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_command: str, **_options: object) -> None:
        await asyncio.Event().wait()

    def broken() -> bool:
        raise ArithmeticError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(ExceptionGroup) as failed:
        async with asyncio.timeout(10), run_frontends(CONFIG, Hub(core.shell, CONFIG, "m", broken)):
            pass
    assert failed.group_contains(ArithmeticError)


async def test_a_frontend_that_cannot_be_started_is_tried_again_until_the_router_stops(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, paused = iter(range(3)), asyncio.Event()

    async def start(*_command: str, **_options: object) -> None:
        if next(tries, None) is None:
            monkeypatch.setattr(frontends_module, "FIRST_PAUSE_S", 1000.0)
            paused.set()
        await none_left()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(frontends_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(frontends_module, "STABLE_S", -1.0)
    frontends = Frontends(CONFIG, core.hub)
    opened = asyncio.get_running_loop().create_future()
    opened.set_result(None)
    keeping = asyncio.create_task(frontends._keep(0, opened))
    await paused.wait()
    assert core.hub.num_frontends_lost == 4
    await frontends.stop()
    async with asyncio.timeout(10):
        await keeping


async def none_left(*_command: str, **_options: object) -> None:
    raise OSError(11, "no processes are left")


async def test_connections_to_all_frontends_are_counted_together(core: Core) -> None:
    remotes = [await core.remote() for _ in range(2)]
    for number in range(1, 4):
        for remote, link in remotes:
            remote.connections.note_opened()
            remote.connections.note_opened()
            remote.connections.note_call(f"ipv4:192.0.2.1:{number}")
            link.ping()
            await settle(remote)
        assert (core.hub.connections.num_opened, core.hub.connections.num_called) == (4 * number, 2 * number)
