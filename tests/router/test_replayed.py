"""Replayed workers serve a real router: every answer is whole, and is the text that they replay."""

import asyncio
from pathlib import Path

from router_fakes import MODEL, TOKENIZER, collect, running_router, text_of

from pdserve.measure.frontend import GrpcStream, Seen
from pdserve.measure.replayed import Replayed
from pdserve.measure.router_speed import measure_steps

ANSWER = "abcdefg"


async def test_answers_are_the_replayed_text(secret_file: Path) -> None:
    async with running_router(secret_file, {}) as router, asyncio.TaskGroup() as tasks:
        workers = Replayed(MODEL, TOKENIZER.encode(ANSWER, add_special=False), max_num_seqs=8)
        serving = tasks.create_task(workers.serve(router.addresses.internal, secret_file, 0.001))
        replies = await asyncio.gather(*(collect(router.generate(text="hello", max_tokens=20)) for _ in range(16)))
        assert {text_of(each) for each in replies} == {"abcdefgabcdefgabcdef"}
        stream, seen = GrpcStream(router.addresses.public), Seen()
        for max_tokens in (1, 2, 5):
            await stream.ask("hello", max_tokens, seen)
        assert (seen.num_requests, len(seen.ttft_s)) == (3, 3)
        await stream.close()
        serving.cancel()


def test_the_core_ends_what_it_was_measured_with() -> None:
    found = measure_steps(num_sequences=4, num_steps=3)
    assert found.core_s > 0
    assert found.wire_s > 0
