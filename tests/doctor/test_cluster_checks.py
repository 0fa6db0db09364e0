"""Each check of a cluster, over what a router might say."""

from collections.abc import Callable

import pytest
from cluster_states import cluster_state

from pdserve.doctor.cluster import clock_finding, cluster_findings, launched_findings, model_matches
from pdserve.doctor.machine import Finding, Level
from pdserve.launch.folder import ProcessState
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

LAYOUT = link.KvLayout(weights_hash="abc auto 0", num_layers=2, dtype="bfloat16", page_size=16)


def worker(name: str, role: "link.Role.ValueType") -> admin.WorkerStatus:
    registration = link.Register(
        worker_id=name, role=role, protocol_version=1, ready=True, model="m", layout=LAYOUT, num_pages=100
    )
    return admin.WorkerStatus(registration=registration)


def sound() -> admin.ClusterStatus:
    prefill, decode = worker("p0", link.ROLE_PREFILL), worker("d0", link.ROLE_DECODE)
    prefill.pairs.add(decode_worker_id="d0", bytes_per_s=10**10, page_us=30, carrier="not tcp")
    return admin.ClusterStatus(router_id="r0", model="m", workers=[prefill, decode])


def not_ok(status: admin.ClusterStatus) -> dict[str, Finding]:
    return {finding.name: finding for finding in cluster_findings(status) if finding.level is not Level.OK}


def test_a_sound_cluster_has_nothing_to_do() -> None:
    assert not_ok(sound()) == {}


def test_a_worker_that_its_launcher_keeps_and_no_router_sees_is_named_with_its_log() -> None:
    names = ("p0", "d0", "d1", "d2")
    processes = [
        ProcessState(name=name, role="decode", pid=None if name == "d2" else 7, incarnation=1, num_restarts=0)
        for name in names
    ]
    router = ProcessState(name="router", role="router", pid=8, incarnation=1, num_restarts=0)
    found = list(launched_findings(cluster_state(processes=(router, *processes)), sound()))
    assert [finding.name for finding in found] == ["d1", "d2"]
    assert "process 7 runs, and is not attached" in found[0].seen
    assert all(f"pdserve logs tests {finding.name}" in finding.remedy for finding in found)


def no_workers(status: admin.ClusterStatus) -> None:
    del status.workers[:]


def no_decode(status: admin.ClusterStatus) -> None:
    del status.workers[1]


def strange(status: admin.ClusterStatus) -> None:
    status.workers[1].unroutable = "its layout is not that of most"


def loading(status: admin.ClusterStatus) -> None:
    status.workers[1].registration.ready, status.workers[1].unroutable = False, "it is loading"


def other_pages(status: admin.ClusterStatus) -> None:
    status.workers[1].registration.layout.page_size = 32


def other_version(status: admin.ClusterStatus) -> None:
    status.workers[1].registration.protocol_version = 2


def slow(status: admin.ClusterStatus) -> None:
    status.workers[0].pairs[0].is_slow = True


def leaking(status: admin.ClusterStatus) -> None:
    status.workers[1].load.pages_leaked = 1


def quarantined(status: admin.ClusterStatus) -> None:
    status.workers[1].load.pages_quarantined = 11


def alone(status: admin.ClusterStatus) -> None:
    status.num_without_handoff, status.without_handoff_because = 500, "d0 computes it itself: 12 ms"


def strangers(status: admin.ClusterStatus) -> None:
    status.refused["secret"] = 3


@pytest.mark.parametrize(
    ("change", "name", "level", "seen"),
    [
        (no_workers, "workers", Level.FAILED, "none is attached to r0"),
        (no_decode, "decode pool", Level.FAILED, "no worker decodes"),
        (strange, "d0", Level.FAILED, "nothing is placed on it: its layout is not that of most"),
        (loading, "d0", Level.WARNING, "loading, 0%"),
        (other_pages, "compatibility", Level.FAILED, "page_size (16: p0; 32: d0)"),
        (other_version, "compatibility", Level.FAILED, "protocol_version (1: p0; 2: d0)"),
        (slow, "p0 -> d0", Level.WARNING, "slow: 10000 MB/s, a page in 30 us, carrier: not tcp"),
        (leaking, "d0", Level.FAILED, "1 pages leaked: a defect of pdserve"),
        (quarantined, "d0", Level.WARNING, "11 of 100 pages are in quarantine"),
        (alone, "hand-offs", Level.WARNING, "none in the last 500 placements; the last one: d0 computes it itself"),
        (strangers, "r0", Level.WARNING, "refused 3 messages since its start: secret"),
    ],
)
def test_each_fault_is_found_and_comes_with_what_to_do(
    change: Callable[[admin.ClusterStatus], None], name: str, level: Level, seen: str
) -> None:
    status = sound()
    change(status)
    finding = not_ok(status)[name]
    assert finding.level is level
    assert finding.seen.startswith(seen)
    assert finding.remedy


def test_a_pair_that_no_pages_have_travelled_between_is_no_fault() -> None:
    status = sound()
    del status.workers[0].pairs[:]
    assert not_ok(status) == {}


def test_few_placements_without_a_hand_off_are_no_reason_to_warn() -> None:
    status = sound()
    status.num_without_handoff = 99
    assert not_ok(status) == {}


def test_clocks_may_differ_by_no_more_than_the_answer_took_and_two_seconds() -> None:
    assert clock_finding(1001.9, 1000.0, 1000.0).level is Level.OK
    assert clock_finding(1002.1, 1000.0, 1000.0).level is Level.WARNING
    assert clock_finding(997.9, 1000.0, 1000.0).seen == "the router's is 2.1 s behind this machine's"
    assert clock_finding(1004.0, 1000.0, 1004.0).level is Level.OK


def test_files_are_compared_with_what_the_workers_have_loaded() -> None:
    assert model_matches("abc", sound()).level is Level.OK
    other = model_matches("xyz", sound())
    assert (other.level, other.seen) == (Level.FAILED, "p0, d0 have loaded other weights or another config")
