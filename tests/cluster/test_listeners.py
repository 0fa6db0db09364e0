"""Every socket of a running cluster listens on an address that its configuration names."""

from pathlib import Path

import psutil
from live_cluster import greedy, live_cluster
from model_zoo import write_model

FLAGS = ("--dtype", "float32", "--num-pages", "100", "--prefill", "2", "--decode", "2")


def test_every_process_of_a_local_cluster_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    with live_cluster(tmp_path, write_model("llama3", tmp_path / "llama3"), *FLAGS) as cluster:
        cluster.generate_all([greedy([seed, *range(5, 60)], 5) for seed in range(3, 11)])
        parent = psutil.Process(cluster.process.pid)
        listening = {each.pid: listens_on(each) for each in (parent, *parent.children(recursive=True))}
    assert sum(map(bool, listening.values())) == 5  # a router and four workers
    assert set().union(*listening.values()) == {"127.0.0.1"}


def listens_on(process: psutil.Process) -> set[str]:
    """Return the addresses on which a process listens; gRPC's are IPv6 sockets, even of IPv4 addresses."""
    found = process.net_connections("tcp")
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}
