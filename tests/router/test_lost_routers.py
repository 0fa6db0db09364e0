"""A frontend's clients get each token once, in order, and one end, whichever routers are lost meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from frontend_streams import ONE, Attached, Core, Reader, arrival, new_frontend, placed, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from router_driver import LENGTH, PROMPT, STOP, scored_of

from pdserve.base.ids import RequestId
from pdserve.protocol.adapters import Adapter
from pdserve.protocol.refusal import Cause, Refused, RefusedError, Status
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.frontend.routers import Routers
from pdserve.router.requests.commands import Finished, Place
from pdserve.router.requests.events import ClientTooSlow, ShutdownAsked, StepReported, StopStringFound
from pdserve.router.requests.request import ATTEMPTS_OF_A_ROUTER

SECOND = ATTEMPTS_OF_A_ROUTER  # the first attempt of the second router that has a request


@pytest.fixture
async def cores() -> AsyncIterator[list[Core]]:
    cores = [Core(), Core()]
    yield cores
    for core in cores:
        await core.close()


async def begun(cores: list[Core], **terms: object) -> tuple[Routers, Attached, Reader]:
    """Return a frontend with a request that the first of the routers has."""
    routers, attached = await cores[0].frontend()
    reader = Reader(routers)
    routers.submit(arrival(**terms), reader)  # type: ignore[arg-type]
    await settle(routers)
    return routers, attached, reader


async def test_another_router_goes_on_from_the_tokens_that_the_client_has(cores: list[Core]) -> None:
    one, other = cores
    routers, lost, reader = await begun(cores, max_tokens=4)
    one.tokens(11, 12)
    await settle(routers)
    places = placed(other)
    _, attached = await other.frontend(routers)
    assert not places, "the router that has a request keeps it"
    await lost.lose()
    await settle(routers)
    (place,) = places
    assert (list(place.spec.token_ids), place.spec.num_prompt_tokens) == ([*PROMPT, 11, 12], len(PROMPT))
    assert place.spec.attempt == SECOND
    other.tokens(13, 14, position=2, attempt=SECOND, end=LENGTH)
    outcome = await reader.ended
    assert isinstance(outcome, Finished)
    assert (reader.tokens, outcome.usage.completion_tokens) == ({0: [11, 12, 13, 14]}, 4)
    steps = dict(outcome.ledger.steps)
    assert 0 <= outcome.ledger.ttft_ms == steps[Stage.FIRST_TOKEN] <= steps[Stage.FINISHED]
    await settle(routers)
    one.check_nothing_held(lost.link)
    other.check_nothing_held(attached.link)
    assert routers.num_resumed == 1


async def test_a_request_keeps_its_adapter_on_the_way_to_any_router(cores: list[Core]) -> None:
    adapter = Adapter("gold", b"gold" * 8)
    for core in cores:
        for worker in tuple(core.core.workers):
            core.shell.post(replace(worker.registration, adapters=(adapter,)))
    routers, lost = await cores[0].frontend()
    assert routers.readiness().adapters == {"gold": adapter.digest}
    routers.submit(replace(arrival(max_tokens=4), adapter=adapter.digest), reader := Reader(routers))
    await settle(routers)
    cores[0].tokens(11)
    await settle(routers)
    places = placed(cores[1])
    await cores[1].frontend(routers)
    await lost.lose()
    await settle(routers)
    (place,) = places
    assert place.spec.scope.adapter == adapter.digest
    cores[1].tokens(12, 13, 14, position=1, attempt=SECOND, end=LENGTH)
    assert isinstance(await reader.ended, Finished)


async def test_the_successor_of_the_only_router_gets_what_waits(cores: list[Core]) -> None:
    routers, lost, reader = await begun(cores, max_tokens=3)
    cores[0].tokens(11)
    await settle(routers)
    await lost.lose()
    assert (routers.home, routers.num_waiting, routers.readiness().can_serve) == (None, 1, True)
    late = RequestId(bytes(15) + b"2")
    routers.submit(arrival(request_id=late), later := Reader(routers))
    places = placed(cores[1])
    await cores[1].frontend(routers)
    await settle(routers)
    assert [list(place.spec.token_ids) for place in places] == [[*PROMPT, 11], [*PROMPT]]
    assert [place.spec.attempt for place in places] == [SECOND, 0]
    routers.leave(late)
    cores[1].tokens(12, 13, position=1, attempt=SECOND, end=LENGTH)
    assert isinstance(await reader.ended, Finished)
    assert isinstance(await later.ended, Refused)


async def test_a_router_that_has_no_workers_yet_waits_for_them_with_what_it_gets(cores: list[Core]) -> None:
    routers, lost, reader = await begun(cores, max_tokens=3)
    cores[0].tokens(11)
    await settle(routers)
    await lost.lose()
    empty = Core(has_workers=False)
    places = placed(empty)
    await empty.frontend(routers)
    await settle(routers)
    assert not places
    assert not reader.ended.done()
    assert empty.core.next_wakeup_s() is not None
    routers.leave(ONE)
    assert isinstance(await reader.ended, Refused)
    await empty.close()


@pytest.mark.parametrize("by_stop_string", [False, True])
async def test_a_continuation_that_has_ended_is_not_computed_again(cores: list[Core], by_stop_string: bool) -> None:
    routers, lost = await cores[0].frontend()
    reader = Reader(routers, StopStringFound(ONE, 0) if by_stop_string else None)
    routers.submit(arrival(n=2, max_tokens=3), reader)
    await settle(routers)
    cores[0].tokens(11, end=0 if by_stop_string else STOP)
    await settle(routers)
    reader._news = None
    cores[0].tokens(21, 22, index=1)
    await settle(routers)
    places = placed(cores[1])
    await cores[1].frontend(routers)
    await lost.lose()
    await settle(routers)
    (place,) = places
    assert (place.spec.indices, list(place.spec.token_ids)) == ((1,), [*PROMPT, 21, 22])
    cores[1].tokens(23, index=1, position=2, attempt=SECOND, end=LENGTH)
    assert isinstance(await reader.ended, Finished)
    assert reader.tokens == {0: [11], 1: [21, 22, 23]}


async def test_a_request_whose_end_was_lost_alone_ends_at_once(cores: list[Core]) -> None:
    routers, lost, reader = await begun(cores, max_tokens=2)
    for each in routers._underway.values():
        each.token_ids[0] += [11, 12]
        each.ended.add(0)
        each.first_token_s = routers.clock.now_s()
    places = placed(cores[1])
    await cores[1].frontend(routers)
    await lost.lose()
    outcome = await reader.ended
    assert isinstance(outcome, Finished)
    assert (outcome.usage.completion_tokens, places) == (2, [])


async def test_log_probabilities_of_a_prompt_come_once(cores: list[Core]) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    routers, lost, reader = await begun(cores, params=params, token_ids=(5, 6, 7, 8))
    cores[0].shell.post(StepReported(cores[0].worker, [], prompts=[scored_of(ONE, 0, 1, [-1.0])]))
    await settle(routers)
    await cores[1].frontend(routers)
    await lost.lose()
    await settle(routers)
    scored = scored_of(ONE, SECOND, 1, [-1.0, -2.0, -3.0])
    cores[1].shell.post(StepReported(cores[1].worker, [], prompts=[scored]))
    cores[1].tokens(11, 12, attempt=SECOND, end=LENGTH)
    assert isinstance(await reader.ended, Finished)
    assert reader.num_scored == 4


async def test_a_client_that_is_gone_or_too_slow_does_not_go_to_another_router(cores: list[Core]) -> None:
    for news in (None, ClientTooSlow(ONE, 77)):
        routers, lost = await cores[0].frontend()
        reader = Reader(routers, news)
        routers.submit(arrival(max_tokens=4), reader)
        await settle(routers)
        if news is None:
            lost.theirs.channel.close("it is lost before it hears of this")
            routers.leave(ONE)
        else:
            lost.link.channel.close("it is lost before it hears of this")
            routers.take(lost.theirs, messages_tokens(11))
        await lost.lose()
        places = placed(cores[1])
        _, attached = await cores[1].frontend(routers)
        assert isinstance(await reader.ended, Refused)
        assert not places
        await attached.lose()


def messages_tokens(*ids: int) -> messages.Tokens:
    return messages.Tokens(ONE, 0, list(ids), [], 0, None)


async def test_a_router_that_shuts_down_gets_nothing_more_and_ends_what_it_has() -> None:
    stopping = False
    one, other = Core(is_stopping=lambda: stopping), Core()
    routers, old = await one.frontend()
    reader = Reader(routers)
    routers.submit(arrival(max_tokens=2), reader)
    await settle(routers)
    one.tokens(11)
    _, _ = await other.frontend(routers)
    stopping = True
    one.shell.post(ShutdownAsked())
    places = placed(other)
    late = RequestId(bytes(15) + b"2")
    routers.submit(arrival(request_id=late), later := Reader(routers))  # it does not know yet
    await settle(routers)
    assert [place.spec.request_id for place in places] == [late]
    assert routers.home is not old.theirs
    one.tokens(12, position=1, end=LENGTH)
    assert isinstance(await reader.ended, Finished)
    routers.leave(late)
    await later.ended
    await old.lose("this router is shutting down")
    for core in (one, other):
        await core.close()


async def test_what_tenants_use_goes_to_the_next_router(cores: list[Core]) -> None:
    limits = TenantLimits(max_concurrent=2)
    routers, lost = await cores[0].frontend()
    assert await routers.tenants.begin("acme", limits) is None
    assert await routers.tenants.begin("acme", limits) is None
    await lost.lose()
    routers.tenants.end("acme")
    _, attached = await cores[1].frontend(routers)
    assert await routers.tenants.begin("acme", limits) is None
    over = await routers.tenants.begin("acme", limits)
    assert over is not None
    for _ in range(2):
        routers.tenants.end("acme")
    await settle(routers)
    cores[1].check_nothing_held(attached.link)


async def test_a_tenants_request_that_waits_for_a_router_begins_with_the_next_one(cores: list[Core]) -> None:
    routers = new_frontend()
    beginning = asyncio.create_task(routers.tenants.begin("acme", TenantLimits()))
    await asyncio.sleep(0)
    await cores[0].frontend(routers)
    assert await beginning is None


async def test_without_a_router_requests_wait_as_long_as_the_grace_and_their_deadlines_allow() -> None:
    routers = new_frontend(router_grace_s=0.2)
    early, later = Reader(routers), Reader(routers)
    now_s = routers.clock.now_s()
    routers.submit(arrival(deadline_s=now_s + 0.05), early)
    routers.submit(arrival(request_id=RequestId(bytes(15) + b"2")), later)
    refused = [await early.ended, await later.ended]
    assert [each.status for each in refused if isinstance(each, Refused)] == [
        Status.DEADLINE_EXCEEDED,
        Status.UNAVAILABLE,
    ]
    assert isinstance(refused[1], Refused)
    assert refused[1].retry_after_s
    assert not routers.readiness().can_serve
    over = await routers.tenants.begin("acme", TenantLimits())
    assert over is not None
    assert over.status is Status.UNAVAILABLE
    with pytest.raises(RefusedError, match="no router is attached"):
        await routers.live()


async def test_without_a_router_a_bounded_number_of_requests_waits() -> None:
    routers = new_frontend(max_num_waiting=1)
    readers = [Reader(routers) for _ in range(2)]
    for number, reader in enumerate(readers):
        routers.submit(arrival(request_id=RequestId(bytes(15) + bytes([number]))), reader)
    assert not readers[0].ended.done()
    outcome = readers[1].ended.result()
    assert isinstance(outcome, Refused)
    assert outcome.message.startswith("max_num_waiting: 1 requests")
    routers.end_all()
    await routers.idle()


@pytest.mark.parametrize("of", ["ended", "tokens", "another"])
async def test_what_a_router_says_of_a_request_that_it_does_not_have_ends_its_stream(
    cores: list[Core], of: str
) -> None:
    routers, attached = await cores[0].frontend()
    if of == "another":
        reader = Reader(routers)
        routers.submit(arrival(max_tokens=3), reader)
        await settle(routers)
        _, attached = await cores[1].frontend(routers)
    ended = messages.Ended(ONE, None, Refused(Cause.FAILED, "no"))
    attached.link.channel.post(messages_tokens(9) if of == "tokens" else ended)
    assert "is not with this router" in "".join(await attached.lost())
    routers.end_all()


# ---- any order of losses


def token_of(index: int, position: int) -> int:
    return 100 + 50 * index + position


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.integers(0, 1), st.integers(1, 3)),
        st.just(("lose",)),
        st.just(("attach",)),
        st.just(("stop",)),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_tokens_come_once_and_in_order_through_any_losses(actions: list[tuple[str, ...]]) -> None:
    asyncio.run(Losses().run(actions))


class Losses:
    """A request of two continuations, and routers that come, compute some tokens and are lost."""

    MAX_TOKENS = 6

    def __init__(self) -> None:
        self._alive: list[tuple[Core, Attached, list[Place]]] = []

    async def run(self, actions: list[tuple[str, ...]]) -> None:
        routers = new_frontend()
        reader = Reader(routers)
        routers.submit(arrival(n=2, max_tokens=self.MAX_TOKENS), reader)
        for action in (*actions, ("attach",), *[("tokens", index, self.MAX_TOKENS) for index in (0, 1)]):
            await self._do(action, routers)
            if routers.home is not None:
                await settle(routers)
        outcome = await asyncio.wait_for(reader.ended, 10)
        assert isinstance(outcome, Finished)
        wanted = {index: [token_of(index, at) for at in range(self.MAX_TOKENS)] for index in (0, 1)}
        assert (reader.tokens, outcome.usage.completion_tokens) == (wanted, 2 * self.MAX_TOKENS)
        for core, _, _ in self._alive:
            await core.close()

    async def _do(self, action: tuple[object, ...], routers: Routers) -> None:
        match action:
            case ("attach",) if len(self._alive) < 3:
                core = Core()
                places = placed(core)
                self._alive.append((core, (await core.frontend(routers))[1], places))
            case ("lose",) if self._alive:
                _, attached, _ = self._alive.pop(0)
                await attached.lose()
            case ("stop",) if self._alive:
                core, attached, _ = self._alive.pop()
                core.shell.post(ShutdownAsked())
                await attached.lose("this router is shutting down")
            case ("tokens", int(index), int(count)):
                for core, _, places in self._alive:
                    self._report(core, places, index, count)

    def _report(self, core: Core, places: list[Place], index: int, count: int) -> None:
        """Let the workers of a router compute some tokens, if it has the request."""
        request = core.core.find(ONE)
        if request is None or request.sequences[index].ended:
            return
        have = len(request.sequences[index].token_ids)
        place = next(each for each in reversed(places) if index in each.spec.indices)
        ids = [token_of(index, at) for at in range(have, min(have + count, self.MAX_TOKENS))]
        end = LENGTH if have + len(ids) == self.MAX_TOKENS else 0
        core.tokens(*ids, index=index, position=have, attempt=place.spec.attempt, end=end)
