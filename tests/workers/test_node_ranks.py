"""Ranks of several machines add in float32, and meet over their channels to rank 0; other settings are refused."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from worker_settings import settings_of

from pdserve.base.errors import ConfigError
from pdserve.executor.node_ranks import ChannelStore, NodeRanks, store_for
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.settings.config import WorkerConfig
from pdserve.settings.degrees import Degrees

LIMIT_S = 20.0


def over_ranks(size: int, compute: object) -> list[object]:
    """Let so many ranks meet, each in a thread, and return what each computes."""
    pairs = [socket.socketpair() for _ in range(1, size)]

    def follow(index: int) -> object:
        ranks, store = NodeRanks(Rank(index, size), "127.0.0.1"), ChannelStore(Channel(pairs[index - 1][1]))
        ranks.meet(store, LIMIT_S)
        store.close()
        return compute(ranks)  # type: ignore[operator]

    with ThreadPoolExecutor(size) as threads:
        others = [threads.submit(follow, index) for index in range(1, size)]
        first = NodeRanks(Rank(0, size), "127.0.0.1")
        with store_for([Channel(own) for own, _ in pairs], LIMIT_S) as store:
            first.meet(store, LIMIT_S)
        found = [compute(first), *[each.result(LIMIT_S) for each in others]]  # type: ignore[operator]
    for each in (end for pair in pairs for end in pair):
        each.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_in_float32_and_have_the_same_sums_to_the_bit(size: int) -> None:
    parts = torch.randn(size, 5, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    residual = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)

    def add(ranks: NodeRanks) -> torch.Tensor:
        return ranks.all_reduce(parts[ranks.rank.index].clone(), residual.clone(), 0.5)

    first, *others = over_ranks(size, add)
    right = (residual.double() + 0.5 * parts.double().sum(0)).to(torch.bfloat16)
    torch.testing.assert_close(first, right, rtol=8e-3, atol=1e-5)  # a bit of bfloat16, where float32 rounds otherwise
    assert (first == right).float().mean() > 0.99, "each sum would be rounded twice in bfloat16"
    assert all(torch.equal(first, other) for other in others)


def test_the_first_rank_gathers_columns_of_all_ranks() -> None:
    whole = torch.arange(14.0).view(2, 7)
    starts = [0, 2, 4, 7]

    def gather(ranks: NodeRanks) -> torch.Tensor:
        index = ranks.rank.index
        return ranks.gather(whole[:, starts[index] : starts[index + 1]].contiguous(), 7)

    assert torch.equal(over_ranks(3, gather)[0], whole)


def test_where_a_rank_never_comes_the_others_give_up_after_the_limit() -> None:
    own, theirs = socket.socketpair()
    theirs.close()
    with own, store_for([Channel(own)], 1.0) as store, pytest.raises(RuntimeError):
        NodeRanks(Rank(0, 2), "127.0.0.1").meet(store, 1.0)


def test_a_store_of_rank_0_serves_others_until_each_has_met() -> None:
    own, theirs = socket.socketpair()
    with own, theirs, ThreadPoolExecutor(1) as thread:
        with store_for([Channel(own)], LIMIT_S) as store:
            assert isinstance(store, c10d.HashStore)
            remote = ChannelStore(Channel(theirs))
            remote.set("a", b"\x00\xff")
            waiting = thread.submit(remote.get, "b")
            store.set("b", "later")
            assert (bytes(store.get("a")), waiting.result(LIMIT_S)) == (b"\x00\xff", b"later")
            remote.wait(["a", "b"], timedelta(seconds=1))
            remote.close()
        Channel(theirs).send(b"of a step")
        assert Channel(own).receive(bytes) == b"of a step", "the channel is for steps again"


def worker(folder: Path, **settings: object) -> WorkerConfig:
    return settings_of(folder, **{"rank_memory": "own", "nnodes": 2, "tensor_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tensor_parallel_size": 3}, "nnodes: 2: tensor_parallel_size 3 gives them different numbers of ranks"),
        ({"tensor_parallel_size": 1}, "nnodes: 2: tensor_parallel_size 1 gives them different numbers of ranks"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "nnodes: 2 is not served with pipeline stages"),
        ({"rank_memory": "shared"}, "nnodes: 2 needs rank_memory own: machines share no memory"),
        ({"dialect_port": 0}, "nnodes: 2 is not served with dialect_port yet"),
        ({"nnodes": 65}, "nnodes: .*less than or equal to 64"),
    ],
)
def test_what_was_not_tried_on_several_machines_is_refused_by_name(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker(tmp_path, **settings)


def test_ranks_on_several_machines_are_told_apart_from_ranks_on_one() -> None:
    assert str(Degrees(4, 1, 2)) == "4 ranks on 2 nodes"
    assert Degrees(4, 1, 2).ranks_per_node == 2
