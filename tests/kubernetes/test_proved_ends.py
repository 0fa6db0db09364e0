"""A process is reported only once it cannot run any more."""

import signal
from typing import Any

import msgspec
import pytest

from pdserve.base.ids import Incarnation
from pdserve.base.processes import DRAIN_TIMED_OUT_STATUS, STOP_SIGNALS, exit_status
from pdserve.base.roles import Role
from pdserve.kubernetes.ends import GAP_S, MARGIN_S, MAX_GONE, Ended, Ends
from pdserve.kubernetes.objects import Pod
from pdserve.launch.plan import ChildSpec
from pdserve.launch.supervisor import ChildExit

GRACE_S = 30.0
NEEDED_S = GRACE_S + MARGIN_S


def pod(uid: str = "u1", *, last: dict[str, Any] | None = None, state: dict[str, Any] | None = None) -> Pod:
    container = {
        "name": "worker",
        "state": {"terminated": state} if state else {"running": {}},
        "lastState": {"terminated": last} if last else {},
    }
    return msgspec.convert(
        {
            "metadata": {"name": f"pod-{uid}", "uid": uid},
            "spec": {"nodeName": "node-a", "terminationGracePeriodSeconds": int(GRACE_S)},
            "status": {"phase": "Running", "containerStatuses": [container]},
        },
        Pod,
    )


def ended(incarnation: int, code: int = 0, reason: str = "Completed") -> dict[str, Any]:
    return {"exitCode": code, "reason": reason, "message": f"{incarnation}\n"}


def running(*incarnations: int) -> Ends:
    ends = Ends()
    ends.listed([pod()], 0.0)
    for incarnation in incarnations:
        ends.attached(incarnation, "u1")
    return ends


def answer(ends: Ends, from_s: float, until_s: float) -> list[Ended]:
    """Let the node renew its Lease each ten seconds."""
    found, at_s = [], from_s
    while at_s <= until_s:
        found += ends.proved(ends.asked("node-a", f"at {at_s}", is_ready=True, at_s=at_s))
        at_s += 10.0
    return found


def test_a_terminated_container_names_its_process_once() -> None:
    ends = running(5)
    assert ends.changed(pod(state=ended(5))) == [Ended("pod-u1", 5, from_outside=True)]
    assert ends.changed(pod(last=ended(5))) == []
    assert ends.changed(pod(last=ended(5), state=ended(9, 1))) == [Ended("pod-u1", 9, from_outside=False)]


@pytest.mark.parametrize("status", [0, DRAIN_TIMED_OUT_STATUS, *map(exit_status, (*STOP_SIGNALS, signal.SIGKILL))])
def test_a_drain_and_each_signal_that_stops_a_process_count_as_from_outside(status: int) -> None:
    assert running(5).changed(pod(state=ended(5, status))) == [Ended("pod-u1", 5, from_outside=True)]
    assert ChildExit(ChildSpec("w", Role.DECODE, ()), Incarnation(1), status, None).from_outside, "a launcher's view"


def test_processes_before_one_that_has_ended_in_the_same_pod_have_ended_too() -> None:
    ends = running(5, 6)
    assert ends.changed(pod(last=ended(7, 137, "OOMKilled"))) == [
        Ended("pod-u1", 5, from_outside=True),
        Ended("pod-u1", 6, from_outside=True),
        Ended("pod-u1", 7, from_outside=False),
    ]


def test_messages_that_name_no_process_prove_nothing() -> None:
    for message in ("", "the container could not be located", "-3", "0", str(2**64), "5 6"):
        state = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": message}
        assert running(5).changed(pod(state=state)) == []


def test_the_last_state_of_a_removed_pod_counts() -> None:
    ends = running(5)
    assert ends.removed(pod(state=ended(5)), 1.0) == [Ended("pod-u1", 5, from_outside=True)]
    assert ends.nodes == set()


