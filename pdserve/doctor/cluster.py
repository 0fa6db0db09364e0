"""Checks of a cluster, over one router's status; and of this machine's ports, where no cluster runs."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

import grpc
from google.protobuf.json_format import MessageToDict

from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.doctor.gathering import gather_listeners, gather_taken
from pdserve.doctor.machine import Finding, cluster_port_findings, failed, free_port_findings, ok, warning
from pdserve.doctor.settings import fingerprint_of
from pdserve.launch.folder import ClusterState, read_state, state_file
from pdserve.launch.plan import WORKER_ROLES
from pdserve.net.operator_client import AdminClient
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.link import ROLES

MANY_WITHOUT_HANDOFF = 100  # placements in a row
QUARANTINED_SHARE = 0.1  # of a worker's pages
SKEW_S = 2.0  # between two clocks

REFUSALS = {  # by what was wrong, as `errors.PeerFault` names it
    "secret": "give all processes the same secret; an unknown caller may have tried the port",
    "part": "give each process the certificate of what it is: router, worker or operator",
    "version": "run the same version of pdserve everywhere",
    "incarnation": "give each running worker a worker_id of its own, and keep the clocks of their machines together",
    "layout": "give all workers the same model, dtype and page_size",
    "mover": "set the same mover on all workers",
}


def cluster_checks(name: str | None, connect: Callable[[], AdminClient], model: str | None) -> Iterator[Finding]:
    """Check a cluster, over the client that `connect` returns. `name`: of a cluster of this machine, if it is one."""
    if name is not None and not state_file(name).exists():
        yield ok("cluster", f"none named {name!r} runs here")
        yield from free_port_findings(gather_taken())
        return
    try:
        client = connect()
    except ConfigError as error:
        yield failed(
            "cluster", str(error), "start it again, or name what is right with --admin, --secret-file, --identity-dir"
        )
        return
    state = None
    if name is not None:
        state = read_state(name)
        pids = {process.name: process.pid for process in state.processes if process.pid is not None}
        expected = {"router": frozenset({state.endpoint, state.admin, urlsplit(state.http).netloc} - {""})}
        yield from cluster_port_findings(gather_listeners(pids), expected)
    yield from asyncio.run(asked(client, model, state))


async def asked(router: AdminClient, model: str | None, state: ClusterState | None) -> list[Finding]:
    """Return what a router says of its cluster. `state`: what its launcher keeps running, where it is here."""
    asked_s = time.time()
    try:
        reply = await router.status_and_clock()
    except (grpc.aio.AioRpcError, ConfigError) as error:
        why = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        return [failed("router", f"{router.address}: {why}", "see that it runs, and that this machine reaches it")]
    found = [clock_finding(reply.unix_time_ms / 1e3, asked_s, time.time()), *cluster_findings(reply.status)]
    if state is not None:
        found += launched_findings(state, reply.status)
    if model is not None and (fingerprint := fingerprint_of(model)):
        found.append(model_matches(fingerprint, reply.status))
    return found


def cluster_findings(status: admin.ClusterStatus) -> Iterator[Finding]:
    """Check workers, what fits together, hand-offs, and what was counted since the router's start."""
    yield from _pools(status)
    yield from _unroutable(status)
    yield from _compatible(status)
    yield from _pairs(status)
    yield _handoffs(status)
    for worker in status.workers:
        yield from _worker(worker)
    yield from _refused(status.router_id, status.refused)


def launched_findings(state: ClusterState, status: admin.ClusterStatus) -> Iterator[Finding]:
    """Check that the workers which a launcher keeps running are attached."""
    attached = {_name(worker) for worker in status.workers}
    for process in state.processes:
        remedy = f"pdserve logs {state.name} {process.name} shows why"
        if process.role not in WORKER_ROLES:
            continue
        if process.pid is None:
            yield warning(process.name, "it has ended, and is to be started again", remedy)
        elif process.name not in attached:
            seen = f"process {process.pid} runs, and is not attached to {status.router_id}"
            yield warning(process.name, seen, f"wait if it has just begun; {remedy}")


def clock_finding(router_s: float, asked_s: float, answered_s: float) -> Finding:
    """Compare a router's clock with this machine's when it was asked, and when it had answered. Seconds since 1970."""
    ahead_s = router_s - (asked_s + answered_s) / 2
    seen = f"the router's is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    if abs(ahead_s) - (answered_s - asked_s) / 2 > SKEW_S:
        remedy = "run an NTP client on both machines: a worker that moves to a machine whose clock is behind is refused"
        return warning("clocks", seen, remedy)
    return ok("clocks", seen)


def model_matches(fingerprint: str, status: admin.ClusterStatus) -> Finding:
    """Compare the fingerprint of a model's files here with the workers' ones."""
    others = [
        worker.registration.worker_id
        for worker in status.workers
        if worker.registration.ready and not worker.registration.layout.weights_hash.startswith(f"{fingerprint} ")
    ]
    if others:
        remedy = "give all processes the same files: the tokens of one model mean nothing to another"
        return failed("same model", f"{', '.join(others)} have loaded other weights or another config", remedy)
    return ok("same model", f"the workers of {status.router_id} have loaded the files that are here")


def _name(worker: admin.WorkerStatus) -> str:
    return worker.registration.worker_id


def _in_pool(status: admin.ClusterStatus, pool: Role) -> list[admin.WorkerStatus]:
    """Return the workers of a pool on which something is placed."""
    found = []
    for worker in status.workers:
        role = ROLES.get(worker.registration.role)
        if role is not None and role.is_in(pool) and not worker.unroutable:
            found.append(worker)
    return found


