"""Prompts as arrays of token ids: four bytes a token, copied and hashed as bytes, without Python integers."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from pdserve.base.errors import ProtocolError

TokenIds: TypeAlias = "array[int]"  # of unsigned 32-bit integers, in this machine's byte order

TOKEN_ID_BYTES = 4
ALL_IDS = 1 << 32  # the size of a vocabulary with every id that a message can carry
_TYPE = "I"


def pack(token_ids: Sequence[int]) -> TokenIds:
    """Return token ids as an array, the same object if it is one. OverflowError for an id outside [0, ALL_IDS)."""
    return token_ids if isinstance(token_ids, array) else array(_TYPE, token_ids)


def to_wire(token_ids: Sequence[int]) -> bytes:
    """Return token ids as messages carry them: four bytes each, little-endian."""
    return _little_endian(pack(token_ids)).tobytes()


def from_wire(packed: bytes, field: str) -> TokenIds:
    """Return a message's token ids; ProtocolError, which names the field, if the last one is cut off."""
    if len(packed) % TOKEN_ID_BYTES:
        raise ProtocolError(f"{field}: {len(packed)} bytes, a multiple of {TOKEN_ID_BYTES} is needed")
    return _little_endian(array(_TYPE, packed))


def largest(token_ids: Sequence[int]) -> int:
    """Return the largest token id, 0 if there is none."""
    import numpy as np  # noqa: PLC0415 - slow to load, and the command line's flags come through here

    return int(np.frombuffer(pack(token_ids), np.uint32).max(initial=0))


def _little_endian(token_ids: TokenIds) -> TokenIds:
    """Return a copy with swapped bytes on a big-endian machine; elsewhere the same object."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids
