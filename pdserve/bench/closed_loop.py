"""Keep a number of requests under way, and hold each answer against the one that is due."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import grpc

from pdserve.bench.asks import Answers, Ask
from pdserve.bench.outcomes import Outcome, difference
from pdserve.clock import Clock
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub


class ClosedLoop:
    """Clients that each send their next request when they have the answer to the last one."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock, deadline_s: float) -> None:
        self._stub = InferenceServiceStub(channel)
        self._clock = clock
        self._deadline_s = deadline_s

    async def run(
        self,
        asks: Sequence[Ask],
        due: Sequence[Answers],
        num_requests: int,
        num_clients: int,
        on_end: Callable[[Outcome], None],
    ) -> None:
        """Send the asks in turn, over and over, until so many requests have been sent and have ended."""
        began_s = self._clock.now_s()
        numbers = iter(range(num_requests))

        async def attend(numbers: Iterator[int]) -> None:
            for number in numbers:
                which = number % len(asks)
                on_end(await self._send(number, asks[which], due[which], began_s))

        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(attend(numbers))

    async def _send(self, number: int, ask: Ask, due: Answers, began_s: float) -> Outcome:
        sent_s = self._clock.now_s()
        tokens: dict[int, list[int]] = {}
        times_s: list[float] = []
        status, detail, ledger = "OK", "", inference.Ledger()
        try:
            async for reply in self._stub.Generate(ask.message(self._deadline_s)):
                if any(delta.token_ids for delta in reply.deltas):
                    times_s.append(self._clock.now_s())
                for delta in reply.deltas:
                    tokens.setdefault(delta.index, []).extend(delta.token_ids)
                if reply.HasField("ledger"):
                    ledger = reply.ledger
        except grpc.aio.AioRpcError as error:
            status, detail = error.code().name, error.details() or ""
        answers = {index: tuple(ids) for index, ids in tokens.items()}
        return Outcome(
            number=number,
            sent_s=sent_s - began_s,
            ended_s=self._clock.now_s() - began_s,
            status=status,
            detail=detail,
            wrong=difference(answers, due, is_whole=status == "OK"),
            ttft_s=times_s[0] - sent_s if times_s else None,
            gap_s=max((after - before for before, after in pairwise(times_s)), default=0.0),
            num_tokens=sum(map(len, answers.values())),
            attempts=ledger.attempts,
        )
