"""Answers, as a client of a real router sees them."""

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

from pdserve.proto.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from tests.router.conftest import StartRouter


async def collect(call: AsyncIterable[inference.GenerateResponse]) -> list[inference.GenerateResponse]:
    return [reply async for reply in call]


async def test_an_answer_is_the_fake_models(start_router: "StartRouter") -> None:
    router = await start_router()
    await router.pair()
    request = inference.GenerateRequest(text="hello", sampling=inference.SamplingParams(max_tokens=5))
    replies = await collect(router.inference.Generate(request))
    print(replies)
