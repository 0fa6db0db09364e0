"""vLLM's format of KV events."""

import msgspec
import pytest

from pdserve import kvevents
from pdserve.errors import ProtocolError
from pdserve.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

NUMBER = bytes(8)


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_batch_with_an_impossible_token_is_refused(token_id: int) -> None:
    with pytest.raises(ProtocolError, match="token_ids"):
        kvevents.decode(NUMBER, kvevents.encode([BlockStored([1], None, [token_id], 1)], 0.0))


EVENTS: tuple[KvEvent, ...] = (
    BlockStored([1, 2**64 - 1], None, [1, 2, 3, 4], 2, medium="GPU", extra_keys=[("tenant",), None]),
    BlockRemoved([1, b"bytes"], "GPU"),
    AllBlocksCleared(),
)


def test_what_is_encoded_is_decoded() -> None:
    batch = kvevents.decode((7).to_bytes(8, "big"), kvevents.encode(list(EVENTS), 1.5))
    assert batch == kvevents.Batch(7, EVENTS)


def test_events_are_maps_in_an_array_with_all_fields_that_others_need() -> None:
    at_s, (stored_event, *_), *rest = msgspec.msgpack.decode(kvevents.encode(list(EVENTS), 1.5))
    assert at_s == 1.5
    assert not any(rest)
    assert stored_event["type"] == "BlockStored"
    needed = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert needed <= stored_event.keys()


def test_older_publishers_events_and_unknown_kinds_are_understood() -> None:
    events = [["BlockStored", [5], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [5]], {"type": "Moved"}, ["Other"]]
    batch = kvevents.decode(NUMBER, msgspec.msgpack.encode([0.0, events, 3]))
    assert batch.events == (BlockStored([5], None, [1, 2], 2, medium="GPU"), BlockRemoved([5]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([0.0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1], 2]]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [], None, [], "x"]]]),
    ],
)
def test_what_is_no_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        kvevents.decode(NUMBER, raw)
    with pytest.raises(ProtocolError):
        kvevents.decode(b"short", kvevents.encode([], 0.0))
