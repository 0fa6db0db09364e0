"""KV events as vLLM publishes them over ZMQ: routers of others can follow our workers, and ours can follow theirs.

A message has three parts: topic, sequence number (8 bytes, big end first), and a msgpack batch. The batch is an array
of time, events and rank; an event is a map whose "type" names it, or, from publishers older than June 2026, an array
of that name and the event's fields in their order here.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from pdserve.errors import ProtocolError
from pdserve.token_ids import ALL_IDS

MEDIUM = "GPU"  # vLLM's name for where the engine computes, whatever that is
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
Hash = int | bytes
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=ALL_IDS)]


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Blocks of one prefix, one after the other, can be reused from now on."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=lambda: None)  # vLLM's own decoder wants these three present
    medium: str | None = msgspec.field(default_factory=lambda: None)
    lora_name: str | None = msgspec.field(default_factory=lambda: None)
    extra_keys: list[tuple[Any, ...] | None] | None = None  # a block each; the first one's holds the salt

    def salt(self) -> str:
        """Return what separates these blocks from equal tokens of others."""
        first = self.extra_keys[0] if self.extra_keys else None
        if not first:
            return ""
        return first[0] if len(first) == 1 and isinstance(first[0], str) else repr(first)


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """These blocks are about to be overwritten."""

    block_hashes: list[Hash]
    medium: str | None = msgspec.field(default_factory=lambda: None)


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Nothing can be reused any longer."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[object, type[KvEvent]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


class _Batch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    sequence: int  # counts up by one
    events: tuple[KvEvent, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def encode(events: list[KvEvent], at_s: float) -> bytes:
    """Return a batch's last part. `at_s` is seconds since 1970."""
    return _encoder.encode(_Batch(at_s, events))


def decode(sequence: bytes, payload: bytes) -> Batch:
    """Return a batch; ProtocolError for what is none. Events of kinds not known here are left out."""
    if len(sequence) != SEQUENCE_BYTES:
        raise ProtocolError(f"kv events: sequence number of {len(sequence)} bytes")
    try:
        raw = _decoder.decode(payload)
        events = tuple(event for each in raw.events if (event := _event(each)) is not None)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ProtocolError(f"kv events: {error}") from error
    return Batch(int.from_bytes(sequence, "big", signed=True), events)


def _event(raw: object) -> KvEvent | None:
    if isinstance(raw, list) and raw and raw[0] in _KINDS:
        raw = {"type": raw[0], **dict(zip(_KINDS[raw[0]].__struct_fields__, raw[1:], strict=False))}
    if not isinstance(raw, dict) or raw.get("type") not in _KINDS:
        return None
    event: KvEvent = msgspec.convert(raw, _KINDS[raw["type"]])
    if isinstance(event, BlockStored) and len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise ProtocolError(
            f"kv events: {len(event.token_ids)} tokens in {len(event.block_hashes)} blocks of {event.block_size}"
        )
    return event
