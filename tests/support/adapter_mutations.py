"""Bugs on purpose in what is served under several names."""

from breaking import Original, breaks

from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.prefix_hash import CacheScope, PrefixHash, PrefixHasher
from pdserve.router.placement.view import WorkerView


@breaks(PrefixHasher, "root")
def share_kv_between_adapters(original: Original, self: PrefixHasher, scope: CacheScope) -> PrefixHash:
    root: PrefixHash = original(self, CacheScope(scope.salt))
    return root


@breaks(WorkerView, "has")
def place_where_an_adapter_is_not_loaded(original: Original, self: WorkerView, adapter: AdapterDigest) -> bool:
    has: bool = original(self, NO_ADAPTER)
    return has
