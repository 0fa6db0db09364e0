"""Which mover a worker's configuration asks for."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from half_slice import MEETING, half_slice
from worker_settings import settings_of

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.executor.executor import Executor
from pdserve.kvtransfer.region import Region
from pdserve.worker.boot import build_mover

ME, ENDED = (Peer(WorkerId(name), Incarnation(1)) for name in ("me", "ended"))


def test_an_engine_in_the_interpreter_is_as_safe_from_half_a_slice_as_one_on_a_gpu() -> None:
    view = np.zeros((2, 1 << 16), np.uint8)
    config = settings_of(Path("m"), device="interpreter", mover="collective")
    executor = SimpleNamespace(region=Region.of(view), mover_sockets=())
    mover = build_mover(config, ME, cast("Executor", executor), lambda _: None, MEETING.secret)
    with half_slice(mover.describe(), ENDED) as ended:
        mover.cut(ENDED)
        assert not ended.send_rest()
    mover.close()
    assert not view.any()
