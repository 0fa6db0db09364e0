"""Hashes of prefixes, the same on routers and workers and for every page size. Pure.

A prompt is cut into blocks of tokens. The hash of a block covers its tokens and the hash of the block before it; the
first block follows a root, which is a keyed hash of the model's name and of who may share: a tenant, and an adapter.
Equal hashes mean equal tokens at equal positions, for one model and one scope, so equal KV. A page's hash is the hash
of its last block.

The key is derived from the cluster's secret. Without the key nobody can compute a root, or a hash that follows from
one, so a tenant can search neither for the hashes of another's prompts nor for tokens whose hashes collide. Only the
root is keyed, so each block takes one compression of BLAKE2b: 0.4 us, most of it Python's call. SHA-256 with the
processor's instructions takes as long, BLAKE2s longer.
"""

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from pdserve.base.values import value
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.token_ids import TOKEN_ID_BYTES, to_wire

BLOCK_TOKENS = 16
HASH_BYTES = 16

PrefixHash = bytes  # HASH_BYTES of them


@value
class CacheScope:
    """Who may share KV: the requests of one tenant that are computed with one adapter, or with none."""

    salt: str = ""  # the tenant's
    adapter: AdapterDigest = NO_ADAPTER


EVERYONE = CacheScope()


class PrefixHasher:
    """Hashes the prefixes of one model's prompts. All processes of a cluster have the same secret and block size."""

    def __init__(self, secret: bytes, model: str, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self._key = hmac.digest(secret, b"prefix cache", "sha256")
        self._before_salt = len(model.encode()).to_bytes(4, "big") + model.encode()

    def root(self, scope: CacheScope) -> PrefixHash:
        """Return the hash that the first block of any prompt within a scope follows."""
        hashed, adapter = self._before_salt + scope.salt.encode(), scope.adapter
        person = blake2b(adapter, digest_size=blake2b.PERSON_SIZE).digest() if adapter else b""
        return blake2b(hashed, key=self._key, digest_size=HASH_BYTES, person=person).digest()

    def extend(self, parent: PrefixHash, token_ids: Sequence[int]) -> list[PrefixHash]:
        """Return the hashes of the full blocks of tokens that follow the block, or the root, of hash `parent`."""
        packed, size, hashes = to_wire(token_ids), self.block_tokens * TOKEN_ID_BYTES, list[PrefixHash]()
        for end in range(size, len(packed) + 1, size):
            parent = blake2b(parent + packed[end - size : end], digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        return hashes


def short_hashes(packed: bytes) -> list[int]:
    """Return 64 bits of each of these concatenated hashes: enough to guess what is cached, in half the memory."""
    return memoryview(packed).cast("Q")[:: HASH_BYTES // 8].tolist()
