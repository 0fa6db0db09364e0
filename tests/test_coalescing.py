import asyncio

from pdserve.net.coalescing import TOGETHER_BYTES, Deferred, next_message
from pdserve.proto.v1 import link_pb2 as link

Entry = link.AttachResponse | Deferred[link.AttachResponse] | None


def queue_of(*messages: Entry) -> "asyncio.Queue[Entry]":
    outbound = asyncio.Queue[Entry]()
    for message in messages:
        outbound.put_nowait(message)
    return outbound


def share(num_bytes: int) -> link.AttachResponse:
    return link.AttachResponse(share=link.Share(token_ids=bytes(num_bytes)))


async def test_messages_that_wait_are_written_together_up_to_a_size() -> None:
    outbound = queue_of(share(0), share(TOGETHER_BYTES), share(0))
    together = await next_message(outbound)
    assert together is not None
    assert [len(each.share.token_ids) for each in (together, *together.more)] == [0, TOGETHER_BYTES]
    assert await next_message(outbound) == share(0)


async def test_the_end_of_a_stream_comes_after_all_that_waits() -> None:
    outbound = queue_of(share(1), share(2), None)
    assert await next_message(outbound) == link.AttachResponse(share=share(1).share, more=[share(2)])
    assert await next_message(outbound) is None


async def test_what_is_put_together_when_it_is_its_turn_may_be_nothing() -> None:
    outbound = queue_of(lambda: None, lambda: share(1), lambda: None, lambda: share(2))
    assert await next_message(outbound) == link.AttachResponse(share=share(1).share, more=[share(2)])
    assert outbound.empty()


async def test_a_message_that_waits_in_two_queues_stays_as_it_is() -> None:
    shared = share(1)
    together = await next_message(queue_of(shared, share(2)))
    assert together is not None
    assert (len(together.more), len(shared.more)) == (1, 0)
    assert await next_message(queue_of(shared)) is shared
