"""Which sockets the processes of a cluster listen on."""

from urllib.parse import urlsplit

import grpc
import psutil
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from live_cluster import LiveCluster

from pdserve.launch.plan import WORKER_ROLES
from pdserve.net.rpc import join_address, split_address

LISTENERS = {
    "router": {"public", "http", "internal", "metrics", "health"},
    "frontend": {"public", "http", "metrics", "health"},
    "worker": {"handoff", "metrics", "health", "mover"},
    "launcher": {"launcher"},
}
"""What each process listens on, as docs/operate.md has it; the mover's port is UCX's own."""

OF_CLIENTS = {"public", "http"}  # frontends have these in the router's place where there are any


def listening(pid: int) -> set[tuple[str, str]]:
    """Return host and port of each TCP socket that a process listens on; gRPC's are IPv6 sockets, even of IPv4."""
    found = psutil.Process(pid).net_connections("inet")
    assert all(each.status == psutil.CONN_LISTEN or each.raddr for each in found), f"open to all: {found}"
    bound = (each.laddr for each in found if each.status == psutil.CONN_LISTEN)
    return {(each.ip.removeprefix("::ffff:"), str(each.port)) for each in bound}


def assert_listens_where_it_says(cluster: LiveCluster) -> None:
    """Fail unless each process of a cluster listens on the ports of the table alone, all on loopback."""
    state, status = cluster.state, {each.registration.worker_id: each for each in cluster.status().workers}
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    assert {each.pid for each in children} == {process.pid for process in state.processes}
    serving = "frontend" if any(process.role == "frontend" for process in state.processes) else "router"
    known = {cluster.process.pid: {state.launcher}}
    for process in state.processes:
        addresses = {process.metrics_address}
        if process.role == "router":
            addresses.add(state.admin)
        if process.role == serving:
            addresses |= {state.endpoint, urlsplit(state.http).netloc}
        if process.role in WORKER_ROLES:
            addresses.add(status[process.name].registration.handoff_address)
        known[cluster.pid_of(process.name)] = addresses
    counts = {cluster.pid_of(process.name): num_ports(process.role, serving) for process in state.processes}
    for pid, addresses in known.items():
        found = listening(pid)
        assert {host for host, _ in found} == {"127.0.0.1"}
        said = {split_address(address) for address in addresses}
        assert said <= found, f"{pid}: {said - found} of {found}"
        assert len(found) == counts.get(pid, len(LISTENERS["launcher"]))
        if pid in counts:
            assert sum(shows_health(*at) for at in found - said) == 1


def shows_health(host: str, port: str) -> bool:
    """Return whether a port answers probes; the mover's answers nothing."""
    with grpc.insecure_channel(join_address(host, int(port))) as channel:
        try:
            shown = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="live"), timeout=5)
        except grpc.RpcError:
            return False
        return shown.status == health_pb2.HealthCheckResponse.SERVING


def num_ports(role: str, serving: str) -> int:
    """Return how many ports a process of a role has, where those of role `serving` serve clients."""
    ports = LISTENERS["worker" if role in WORKER_ROLES else role]
    return len(ports if role in WORKER_ROLES or role == serving else ports - OF_CLIENTS)
