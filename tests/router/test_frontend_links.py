"""What a frontend does wrong, or leaves undone, costs its own connections alone, and is counted as in one process."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from frontend_streams import ONE, Core, Reader, arrival, new_frontend, settle
from router_driver import LENGTH, PROMPT

from pdserve.observe.metrics import ANSWER_TOKENS, FINISHED, Distribution
from pdserve.protocol.refusal import Cause, Refused, reads_too_slowly
from pdserve.protocol.token_ids import pack
from pdserve.router import local_backend as hub_module
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.channel import PROTOCOL_VERSION, STREAM_ENDED, Channel, core_decoder
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.frontend_link import MAX_UNANSWERED
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.events import ClientTooSlow, Resumed, StopStringFound
from pdserve.router.requests.timeline import Ledger, Usage

LIMITS = TenantLimits(max_concurrent=1, tokens_per_s=10)
HELLO = messages.Attached("frontend-0", PROTOCOL_VERSION)


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    core = Core()
    yield core
    await core.close()


def arrive(n: int = 1, token_ids: Sequence[int] = PROMPT, resumed: Resumed | None = None) -> messages.Arrive:
    event = replace(arrival(n), token_ids=(), received_s=0.0, deadline_s=60.0, resumed=resumed)
    return messages.Arrive(event, pack(token_ids).tobytes())


def resumed(**changes: object) -> messages.Arrive:
    known = Resumed(1, [[9], []], [], 1, -0.5)
    return arrive(2, resumed=replace(known, **changes))  # type: ignore[arg-type]


async def test_messages_arrive_in_order_and_those_of_one_turn_travel_together() -> None:
    got: list[object] = []
    frames: list[bytes] = []
    channel = Channel(core_decoder, got.append)
    sent = [messages.Ping(), messages.Reply(7, b"seven"), messages.Abort("acme", ["r"])]
    for message in sent:
        channel.post(message)
    coming: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def write(frame: bytes) -> None:
        frames.append(frame)
        coming.put_nowait(frame)
        coming.put_nowait(None)

    assert await channel.run(coming.get, write) == STREAM_ENDED
    assert (got, len(frames)) == (sent, 1)


@pytest.mark.parametrize("is_reading", [True, False])
async def test_a_channel_that_finishes_writes_first_what_was_posted(*, is_reading: bool) -> None:
    written: list[bytes] = []
    may_write = asyncio.Event()
    channel = Channel(core_decoder, lambda _message: None)

    async def write(frame: bytes) -> None:
        await may_write.wait()
        written.append(frame)

    async def read() -> None:
        await asyncio.get_running_loop().create_future()

    running = asyncio.create_task(channel.run(read, write))
    channel.post(messages.Ping())
    await asyncio.sleep(0)
    channel.post(messages.Reply(7, b"seven"))
    channel.finish("the end")
    channel.post(messages.Ping())
    if is_reading:
        may_write.set()
        assert await running == "the end"
        assert [type(each) for packed in written for each in core_decoder.decode(packed)][:2] == [
            messages.Ping,
            messages.Reply,
        ]
        idle = Channel(core_decoder, lambda _message: None)
        idle.finish("at once")
        assert await idle.run(read, write) == "at once"
    else:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not running.done()
        channel.close("it took too long")
        assert await running == "it took too long"


BEGIN = messages.Begin(1, "acme", b"{}")
NONSENSE: dict[str, tuple[list[messages.Message], str]] = {
    "has come before": ([arrive(), arrive()], "has come before"),
    "no tokens": ([arrive(token_ids=())], "has no tokens"),
    "parameters": ([arrive(n=99)], "n: 99"),
    "index": ([arrive(n=2), messages.Stopped(ONE, 2)], "index: 2 of a request whose n is 2"),
    "negative index": ([arrive(), messages.Stopped(ONE, -1)], "index: -1"),
    "counted": ([arrive(), messages.Counted(ONE, [], 0, None)], "has not ended"),
    "done": ([BEGIN, messages.Done("acme"), messages.Done("acme")], "no request under way"),
    "spend": ([messages.Spend("acme", 5)], "no request under way"),
    "using": ([messages.Using("acme", 0)], "num_requests: 0"),
    "limits": ([messages.Begin(1, "acme", b"[]")], "ValidationError"),
    "a router's": ([messages.Ping()], "ValidationError"),
    "attached twice": ([HELLO], "Attached comes first"),
    "too many tokens": ([resumed(token_ids=[[1, 2], []])], r"resumed: tokens \[2, 0\] of 2 continuations of 1"),
    "other continuations": ([resumed(token_ids=[[9]])], r"resumed: tokens \[1\] of 2"),
    "no such token": ([resumed(token_ids=[[-1], []])], "resumed: "),
    "ended": ([resumed(ended=[2])], r"resumed: ended \[2\] of 2"),
    "no router": ([resumed(num_routers=0)], "resumed: 0 routers"),
    "too many routers": ([resumed(num_routers=2**16)], "resumed: 65536 routers"),
    "scored": ([resumed(num_scored=4)], "resumed: 1 routers, 4 tokens scored"),
    "no first token": ([resumed(first_token_s=None)], "the first one came at None"),
}
FIRST = {
    "another message": (messages.Ping(), "ValidationError"),
    "a request": (arrive(), "the first message is Arrive"),
    "version": (
        messages.Attached("frontend-0", PROTOCOL_VERSION + 1),
        f"protocol version {PROTOCOL_VERSION + 1} of the frontend is not {PROTOCOL_VERSION}",
    ),
    "no name": (messages.Attached("", PROTOCOL_VERSION), "the first message is Attached, and not"),
}


@pytest.mark.parametrize(("sent", "why"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_channel_that_it_came_on_alone(
    core: Core, sent: list[messages.Message], why: str
) -> None:
    other, attached = await core.frontend()
    peer, link, stream = await core.peer()
    for message in (HELLO, *sent):
        peer.post(message)
    assert re.search(why, "".join(await stream.whys()))
    link.end()
    core.check_nothing_held(link)
    reader = Reader(other)
    other.submit(arrival(), reader)
    await settle(other)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(other)
    core.check_nothing_held(attached.link)


@pytest.mark.parametrize(("sent", "why"), FIRST.values(), ids=FIRST)
async def test_a_frontend_says_first_who_it_is(core: Core, sent: messages.Message, why: str) -> None:
    peer, link, stream = await core.peer()
    peer.post(sent)
    assert why in "".join(await stream.whys())
    assert link.attached is None


async def test_frontends_share_a_look_at_the_live_page(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD_S", 60.0)
    (one, _), (other, _) = await core.frontend(), await core.frontend()
    before = await one.live()
    one.submit(arrival(), Reader(one))
    await settle(one)
    assert await other.live() == before
    monkeypatch.setattr(hub_module, "PERIOD_S", 0.0)
    assert list((await other.live())["requests"]) == [ONE.hex()]


async def test_news_of_requests_that_are_over_is_no_nonsense(core: Core) -> None:
    routers, attached = await core.frontend()
    for late in (
        messages.Leave(ONE),
        messages.TooSlow(ONE, 5),
        messages.Stopped(ONE, 7),
        messages.Counted(ONE, [], 0, None),
    ):
        routers.post(late)
    await settle(routers)
    assert routers.home is attached.theirs


async def test_one_frontend_has_no_say_in_the_requests_of_another(core: Core) -> None:
    (one, of_one), (other, of_other) = await core.frontend(), await core.frontend()
    reader = Reader(one)
    one.submit(arrival(), reader)
    await settle(one)
    for foreign in (messages.Leave(ONE), messages.TooSlow(ONE, 5), messages.Stopped(ONE, 0)):
        other.post(foreign)
    await settle(other)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(one)
    core.check_nothing_held(of_one.link)
    one.submit(arrival(), Reader(one))
    await settle(one)
    other.post(arrive())
    assert "has come before" in "".join(await of_other.lost())
    one.leave(ONE)
    await settle(one)
    core.check_nothing_held(of_one.link)


async def test_a_client_that_leaves_as_its_answer_ends_leaves_nothing(core: Core) -> None:
    routers, attached = await core.frontend()
    reader = Reader(routers)
    routers.submit(arrival(), reader)
    await settle(routers)
    routers.leave(ONE)
    core.tokens(9)
    assert isinstance(await reader.ended, Finished)
    await settle(routers)
    core.check_nothing_held(attached.link)
    assert core.count(FINISHED, "m", "length") == 1


@pytest.mark.parametrize("stops", [False, True])
async def test_what_a_reader_does_ends_its_answer(core: Core, stops: bool) -> None:
    routers, attached = await core.frontend()
    news = StopStringFound(ONE, 0) if stops else ClientTooSlow(ONE, 77)
    reader = Reader(routers, news)
    routers.submit(arrival(n=2), reader)
    await settle(routers)
    core.tokens(9, end=LENGTH if stops else 0)
    if stops:
        core.tokens(8, index=1, end=LENGTH)
    outcome = await reader.ended
    if not stops:
        assert outcome == Refused(Cause.SLOW_READER, "client reads too slowly: 77 bytes of its answer wait")
    await settle(routers)
    core.check_nothing_held(attached.link)


async def test_a_client_that_leaves_before_it_may_begin_uses_nothing(core: Core) -> None:
    routers, attached = await core.frontend()
    beginning = asyncio.create_task(routers.tenants.begin("acme", LIMITS))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    await settle(routers)
    core.check_nothing_held(attached.link)
    assert await routers.tenants.begin("acme", LIMITS) is None
    over = await routers.tenants.begin("acme", LIMITS)
    assert over is not None
    assert over.message.startswith("max_concurrent: 1 requests")


@pytest.mark.parametrize("max_tokens", [11, 16], ids=["it has ended", "it runs"])
async def test_what_died_with_a_frontend_counts_as_if_its_clients_had_left(core: Core, max_tokens: int) -> None:
    routers, attached = await core.frontend()
    assert await routers.tenants.begin("acme", LIMITS) is None
    routers.submit(arrival(max_tokens=max_tokens), Reader(routers))
    await settle(routers)
    core.tokens(*range(11))
    await attached.lose("its process was killed")
    core.check_nothing_held(attached.link)
    assert core.count(FINISHED, "m", "length") == (max_tokens == 11)
    over = core.backend.tenants.begin_now("acme", LIMITS)
    assert over is not None
    assert over.message == "tokens_per_s: this tenant may use 10 tokens a second", "it had 11 at once, and no request"


async def test_answers_count_as_long_as_clients_have_them(core: Core) -> None:
    routers, attached = await core.frontend()
    for read in (Finished(Usage(3, 5, 0), Ledger()), reads_too_slowly(77)):
        routers.submit(arrival(max_tokens=11), Reader(routers, reads=read))
        await settle(routers)
        core.tokens(*range(11))
        await settle(routers)
        core.check_nothing_held(attached.link)
    answers = core.count(ANSWER_TOKENS, "m")
    assert isinstance(answers, Distribution)
    assert (answers.total, core.count(FINISHED, "m", "length")) == (5, 1)


async def test_a_frontend_that_answers_no_pings_is_given_up(core: Core) -> None:
    routers, attached = await core.frontend()
    for _ in range(2 * MAX_UNANSWERED):
        attached.link.ping()
        await settle(routers)
    _, hanging, stream = await core.peer()
    for _ in range(MAX_UNANSWERED + 1):
        hanging.ping()
    assert "it hangs: 10 pings" in "".join(await stream.whys())
    await settle(routers)
    assert routers.home is attached.theirs


async def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD_BYTES", 1 << 20)
    channel = Channel(core_decoder, print)
    stuck = asyncio.Event()

    async def wait(*_: object) -> None:
        await stuck.wait()

    running = asyncio.create_task(channel.run(wait, wait))
    for _ in range(2):
        channel.post(messages.Reply(1, bytes((1 << 20) - 100)))
        await asyncio.sleep(0)
    assert "it does not read" in await running


async def test_connections_to_all_frontends_are_counted_together(core: Core) -> None:
    frontends = [await core.frontend(new_frontend()) for _ in range(2)]
    for number in range(1, 4):
        for routers, attached in frontends:
            routers.connections.note_opened()
            routers.connections.note_opened()
            routers.connections.note_call(f"ipv4:192.0.2.1:{number}")
            attached.link.ping()
            await settle(routers)
        assert (core.backend.connections.num_opened, core.backend.connections.num_called) == (4 * number, 2 * number)
