"""A worker computes with the adapters that it has loaded, and with no other content under their names."""

from dataclasses import replace

from lone_core import LoneCore, job

from pdserve.protocol.prefix_hash import CacheScope, PrefixHasher
from pdserve.protocol.reports import Failure
from pdserve.worker.messages import Failed

GOLD, BLUE = b"gold" * 8, b"blue" * 8


def test_a_job_of_an_adapter_that_is_not_loaded_is_refused_by_its_digest() -> None:
    worker = LoneCore(adapters=frozenset([BLUE]))
    (failed,) = worker.place(replace(job(1, 8), scope=CacheScope("", GOLD)))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.reason) == (Failure.INVALID, f"adapter: {GOLD.hex()} is not loaded here")
    assert not worker.core.load().pages_wanted
    assert worker.core.idle


def test_chunks_name_the_adapter_of_their_job() -> None:
    worker = LoneCore(adapters=frozenset([GOLD, BLUE]), hasher=PrefixHasher(b"secret", "model", 4))
    scopes = CacheScope("", GOLD), CacheScope("", BLUE), CacheScope()
    for number, scope in enumerate(scopes):
        worker.place(replace(job(number, 8), scope=scope))
    plan = worker.core.plan(0.0)
    assert plan is not None
    assert [chunk.adapter for chunk in plan.chunks] == [GOLD, BLUE, b""]
