"""A door is given each gain once and in order, one write a turn, and is called again only when it takes more."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from router_fakes import TOKENIZER

from pdserve.base.ids import new_request_id
from pdserve.net.rpc import AnyContext
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, Refused, Status
from pdserve.protocol.sampling import PromptLogprobs, SamplingParams
from pdserve.router.frontend.answer import Answer, Gain, Pace, Sink
from pdserve.router.frontend.call_writer import CallWriter
from pdserve.router.frontend.grpc_endpoint import CallSink, reply_bytes
from pdserve.router.requests.commands import Deliver, Finished
from pdserve.router.requests.events import ClientTooSlow, RequestArrived, StopStringFound
from pdserve.router.requests.timeline import Ledger, Usage
from pdserve.text.stop import OutputText

FINISHED = Finished(Usage(1, 3, 0), Ledger())
CUT_OFF = Refused(Cause.SLOW_READER, "too slow")


class Door:
    """Notes what it is given."""

    def __init__(self, *, takes_more: bool = True) -> None:
        self.takes_more = takes_more
        self.writes: list[tuple[list[Gain], Finished | Refused | None]] = []
        self.cuts: list[Refused] = []

    def write(self, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bool:
        self.writes.append((list(gains), outcome))
        return self.takes_more

    def cut_off(self, outcome: Refused) -> None:
        self.cuts.append(outcome)

    def tokens(self) -> list[list[int]]:
        return [token_ids for gains, _ in self.writes for token_ids in (gain.token_ids for gain in gains)]


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


def answer_for(
    door: Sink,
    n: int = 1,
    max_unsent_bytes: int = 1000,
    interval: int | None = None,
    pace: Pace | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
) -> Answer:
    params = SamplingParams(n=n, max_tokens=100, stop_token_ids=tuple(stop_token_ids))
    outputs = [OutputText(TOKENIZER.detokenizer(at_start=False), ()) for _ in range(n)]
    return Answer(
        RequestArrived(new_request_id(), [1], params, received_s=0.0, deadline_s=1.0),
        door,
        outputs=outputs,
        max_unsent_bytes=max_unsent_bytes,
        pace=pace or Pace(interval, asyncio.get_running_loop(), unexpected),
        on_end=lambda *_: None,
    )


def gain(answer: Answer, token_id: int, index: int = 0, finish_reason: int = 0) -> object:
    return answer.deliver(Deliver(answer.event.request_id, index, [token_id], [], finish_reason))


async def turn() -> None:
    await asyncio.sleep(0)


async def test_a_reply_that_cannot_be_made_ends_its_call_alone() -> None:
    def replies(*_gained: object) -> list[object]:
        raise ValueError("cannot be made")

    sink = CallSink(CallWriter(cast("AnyContext", None)), replies)  # nothing is written
    sink.answer = answer_for(sink)
    gain(sink.answer, 10)
    await turn()  # what the door raised here would stop the process
    with pytest.raises(ValueError, match="cannot be made"):
        await sink.end()


async def test_what_comes_in_one_turn_is_written_together() -> None:
    door = Door()
    answer = answer_for(door, n=2)
    gain(answer, 10)
    gain(answer, 20, index=1)
    gain(answer, 11)
    assert door.writes == []
    await turn()
    assert door.tokens() == [[10, 11], [20]]
    assert len(door.writes) == 1
    gain(answer, 12, finish_reason=2)
    gain(answer, 21, index=1, finish_reason=2)
    answer.end(FINISHED)
    await turn()
    (last, outcome) = door.writes[1]
    assert [(each.token_ids, each.finish_reason) for each in last] == [([12], 2), ([21], 2)]
    assert outcome is FINISHED


@pytest.mark.parametrize(
    ("finish_reason", "shown"), [(inference.FINISH_REASON_STOP, 1), (inference.FINISH_REASON_LENGTH, 2)]
)
async def test_the_text_of_a_stop_token_is_left_out_and_the_token_is_not(finish_reason: int, shown: int) -> None:
    door, ids = Door(), TOKENIZER.encode("ab", add_special=False)
    answer = answer_for(door)
    gain(answer, ids[0])
    gain(answer, ids[1], finish_reason=finish_reason)
    answer.end(FINISHED)
    await turn()
    assert door.tokens() == [ids]
    assert "".join(each.text for gains, _ in door.writes for each in gains) == "ab"[:shown]


@pytest.mark.parametrize(
    ("finish_reason", "last", "named"),
    [
        (inference.FINISH_REASON_STOP, 7, 7),
        (inference.FINISH_REASON_STOP, 8, None),  # the end of the text by the model's own word
        (inference.FINISH_REASON_LENGTH, 7, None),
    ],
)
async def test_a_stop_token_is_named_where_the_request_asked_for_it(
    finish_reason: int, last: int, named: int | None
) -> None:
    door = Door()
    answer = answer_for(door, stop_token_ids=[6, 7])
    gain(answer, 10)
    gain(answer, last, finish_reason=finish_reason)
    await turn()
    ((gained,), _) = door.writes[0]
    assert (gained.token_ids, gained.stop_match) == ([10, last], named)


async def test_an_interval_is_a_number_of_tokens() -> None:
    door = Door()
    answer = answer_for(door, interval=3)
    for token_id in range(10, 18):
        gain(answer, token_id)
        await turn()
    assert door.tokens() == [[10], [11, 12, 13], [14, 15, 16]]
    answer.end(FINISHED)
    await turn()
    assert door.tokens()[3:] == [[17]]


async def test_a_door_that_takes_no_more_gets_the_rest_at_once_when_it_does() -> None:
    door = Door(takes_more=False)
    answer = answer_for(door)
    for token_id in (10, 11, 12):
        gain(answer, token_id)
        await turn()
    assert door.tokens() == [[10]]
    answer.resume()
    await turn()
    assert door.tokens() == [[10], [11, 12]]
    answer.resume()
    await turn()
    assert len(door.writes) == 2
    answer.end(FINISHED)
    await turn()
    assert door.writes[2:] == [([], FINISHED)]


async def test_a_door_that_asks_for_more_too_early_is_left_alone_while_it_writes() -> None:
    class Hasty(Door):
        def write(self, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bool:
            gain(answer, 20)
            return super().write(gains, outcome)

    door = Hasty(takes_more=False)
    answer = answer_for(door)
    gain(answer, 10)
    await turn()
    await turn()
    assert door.tokens() == [[10]]
    answer.resume()
    await turn()
    assert door.tokens() == [[10], [20]]


@pytest.mark.parametrize("has_left", [False, True])
async def test_nothing_is_written_after_the_end(has_left: bool) -> None:
    door = Door()
    answer = answer_for(door)
    gain(answer, 10)
    if has_left:
        answer.leave()
    else:
        answer.end(FINISHED)
    await turn()
    num_writes = len(door.writes)
    assert num_writes == (0 if has_left else 1)
    answer.resume()
    answer.end(FINISHED)
    await turn()
    assert len(door.writes) == num_writes


async def test_too_much_that_waits_cuts_the_reader_off() -> None:
    door = Door(takes_more=False)
    answer = answer_for(door, max_unsent_bytes=100)
    gain(answer, 10)
    await turn()
    cuts = [news for _ in range(100) if (news := gain(answer, 11)) is not None]
    assert cuts == [ClientTooSlow(answer.event.request_id, 100)]
    answer.end(CUT_OFF)
    await turn()
    assert door.cuts == [CUT_OFF]
    answer.resume()
    assert len(door.writes) == 1


async def cut_off() -> tuple[Door, Answer]:
    """Return an answer of which one token was written, and the next ones were dropped for a slow reader."""
    door = Door(takes_more=False)
    answer = answer_for(door, max_unsent_bytes=100)
    gain(answer, 10)
    await turn()
    while not gain(answer, 11):
        pass
    return door, answer


async def test_an_answer_that_finishes_as_its_reader_is_cut_off_is_not_finished_to_the_reader() -> None:
    door, answer = await cut_off()
    gain(answer, 12, finish_reason=2)
    answer.end(FINISHED)
    answer.resume()
    await turn()
    assert len(door.writes) == 1
    assert door.cuts == [answer.outcome]
    assert isinstance(answer.outcome, Refused)
    assert answer.outcome.status is Status.RESOURCE_EXHAUSTED


async def test_nothing_is_written_after_tokens_that_were_dropped() -> None:
    door, answer = await cut_off()
    answer.resume()
    assert gain(answer, 12) is None
    await turn()
    assert door.tokens() == [[10]]
    answer.end(CUT_OFF)
    await turn()
    assert (len(door.writes), door.cuts) == (1, [CUT_OFF])


async def test_a_door_that_takes_more_is_not_too_slow_however_much_comes_in_one_turn() -> None:
    door = Door()
    answer = answer_for(door, max_unsent_bytes=100, interval=1000)
    scored = PromptLogprobs(bytes(400), b"", b"")
    assert answer.deliver(Deliver(answer.event.request_id, 0, (), (), 0, scored)) is None
    assert gain(answer, 10) is None
    await turn()
    ((written,), _) = door.writes[0]
    assert (written.prompt_logprobs, written.token_ids) == ([scored], [10])


async def test_what_passes_the_limit_does_not_wait_for_the_rest_of_its_interval() -> None:
    door = Door()
    answer = answer_for(door, max_unsent_bytes=100, interval=1000)
    assert gain(answer, 10) is None
    await turn()
    for _ in range(100):
        assert gain(answer, 11) is None
        await turn()
    assert len(door.writes) > 1
    assert all(len(token_ids) < 25 for token_ids in door.tokens())


async def test_a_write_that_raises_is_reported_as_what_stops_the_process() -> None:
    class Broken(Door):
        def write(self, gains: Sequence[Gain], outcome: Finished | Refused | None) -> bool:
            raise ArithmeticError

    loop, errors = asyncio.get_running_loop(), list[Exception]()
    loop.set_exception_handler(lambda _loop, _context: None)
    answer = answer_for(Broken(), pace=Pace(1, loop, errors.append))
    gain(answer, 10)
    await turn()
    assert [type(error) for error in errors] == [ArithmeticError]


@pytest.mark.parametrize(
    "gained",
    [
        Gain(0, [5], "five"),
        Gain(0, [127, 128, 16383, 16384, 128_000, 2**32 - 1], "é" * 100),
        Gain(0, [1], ""),
        Gain(0, [], "late"),
        Gain(2, [7], "x"),
        Gain(0, [7], "x", finish_reason=1, stop_match="y"),
        Gain(0, [7], "x", [inference.TokenLogprobs(chosen=-1.0)]),
    ],
)
def test_replies_put_together_by_hand_are_what_protobuf_makes(gained: Gain) -> None:
    reply = inference.GenerateResponse.FromString(reply_bytes("ab" * 16, [gained], None))
    assert reply.request_id == "ab" * 16
    (delta,) = reply.deltas
    assert (delta.index, list(delta.token_ids), delta.text) == (gained.index, gained.token_ids, gained.text)
    assert (delta.finish_reason, delta.stop_match) == (gained.finish_reason, gained.stop_match or "")
    assert list(delta.logprobs) == gained.logprobs
    assert reply.ByteSize() == len(reply_bytes("ab" * 16, [gained], None)), "nothing unknown in it"


async def test_tokens_after_a_stop_string_are_neither_written_nor_counted() -> None:
    door = Door()
    answer = answer_for(door)
    answer._outputs = [OutputText(TOKENIZER.detokenizer(at_start=False), ("b",))]
    first, second, third = ([TOKENIZER.encode(letter, add_special=False)[0]] for letter in "abc")
    assert answer.deliver(Deliver(answer.event.request_id, 0, first, (), 0)) is None
    assert isinstance(answer.deliver(Deliver(answer.event.request_id, 0, second, (), 0)), StopStringFound)
    assert answer.deliver(Deliver(answer.event.request_id, 0, third, (), 0)) is None
    answer.end(FINISHED)
    await asyncio.sleep(0)
    ((gains, outcome),) = door.writes
    assert [gain.token_ids for gain in gains] == [first + second]
    assert outcome == Finished(Usage(1, 2, 0), Ledger())
