"""Prompts as they travel from a router to workers."""

import asyncio

import pytest
from router_fakes import TOKENIZER

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import PROTOCOL_VERSION, Attempt, Incarnation, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.checkpoint.checkpoint import NO_DEFAULTS
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.prefix_hash import EVERYONE
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import from_wire, largest, pack, to_wire
from pdserve.router import wire as router_wire
from pdserve.router.frontend.prompts import SLICE_TOKENS, Prompts
from pdserve.router.frontend.served import ServedModel
from pdserve.router.requests.commands import Place, SequenceSpec
from pdserve.router.requests.events import LinkId, Registration
from pdserve.worker import wire as worker_wire
from pdserve.worker.messages import Placed, RouterRef

IDS = [0, 1, 150_000, 2**32 - 1]


def placement(token_ids: list[int]) -> link.AttachResponse:
    """Return what a router sends to a prefill worker."""
    spec = SequenceSpec(
        RequestId(bytes(16)),
        Attempt(0),
        pack(token_ids),
        len(token_ids),
        SamplingParams(max_tokens=1),
        (0,),
        EVERYONE,
        9.0,
        0,
    )
    layout = KvLayout("w", 1, 1, 8, 16, "float32")
    process = LinkId(1), WorkerId("p0"), Incarnation(1), Role.PREFILL
    worker = Registration(*process, PROTOCOL_VERSION, True, "m", layout, 100, 8, 1000, "", 2048)
    ((_, message),) = router_wire.messages(Place(spec, worker, None))
    return message


def test_a_worker_reads_the_tokens_that_a_router_sent() -> None:
    placed = worker_wire.event(placement(IDS), RouterRef(1), 0.0)
    assert isinstance(placed, Placed)
    assert list(placed.job.token_ids) == IDS


def test_a_prompt_takes_four_bytes_a_token_on_the_wire() -> None:
    assert to_wire([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert len(placement([150_000] * 1000).place.spec.token_ids) == 4000


def test_token_ids_that_are_cut_off_are_refused_by_name() -> None:
    message = placement(IDS)
    message.place.spec.token_ids = message.place.spec.token_ids[:-1]
    with pytest.raises(ProtocolError, match=r"spec\.token_ids: 15 bytes, a multiple of 4 is needed"):
        worker_wire.event(message, RouterRef(1), 0.0)


def test_the_largest_of_token_ids_is_found_and_of_none_it_is_0() -> None:
    assert (largest(IDS), largest(from_wire(b"", "none"))) == (2**32 - 1, 0)


async def test_a_long_prompt_gives_others_their_turn() -> None:
    ids = inference.TokenIds(ids=range(8 * SLICE_TOKENS))
    prompts = Prompts(ServedModel("m", 1, len(ids.ids), NO_DEFAULTS, TOKENIZER, None), 1, 1.0)
    reading = asyncio.create_task(prompts.tokenize(inference.GenerateRequest(token_ids=ids), len(ids.ids), 9.0))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert list(reading.result()) == list(ids.ids)
    assert num_turns >= 8
    await prompts.close()