def _pools(status: admin.ClusterStatus) -> Iterator[Finding]:
    if not status.workers:
        remedy = "start workers whose `routers` name this router's internal port, and look at their logs"
        yield failed("workers", f"none is attached to {status.router_id}", remedy)
        return
    for pool, work in ((Role.PREFILL, "computes prompts"), (Role.DECODE, "decodes")):
        names = [_name(worker) for worker in _in_pool(status, pool)]
        if names:
            yield ok(f"{pool} pool", ", ".join(names))
        else:
            remedy = f"start a {pool} worker, or give one the role: pdserve role WORKER {pool}"
            yield failed(f"{pool} pool", f"no worker {work}", remedy)


def _unroutable(status: admin.ClusterStatus) -> Iterator[Finding]:
    for worker in status.workers:
        if not worker.registration.ready:
            yield warning(_name(worker), f"loading, {worker.registration.load_progress:.0%}", "wait")
        elif worker.unroutable and not worker.load.draining:
            yield failed(_name(worker), f"nothing is placed on it: {worker.unroutable}", "see its log")


def _compatible(status: admin.ClusterStatus) -> Iterator[Finding]:
    """Compare what must be equal for pages to travel between two workers."""
    ready = [worker.registration for worker in status.workers if worker.registration.ready]
    differing = []
    for field, of_each in _by_field(ready).items():
        if len(of_each) > 1:
            shown = "; ".join(f"{value}: {', '.join(names)}" for value, names in sorted(of_each.items()))
            differing.append(f"{field} ({shown})")
    if differing:
        equal = "one model, dtype and page_size"
        remedy = f"run one version with {equal} on all workers that shall exchange pages"
        yield failed("compatibility", ", ".join(differing), remedy)
    elif ready:
        dtypes = " and ".join(sorted({worker.layout.dtype for worker in ready}))
        pages = f"pages of {ready[0].layout.page_size} tokens"
        seen = f"protocol {ready[0].protocol_version}, {dtypes}, {pages} on all workers"
        yield ok("compatibility", seen)


def _by_field(workers: list[link.Register]) -> dict[str, dict[str, list[str]]]:
    """Return for each field that must be equal which values there are, and whose.

    That is all of a layout but the type of K and V: senders convert pages. weights_hash has the type of computing.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        layout = MessageToDict(worker.layout, preserving_proto_field_name=True)
        layout.pop("dtype", None)
        fields = {"protocol_version": worker.protocol_version, "model": worker.model, **layout}
        for field, value in fields.items():
            found[field][str(value)].append(worker.worker_id)
    return found


def _pairs(status: admin.ClusterStatus) -> Iterator[Finding]:
    for prefill in _in_pool(status, Role.PREFILL):
        measured = {pair.decode_worker_id: pair for pair in prefill.pairs}
        for decode in _in_pool(status, Role.DECODE):
            if decode is prefill or prefill.registration.role == decode.registration.role:
                continue  # mixed workers measure their way to each other only once they need it
            name, pair = f"{_name(prefill)} -> {_name(decode)}", measured.get(_name(decode))
            if pair is None:
                yield ok(name, "no pages have travelled yet, so that its speed is not known")
                continue
            seen = f"{pair.bytes_per_s / 1e6:.0f} MB/s, a page in {pair.page_us} us, carrier: {pair.carrier}"
            if pair.is_slow:
                remedy = "set handoff_rdma_devices where there is RDMA, and see that /dev/shm is large enough"
                yield warning(name, f"slow: {seen}", remedy)
            else:
                yield ok(name, seen)


def _handoffs(status: admin.ClusterStatus) -> Finding:
    count, because = status.num_without_handoff, status.without_handoff_because
    if not count:
        return ok("hand-offs", "the last placement has one, or there was none")
    seen = f"none in the last {count} placements; the last one: {because}"
    if count < MANY_WITHOUT_HANDOFF or not _in_pool(status, Role.PREFILL):
        return ok("hand-offs", seen)
    remedy = "nothing where prompts are short. Else see that pairs are fast, and that handoff_address can be reached"
    return warning("hand-offs", seen, remedy)


def _worker(worker: admin.WorkerStatus) -> Iterator[Finding]:
    name, load = _name(worker), worker.load
    if load.pages_leaked:
        yield failed(name, f"{load.pages_leaked} pages leaked: a defect of pdserve", "report it, with the worker's log")
    if load.pages_quarantined > QUARANTINED_SHARE * worker.registration.num_pages:
        seen = f"{load.pages_quarantined} of {worker.registration.num_pages} pages are in quarantine"
        remedy = "report ends of processes to the routers: `up`, the autoscaler and `watch-pods` do"
        yield warning(name, f"{seen}, for lost peers may still write there", remedy)
    if load.failed_steps:
        yield failed(
            name, f"its last {load.failed_steps} steps failed", "see its log; restart it where its device fails"
        )
    if load.num_digest_mismatches:
        seen = f"{load.num_digest_mismatches} pages arrived damaged and were not used"
        yield warning(name, seen, "look at memory and network of both machines, and report it")
    if load.num_stalled_peers:
        yield warning(name, f"pages hardly move to {load.num_stalled_peers} peers", "look at the network between them")
    yield from _refused(name, load.refused)


def _refused(name: str, refused: Mapping[str, int]) -> Iterator[Finding]:
    for kind, count in sorted(refused.items()):
        remedy = REFUSALS.get(kind, "run the same version everywhere; a stranger may have tried the port")
        yield warning(name, f"refused {count} messages since its start: {kind}", remedy)
