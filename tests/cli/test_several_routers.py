"""What the measurement with several routers sends to whom."""

from pdserve.bench.workload import Arrival
from pdserve.experiments.routers import split

ARRIVALS = [Arrival(0.1 * number, 8 + number, 4) for number in range(400)]


def test_each_request_goes_through_one_router_at_its_time() -> None:
    shares = split(ARRIVALS, 4, seed=1)
    assert sorted((each for share in shares for each in share), key=lambda each: each.start_s) == ARRIVALS
    assert all(share == sorted(share, key=lambda each: each.start_s) for share in shares)


def test_every_router_gets_about_as_many_requests() -> None:
    assert all(70 < len(share) < 130 for share in split(ARRIVALS, 4, seed=2))


def test_equal_seeds_deal_requests_out_alike() -> None:
    assert split(ARRIVALS, 3, seed=5) == split(ARRIVALS, 3, seed=5) != split(ARRIVALS, 3, seed=6)
