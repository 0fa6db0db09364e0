"""What the measurement with several routers sends to whom."""

from pathlib import Path

import pytest
from cluster_states import cluster_state

from pdserve.clock import MonotonicClock
from pdserve.errors import ConfigError
from pdserve.launch.folder import free_port, write_secret
from pdserve.launch.local import LaunchError
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.client import Client, connect
from pdserve.measure.live import LiveCluster
from pdserve.measure.routers import late_router, split
from pdserve.measure.workload import Arrival

ARRIVALS = [Arrival(0.1 * number, 8 + number, 4) for number in range(400)]


def test_each_request_goes_through_one_router_at_its_time() -> None:
    shares = split(ARRIVALS, 4, seed=1)
    assert sorted((each for share in shares for each in share), key=lambda each: each.at_s) == ARRIVALS
    assert all(share == sorted(share, key=lambda each: each.at_s) for share in shares)


def test_every_router_gets_about_as_many_requests() -> None:
    assert all(70 < len(share) < 130 for share in split(ARRIVALS, 4, seed=2))


def test_equal_seeds_deal_requests_out_alike() -> None:
    assert split(ARRIVALS, 3, seed=5) == split(ARRIVALS, 3, seed=5) != split(ARRIVALS, 3, seed=6)


async def test_a_late_router_that_does_not_start_ends_the_measurement_with_its_exit_status(tmp_path: Path) -> None:
    spec = ClusterSpec(str(tmp_path / "no-model"), "counting")
    with pytest.raises(ExceptionGroup) as caught:
        async with late_router(spec, cluster_state(write_secret(tmp_path)), "router-1", free_port("127.0.0.1")):
            pass
    assert caught.group_contains(LaunchError, match="router-1 ended with status 2 before its workers were attached")


async def test_a_measurement_shows_the_operators_certificate_where_the_cluster_asks_for_one(tmp_path: Path) -> None:
    state = cluster_state(write_secret(tmp_path), identity_dir=tmp_path / "identity")
    async with connect(state.admin, None) as channel:
        live = LiveCluster(state, Client(channel, MonotonicClock()), 1)
        with pytest.raises(ConfigError, match="identity_dir"):
            await live.status()
