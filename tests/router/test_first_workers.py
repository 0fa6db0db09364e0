"""Where pools scale to zero, requests wait for the first workers until their deadline, and are not late for that."""

from pathlib import Path

import pytest
from router_driver import Driver

from pdserve.base.clock import MonotonicClock
from pdserve.protocol.refusal import Status
from pdserve.router.config import Limits, RouterConfig
from pdserve.router.local_backend import LocalBackend
from pdserve.router.requests.events import LinkLost
from pdserve.router.shell import Shell

ZERO = Limits(scale_to_zero=True, worker_silence_s=1e6, max_hold_s=1e6)
STARTUP_S = 45.0


def emptied(limits: Limits) -> Driver:
    """Return a core that has lost its workers long ago."""
    d = Driver(limits, policy="goodput")
    for link in d.pair():
        d.post(LinkLost(link, "it was drained"))
    d.wait(600.0)
    return d


def start(d: Driver, **changes: object) -> None:
    """Let a pair of workers load, and say what its first steps have taken, before it is ready."""
    links = d.attach("p0", incarnation=2, ready=False), d.attach("d0", incarnation=2, ready=False, **changes)
    d.teach(1e-5, 0.01)
    d.predictor.lengths.tokens.value = 4.0
    for link in links:
        d.attach_again(link, ready=True)


@pytest.mark.parametrize("ttft_s", [None, 0.5])
def test_the_first_request_waits_for_a_start_up_and_is_placed(ttft_s: float | None) -> None:
    d = emptied(ZERO)
    request = d.arrive(ttft_s=ttft_s)
    d.wait(STARTUP_S)
    assert request not in d.ends
    start(d)
    assert d.placed().spec.request_id == request


def test_without_it_a_request_is_refused_at_once_where_nobody_has_been_for_long() -> None:
    d = emptied(Limits(worker_silence_s=1e6))
    assert d.refusal(d.arrive()).status is Status.UNAVAILABLE


def test_only_the_time_without_workers_is_excused() -> None:
    d = emptied(ZERO)
    large = [d.arrive(prompt=[number] * 3600, ttft_s=4.0, deadline_in_s=300.0) for number in range(5)]
    d.wait(STARTUP_S)
    start(d, num_pages=1000, max_num_seqs=64, max_model_len=4096)
    assert (d.core.num_active, d.core.num_held) == (4, 1), "there is no room for all"
    d.run(3.5)
    assert large[-1] not in d.ends
    d.run(1.0)
    assert d.refusal(large[-1]).status is Status.RESOURCE_EXHAUSTED


def test_a_deadline_ends_the_wait() -> None:
    d = emptied(ZERO)
    request = d.arrive(deadline_in_s=50.0)
    d.wait(49.9)
    assert request not in d.ends
    d.wait(0.2)
    assert d.refusal(request).status is Status.DEADLINE_EXCEEDED


def test_a_request_that_runs_waits_for_workers_in_the_place_of_lost_ones() -> None:
    d = Driver(ZERO)
    prefill, decode = d.pair()
    request = d.arrive(deadline_in_s=300.0)
    d.tokens(prefill, request, 0, 10)
    d.post(LinkLost(decode, "its stream ended"))
    d.wait(200.0)
    assert request not in d.ends
    d.attach("d0", incarnation=2)
    assert d.placed().spec.request_id == request


@pytest.mark.parametrize("scale_to_zero", [False, True])
async def test_a_router_without_workers_is_ready_if_its_pools_scale_to_zero(*, scale_to_zero: bool) -> None:
    d = Driver()
    config = RouterConfig(model="m", secret_file=Path("secret"), scale_to_zero=scale_to_zero, pool_grace_s=0.0)
    is_stopping = False
    backend = LocalBackend(Shell(d.core, MonotonicClock()), config, "m", lambda: is_stopping)
    assert (backend.readiness().is_ready, backend.readiness().can_serve) == (scale_to_zero, scale_to_zero)
    links = d.pair()
    length = backend.readiness().max_model_len
    assert length is not None
    for link in links:
        d.post(LinkLost(link, "it was drained"))
    assert backend.readiness().can_serve is scale_to_zero
    assert backend.readiness().max_model_len == length
    is_stopping = True
    assert not backend.readiness().is_ready
    assert not backend.readiness().can_serve
