"""Proofs that a process knows the cluster's secret, without sending it.

Both sides draw a nonce. Each sends an HMAC-SHA256, keyed with the secret, over both nonces and its own role in the
exchange. Invariant: a proof is accepted once, by one process, for one purpose.
"""

import hmac
import secrets
import struct
from collections import OrderedDict

from pdserve.base.clock import Clock

NONCE_BYTES = 16
PROOF_BYTES = 32
CHALLENGE_BYTES = 8 + NONCE_BYTES + PROOF_BYTES
CHALLENGE_S = 30.0  # how long a challenge can be answered
MAX_SPENT = 1 << 16  # answered challenges remembered; then answers are refused. Only who knows the secret can fill it

_ISSUED = struct.Struct(f"!Q{NONCE_BYTES}s")  # milliseconds of the challenger's clock, and its nonce


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof_of(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return a code that only a process with the secret can make, valid for one purpose."""
    code = hmac.new(secret, digestmod="sha256")
    for part in (purpose.encode(), *parts):
        code.update(struct.pack("!I", len(part)) + part)
    return code.digest()


def is_proof(given: bytes, secret: bytes, purpose: str, *parts: bytes) -> bool:
    return hmac.compare_digest(given, proof_of(secret, purpose, *parts))


class Challenges:
    """Challenges that this process gives to callers, each good for one answer within `CHALLENGE_S`.

    A challenge that waits for its answer takes no memory here: it carries its own time, and a code made with a key that
    only this process has.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(PROOF_BYTES)
        self._spent: OrderedDict[bytes, float] = OrderedDict()  # answered challenges, and until when

    def new(self) -> bytes:
        issued = _ISSUED.pack(round(1e3 * self._clock.now_s()), new_nonce())
        return issued + proof_of(self._key, "challenge", issued)

    def take(self, challenge: bytes) -> bool:
        """Take the one answer to a challenge. False unless the challenge is ours and can still be answered."""
        now_s = self._clock.now_s()
        while self._spent and next(iter(self._spent.values())) < now_s:
            self._spent.popitem(last=False)
        issued, code = challenge[: _ISSUED.size], challenge[_ISSUED.size :]
        if not is_proof(code, self._key, "challenge", issued):
            return False
        issued_ms, _ = _ISSUED.unpack(issued)
        if now_s - issued_ms / 1e3 > CHALLENGE_S or challenge in self._spent or len(self._spent) >= MAX_SPENT:
            return False
        self._spent[challenge] = now_s + CHALLENGE_S + 1.0
        return True
