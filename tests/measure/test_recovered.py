"""What is left of a run is judged by what the router says after the last answer."""

from pathlib import Path

import grpc
import pytest
from cluster_states import cluster_state
from router_fakes import running_router

from pdserve.launch.folder import ProcessState, write_secret
from pdserve.measure.live import StatusBoard, recovered

ROUTER = ProcessState(name="router", role="router", pid=1, incarnation=1, num_restarts=0)


async def test_a_request_that_ended_since_the_last_status_is_counted(tmp_path: Path) -> None:
    secret_file, board = write_secret(tmp_path), StatusBoard()
    async with running_router(secret_file, {"pool_grace_s": 0}) as router:
        state = cluster_state(secret_file, admin=router.addresses.internal, processes=(ROUTER,))
        board.put(await state.operator().status())
        with pytest.raises(grpc.aio.AioRpcError):  # there are no workers
            await router.generate(text="hello", max_tokens=1).read()
        free_after_s, left_over = await recovered(lambda: state, board)
    assert free_after_s is not None
    assert (left_over, sum(board.last.ended.values())) == ("", 1)
