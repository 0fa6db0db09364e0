"""What is prepared of next turns gives way to them, and is bounded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import TOKENIZER

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import RequestId, new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import CLIENT_GONE, invalid
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import pack
from pdserve.router.frontend.answer import Answer
from pdserve.router.frontend.next_turns import (
    LOWEST_PRIORITY,
    MAX_OF_TENANT,
    MAX_UNDER_WAY,
    WITHIN_S,
    NextTurns,
    common_start,
)
from pdserve.router.requests.events import RequestArrived

PROMPT = (5, 6, 7)
MAX_MODEL_LEN = 100


class Core:
    """What preparations need of a backend: takes requests, and ends those that are left."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.submitted: dict[RequestId, tuple[RequestArrived, Answer]] = {}
        self.left: list[RequestId] = []
        self.ended: list[bool] = []
        self.outcomes = self
        self.is_live = True

    def submit(self, event: RequestArrived, answer: Answer) -> None:
        self.submitted[event.request_id] = event, answer

    def leave(self, request_id: RequestId) -> None:
        self.left.append(request_id)
        self.submitted.pop(request_id)[1].end(CLIENT_GONE)

    def end(self, event: RequestArrived, outcome: object, finish_reasons: object) -> None:
        del outcome, finish_reasons
        self.ended.append(event.is_preparation)

    def readiness(self) -> SimpleNamespace:
        return SimpleNamespace(is_live=self.is_live)

    def fail(self, error: Exception) -> None:
        raise error


class Tokens:
    """Tokenizes chats to the characters of their messages, once it may."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.refuses = False
        self.fails = False
        self.is_idle = True
        self.num_asked = 0

    async def tokenize(self, request: inference.GenerateRequest, room: int, remaining_s: float) -> bytes:
        del remaining_s
        self.num_asked += 1
        if self.fails:
            raise ZeroDivisionError
        await self.may_go_on.wait()
        if self.refuses:
            raise invalid("chat", f"more than {room} tokens")
        return pack([ord(each) for message in request.chat.messages for each in message.content])


class Spent:
    def __init__(self) -> None:
        self.num_tokens = 0

    def spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens


class World:
    def __init__(self, core: Core, tokens: Tokens, turns: NextTurns) -> None:
        self.core, self.tokens, self.turns, self.spent = core, tokens, turns, Spent()

    def answered(
        self, session: str = "talk", chat: str = "", kept_ids: Sequence[int] = (8, 9), tenant: str = "me"
    ) -> RequestArrived:
        """Let a turn end whose client wants the next one prepared."""
        event = turn(session, tenant)
        answer = SimpleNamespace(event=event, kept_ids=kept_ids, kept_text=["b", "c"])
        request = inference.GenerateRequest(token_ids=inference.TokenIds(ids=PROMPT))
        if chat:
            messages = [inference.ChatMessage(role="user", content=chat)]
            request = inference.GenerateRequest(chat=inference.Chat(messages=messages))
        self.turns.begin(request, None, self.spent, answer)  # type: ignore[arg-type]
        return event

    @property
    def prepared(self) -> list[RequestArrived]:
        return [event for event, _ in self.core.submitted.values()]


def turn(session: str = "talk", tenant: str = "me") -> RequestArrived:
    return RequestArrived(new_request_id(), PROMPT, SamplingParams(), 0.0, 60.0, tenant=tenant, session=session)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    core, tokens = Core(), Tokens()
    async with NextTurns(core, tokens, TOKENIZER, lambda: MAX_MODEL_LEN) as turns:  # type: ignore[arg-type]
        yield World(core, tokens, turns)
    assert not core.submitted
    assert all(core.ended)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_preparation_is_a_request_that_waits_for_nobody() -> None:
    async with world() as known:
        known.answered()
        await settle()
        (event,) = known.prepared
        assert tuple(memoryview(event.token_ids)) == (*PROMPT, 8, 9)
        assert (event.priority, event.params.max_tokens, event.is_preparation) == (LOWEST_PRIORITY, 1, True)
        assert (event.tenant, event.session) == ("me", "talk")
        assert event.deadline_s == event.ttft_slo_s == WITHIN_S
        assert known.spent.num_tokens == 2


async def test_a_chat_is_prepared_as_far_as_what_follows_does_not_matter() -> None:
    async with world() as known:
        known.answered(chat="a")
        await settle()
        assert [bytes(list(event.token_ids)) for event in known.prepared] == [b"abc"]


async def test_a_turn_cancels_its_own_preparation_alone() -> None:
    async with world() as known:
        known.answered("talk")
        known.answered("other")
        await settle()
        mine, other = known.prepared
        known.turns.give_way(turn("talk"))
        assert known.core.left == [mine.request_id]
        await settle()
        known.answered("talk")
        await settle()
        assert other in known.prepared
        assert len(known.prepared) == 2


async def test_a_turn_that_comes_before_its_preparation_is_written_is_not_prepared() -> None:
    async with world() as known:
        known.tokens.may_go_on.clear()
        known.answered(chat="a")
        await settle()
        known.turns.give_way(turn("talk"))
        known.tokens.may_go_on.set()
        await settle()
        assert not known.core.submitted
        assert not known.core.left
        assert known.tokens.num_asked == 1, "the second prompt is not rendered"


async def test_no_turn_is_rendered_while_other_prompts_are_tokenized() -> None:
    async with world() as known:
        known.tokens.is_idle = False
        known.answered("talk", chat="a")
        await settle()
        assert not known.tokens.num_asked
        known.tokens.is_idle = True
        known.answered("talk", chat="a")
        await settle()
        assert len(known.prepared) == 1


@pytest.mark.parametrize(("num_tokens", "is_prepared"), [(MAX_MODEL_LEN - 1, True), (MAX_MODEL_LEN, False)])
async def test_a_turn_that_leaves_no_room_for_its_answer_is_not_prepared(num_tokens: int, is_prepared: bool) -> None:
    async with world() as known:
        known.answered("chat", chat="a" * (num_tokens - 2))
        known.answered("tokens", kept_ids=[8] * (num_tokens - len(PROMPT)))
        await settle()
        assert len(known.prepared) == 2 * is_prepared
        assert bool(known.spent.num_tokens) == is_prepared


async def test_a_process_that_drains_prepares_nothing() -> None:
    async with world() as known:
        known.core.is_live = False
        known.answered()
        await settle()
        assert not known.prepared


async def test_a_preparation_that_fails_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as known:
        known.answered("other")
        known.tokens.fails = True
        known.answered("talk", chat="a")
        await settle()
        assert "ZeroDivisionError" in caplog.text
        known.tokens.fails = False
        known.answered("talk", chat="a")
        await settle()
        assert [event.session for event in known.prepared] == ["other", "talk"]


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_what_two_prompts_begin_with_is_found(one: list[int], other: list[int]) -> None:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert list(common_start(pack(one), pack(other))) == [token_id for token_id, _ in same]


async def test_too_many_and_those_that_cannot_be_written_are_left_out() -> None:
    async with world() as known:
        known.tokens.refuses = True
        known.answered(chat="a")
        await settle()
        assert not known.core.submitted
        for number in range(MAX_UNDER_WAY):
            known.answered(f"talk {number}")
            known.answered(f"talk {number}")
        await settle()
        assert len(known.prepared) == MAX_OF_TENANT, "of one tenant"
        for number in range(MAX_UNDER_WAY + 3):
            known.answered(f"talk {number}", tenant=f"another {number}")
        await settle()
        assert len(known.prepared) == MAX_UNDER_WAY
