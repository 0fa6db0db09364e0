"""Replayed workers serve a real router: every answer is whole, and is the text that they replay."""

import asyncio
from pathlib import Path

import pytest
from router_fakes import MODEL, TOKENIZER, collect, running_router, text_of

from pdserve.base.errors import CommandError
from pdserve.launch.folder import free_port
from pdserve.measure.replayed import Replayed
from pdserve.measure.streams import FORMS, Api, HttpStream, open_stream
from pdserve.proto.v1 import link_pb2 as link

ANSWER = "abcdefg"


async def test_answers_are_the_replayed_text(secret_file: Path) -> None:
    async with running_router(secret_file, {}) as router, asyncio.TaskGroup() as tasks:
        workers = Replayed(MODEL, TOKENIZER.encode(ANSWER, add_special=False), max_num_seqs=8)
        serving = tasks.create_task(workers.serve(router.addresses.internal, secret_file, 0.001))
        replies = await asyncio.gather(*(collect(router.generate(text="hello", max_tokens=20)) for _ in range(16)))
        assert {text_of(each) for each in replies} == {"abcdefgabcdefgabcdef"}
        serving.cancel()


MOST_TRIES = 5  # a process that was not scheduled for some steps takes them at once


@pytest.mark.parametrize("api", Api)
async def test_a_stream_of_each_api_reads_whole_answers_and_sees_their_first_text(secret_file: Path, api: Api) -> None:
    port, step_s = free_port("127.0.0.1"), 0.05
    async with running_router(secret_file, {"http_port": port}) as router, asyncio.TaskGroup() as tasks:
        workers = Replayed(MODEL, TOKENIZER.encode(ANSWER, add_special=False), max_num_seqs=8)
        serving = tasks.create_task(workers.serve(router.addresses.internal, secret_file, step_s))
        stream = open_stream(api, MODEL, router.addresses.public, f"127.0.0.1:{port}")
        rests = []  # of answers: seconds after their first text, and messages
        for max_tokens in (1, *[8] * MOST_TRIES):
            began_s = (loop := asyncio.get_running_loop()).time()
            answer = await stream.ask("hello", max_tokens)
            took_s = loop.time() - began_s
            assert answer.num_messages > 0
            assert answer.ttft_s > 0
            rest_s = took_s - answer.ttft_s
            rests.append((rest_s, answer.num_messages))
            if max_tokens > 1 and rest_s >= 6 * step_s / 2 and answer.num_messages >= max_tokens:
                break
        else:
            pytest.fail(f"first texts came as late as the last ones, or tokens together: {rests}")
        await stream.close()
        serving.cancel()


def test_a_prompt_that_is_cancelled_before_its_step_is_not_computed() -> None:
    workers, kept = Replayed(MODEL, [1], max_num_seqs=8), link.Place(spec=link.SequenceSpec(request_id=4 * b"kept"))
    workers._prompts = [link.Place(spec=link.SequenceSpec(request_id=4 * b"left", attempt=1)), kept]
    workers._cancel(link.Cancel(request_id=4 * b"left", attempt=1))
    assert workers._prompts == [kept]


async def test_a_connection_that_was_lost_between_two_requests_is_an_error() -> None:
    class Noting(HttpStream):
        lost = asyncio.Event()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.lost.set()

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200\r\n\r\ndata: "completion_tokens":1,data: [DONE]\n\n\r\n0\r\n\r\n')
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server, asyncio.timeout(10):
        host, port = server.sockets[0].getsockname()
        stream = Noting(f"{host}:{port}", FORMS[Api.COMPLETIONS], MODEL)
        await stream.ask("hello", 1)
        await stream.lost.wait()
        with pytest.raises(CommandError, match="closed a connection"):
            await stream.ask("hello", 1)
