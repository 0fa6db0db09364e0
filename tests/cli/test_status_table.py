"""The state's table has every number that an operator needs, and says why a worker gets nothing."""

import re

from cluster_states import printed

from pdserve.cli.status import render
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link


def shown(status: admin.ClusterStatus) -> str:
    return printed(render(status))


def row(text: str, name: str) -> list[str]:
    """Return the cells of a worker's row."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r" {2,}", line.strip())


def test_a_workers_pages_sequences_and_requests_stand_in_its_row() -> None:
    load = link.Heartbeat(
        pages_free=1,
        pages_cached=2,
        pages_held=3,
        pages_granted=4,
        pages_quarantined=5,
        num_running=6,
        num_waiting=7,
    )
    registration = link.Register(worker_id="decode-0", role=link.ROLE_DECODE, ready=True)
    worker = admin.WorkerStatus(registration=registration, load=load, num_assigned=8)
    text = shown(admin.ClusterStatus(workers=[worker]))
    assert row(text, "decode-0") == ["decode-0", "decode", "ready", "1 / 2 / 3 / 4 / 5", "6 / 7", "8"]


def test_the_state_says_what_keeps_a_worker_from_serving() -> None:
    loading = link.Register(worker_id="a", role=link.ROLE_PREFILL, load_progress=0.5)
    draining = link.Register(worker_id="b", role=link.ROLE_PREFILL, ready=True)
    unroutable = link.Register(worker_id="c", role=link.ROLE_PREFILL, ready=True)
    failing = link.Register(worker_id="d", role=link.ROLE_PREFILL, ready=True)
    workers = [
        admin.WorkerStatus(registration=loading),
        admin.WorkerStatus(registration=draining, load=link.Heartbeat(draining=True)),
        admin.WorkerStatus(registration=unroutable, unroutable="page_size: 16 != 32"),
        admin.WorkerStatus(registration=failing, load=link.Heartbeat(failed_steps=3)),
    ]
    text = shown(admin.ClusterStatus(workers=workers))
    states = [row(text, name)[2] for name in ("a", "b", "c", "d")]
    assert states == ["loading 50%", "draining", "unroutable: page_size: 16 != 32", "its last 3 steps failed"]


def test_a_role_that_has_changed_is_shown_with_its_epoch() -> None:
    registration = link.Register(worker_id="a", role=link.ROLE_MIXED, role_epoch=3, ready=True)
    assert row(shown(admin.ClusterStatus(workers=[admin.WorkerStatus(registration=registration)])), "a")[1] == (
        "mixed (epoch 3)"
    )


def test_requests_are_counted_by_how_they_ended() -> None:
    status = admin.ClusterStatus(num_active=1, num_held=2, ended={"UNAVAILABLE": 3, "OK": 4}, num_replaced=5)
    assert "requests: 1 active, 2 held; ended: 4 OK, 3 UNAVAILABLE; placed again: 5" in shown(status)


def test_the_slowest_pairs_are_shown_with_what_carries_them() -> None:
    slow = link.PairMeasured(
        decode_worker_id="decode-1", bytes_per_s=2 * 10**8, page_us=90, carrier="tcp", is_slow=True
    )
    fast = link.PairMeasured(decode_worker_id="decode-0", bytes_per_s=5 * 10**9, page_us=70, carrier="not tcp")
    registration = link.Register(worker_id="prefill-0", role=link.ROLE_PREFILL, ready=True)
    text = shown(admin.ClusterStatus(workers=[admin.WorkerStatus(registration=registration, pairs=[fast, slow])]))
    assert text.splitlines()[-2:] == [
        "SLOW prefill-0 -> decode-1: 200 MB/s, a page in 90 us, carrier: tcp",
        "prefill-0 -> decode-0: 5000 MB/s, a page in 70 us, carrier: not tcp",
    ]
