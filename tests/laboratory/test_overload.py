"""Loads at shares of a cluster's capacity."""

from pathlib import Path

import pytest
from cluster_states import cluster_state

from lab.overload import Findings, Trial, served
from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.launch.folder import write_secret
from pdserve.measure.client import Client, connect
from pdserve.measure.live import LiveCluster
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import fixed_lengths

OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.1)


async def test_a_load_that_brings_no_request_in_its_time_is_an_error_in_words(tmp_path: Path) -> None:
    trial = Trial(fixed_lengths("w", 1, 8, 2), (0.5,), seconds=1.0, calibration_s=2.0)
    async with connect("127.0.0.1:1", None) as channel:
        live = LiveCluster(cluster_state(write_secret(tmp_path)), Client(channel, MonotonicClock()), 1)
        with pytest.raises(CommandError, match=r"no request comes in 1 s at 0\.00 requests/s: --seconds is too short"):
            await anext(served(live, trial, Findings("w", 1e-9, OBJECTIVE), lambda _: None))
