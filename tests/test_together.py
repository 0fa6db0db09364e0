import asyncio

from pdserve.proto.v1 import link_pb2 as link
from pdserve.together import TOGETHER_BYTES, next_message


def queue_of(*messages: link.AttachResponse | None) -> "asyncio.Queue[link.AttachResponse | None]":
    outbound = asyncio.Queue[link.AttachResponse | None]()
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