def test_a_pod_removed_from_a_node_that_answers_on_and_on_proves_the_end() -> None:
    ends = running(5)
    assert ends.removed(pod(), 100.0) == []
    assert ends.nodes == {"node-a"}
    assert answer(ends, 101.0, 100.0 + NEEDED_S) == []
    assert answer(ends, 100.0 + NEEDED_S + 1, 100.0 + NEEDED_S + 20) == [Ended("pod-u1", 5, from_outside=True)]
    assert ends.num_unproved == 0


def test_a_node_that_is_lost_proves_nothing_for_ever() -> None:
    ends = running(5)
    ends.removed(pod(), 100.0)
    for at_s in range(101, 100_000, 100):
        assert ends.asked("node-a", "of yesterday", is_ready=True, at_s=float(at_s)) == set()
    assert ends.num_unproved == 1


def test_a_node_that_comes_back_needs_the_time_to_end_what_it_still_runs() -> None:
    ends = running(5)
    ends.removed(pod(), 100.0)
    answer(ends, 101.0, 120.0)  # and then it is cut off
    back_s = 100_000.0
    assert answer(ends, back_s, back_s + NEEDED_S - 1) == []
    assert answer(ends, back_s + NEEDED_S, back_s + NEEDED_S + 20) == [Ended("pod-u1", 5, from_outside=True)]


def test_a_gap_or_a_node_that_is_not_ready_begins_the_time_anew() -> None:
    for is_ready in (True, False):
        ends = running(5)
        ends.removed(pod(), 100.0)
        answer(ends, 101.0, 150.0)
        at_s = 150.0 + (GAP_S + 5 if is_ready else 5)
        assert ends.asked("node-a", f"at {at_s}", is_ready=is_ready, at_s=at_s) == set()
        assert answer(ends, at_s + 10, at_s + NEEDED_S - 5) == []


def test_a_pod_that_a_list_had_left_out_is_not_gone() -> None:
    ends = running(5)
    ends.listed([], 100.0)
    answer(ends, 101.0, 100.0 + NEEDED_S)
    ends.listed([pod()], 100.0 + NEEDED_S)
    assert answer(ends, 100.0 + NEEDED_S + 1, 100.0 + 3 * NEEDED_S) == []
    assert ends.num_unproved == 0


def test_a_node_without_an_object_proves_nothing() -> None:
    ends = running(5)
    ends.removed(pod(), 100.0)
    for at_s in range(101, 1_000, 10):
        assert ends.asked("node-a", "", is_ready=False, at_s=float(at_s)) == set()


def test_a_node_whose_machine_is_off_proves_the_ends_of_the_pods_that_were_removed_from_it() -> None:
    ends = running(5)
    assert ends.off("node-a") == set()
    ends.listed([pod("u2")], 100.0)
    assert ends.off("node-b") == set()
    assert ends.proved(ends.off("node-a")) == [Ended("pod-u1", 5, from_outside=True)]


def test_what_a_node_answered_before_a_pod_was_removed_does_not_count_for_it() -> None:
    ends = running(5)
    ends.listed([pod("u2")], 100.0)  # u1 is gone
    ends.attached(7, "u2")
    answer(ends, 101.0, 150.0)
    ends.removed(pod("u2"), 155.0)
    assert answer(ends, 156.0, 156.0 + GRACE_S) == [Ended("pod-u1", 5, from_outside=True)]
    assert ends.num_unproved == 1


def test_a_process_of_another_namespace_or_a_pod_that_was_never_seen_is_not_kept() -> None:
    ends = Ends()
    ends.attached(5, "elsewhere")
    ends.attached(5, "")
    assert ends.listed([], 1.0) == []
    assert ends.num_unproved == 0


def test_pods_without_a_proof_are_kept_up_to_a_bound() -> None:
    ends = Ends()
    for number in range(MAX_GONE + 10):
        uid = f"u{number}"
        ends.listed([pod(uid)], float(number))
        ends.attached(5, uid)
    ends.listed([], 1e6)
    assert ends.num_unproved == MAX_GONE
