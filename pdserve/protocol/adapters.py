"""Adapters: small weights that are added to a model's, so that one model answers under several names. Pure."""

from pdserve.base.values import value

DIGEST_BYTES = 32
MAX_ADAPTERS = 256  # of one worker
MAX_NAME_BYTES = 128

AdapterDigest = bytes  # of an adapter's content, DIGEST_BYTES long; empty: none, the model itself
NO_ADAPTER = b""


@value
class Adapter:
    """An adapter that a worker has loaded."""

    name: str  # in requests
    digest: AdapterDigest
