"""A worker of several pods has ended once its process has in each of them, whatever the order."""

from itertools import permutations
from typing import Any

import msgspec
import pytest

from pdserve.kubernetes.ends import MARGIN_S, Ended, Ends
from pdserve.kubernetes.objects import LEADER, NODES, Pod

GRACE_S = 30.0
WORKER = "decode-0.u0.0000000000000005"  # no process of a group has the name of another one


def pod(place: int, code: int | None = None, incarnation: int = 5, uid: str = "") -> Pod:
    """Return the pod at a place of a group of three; code: its container has ended with it."""
    terminated = {"exitCode": code, "reason": "Error", "message": f"{incarnation}\n"}
    leader = {LEADER: "decode-0"} if place else {}
    content: dict[str, Any] = {
        "metadata": {
            "name": f"decode-0-{place}" if place else "decode-0",
            "uid": uid or f"u{place}",
            "annotations": {NODES: "3", **leader},
        },
        "spec": {"nodeName": f"node-{place}", "terminationGracePeriodSeconds": int(GRACE_S)},
        "status": {"containerStatuses": [{"state": {"running": {}} if code is None else {"terminated": terminated}}]},
    }
    return msgspec.convert(content, Pod)


def serving() -> Ends:
    """Return what is known of a group whose process 5 is attached to a router."""
    ends = Ends()
    ends.listed([pod(place) for place in range(3)], 0.0)
    ends.attached(5, "u0")
    return ends


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_process_of_several_pods_is_reported_with_the_last_of_its_ends(order: tuple[int, ...]) -> None:
    ends = serving()
    *before, last = order
    assert [each for place in before for each in ends.changed(pod(place, 71))] == []
    assert ends.changed(pod(last, 71)) == [Ended(WORKER, 5, from_outside=False)]
    assert ends.changed(pod(last, 71)) == [], "it is reported once"


def test_it_ended_from_outside_if_one_of_its_pods_did() -> None:
    ends = serving()
    assert ends.changed(pod(1, 137)) == []  # a signal's; the others end because of it
    assert ends.changed(pod(0, 71)) == []
    assert ends.changed(pod(2, 71)) == [Ended(WORKER, 5, from_outside=True)]


def answer(ends: Ends, node: str, until_s: float) -> list[Ended]:
    """Let a node renew its Lease each ten seconds."""
    found, at_s = [], 1.0
    while at_s <= until_s:
        found += ends.proved(ends.asked(node, f"at {at_s}", is_ready=True, at_s=at_s))
        at_s += 10.0
    return found


@pytest.mark.parametrize("removed", [0, 1])
def test_a_pod_that_was_removed_counts_once_its_node_has_proved_that(removed: int) -> None:
    ends = serving()
    assert ends.removed(pod(removed), 0.0) == []
    others = [place for place in range(3) if place != removed]
    assert [each for place in others for each in ends.changed(pod(place, 71))] == []
    assert ends.nodes == {f"node-{removed}"}
    assert answer(ends, f"node-{removed}", GRACE_S + MARGIN_S - 10.0) == []
    assert answer(ends, f"node-{removed}", GRACE_S + MARGIN_S + 30.0) == [Ended(WORKER, 5, from_outside=True)]


def test_a_lost_pod_whose_process_was_not_seen_keeps_the_whole_process_unproved() -> None:
    ends = Ends()
    ends.listed([pod(place) for place in range(3)], 0.0)  # it began after the process had attached, and it is gone
    assert ends.removed(pod(2), 0.0) == []
    assert [each for place in (0, 1) for each in ends.changed(pod(place, 71))] == []
    assert ends.proved({"u2"}) == []


def test_ends_of_a_later_process_of_the_same_names_do_not_complete_those_of_an_earlier_one() -> None:
    ends = serving()
    for place in (0, 1):
        assert ends.removed(pod(place, 71), 0.0) == []
    assert ends.removed(pod(2), 0.0) == [], "its node is silent"
    again = [pod(place, uid=f"v{place}") for place in range(3)]
    assert [each for one in again for each in ends.changed(one)] == []
    ends.attached(9, "v0")
    later = [ends.changed(pod(place, 71, 9, f"v{place}")) for place in range(3)]
    assert later == [[], [], [Ended("decode-0.v0.0000000000000009", 9, from_outside=False)]]
    assert ends.proved({"u2"}) == [Ended(WORKER, 5, from_outside=True)]


def test_a_pod_that_takes_the_name_of_a_lost_one_is_no_part_of_the_process_that_ran_there() -> None:
    ends = serving()
    assert [each for place in (0, 1, 2) for each in ends.removed(pod(place), 0.0)] == []
    again = [pod(place, uid=f"v{place}") for place in range(3)]
    assert [each for one in again for each in ends.changed(one)] == []
    ends.attached(5, "u0")  # a router is cut off, and still has it
    assert [each for place in (1, 2) for each in ends.changed(pod(place, 71, 9, f"v{place}"))] == []
    assert ends.proved({"u0"}) == [], "u1 and u2 are on silent nodes, and may still write"
    assert ends.proved({"u1"}) == []
    assert ends.proved({"u2"}) == [Ended(WORKER, 5, from_outside=True)]


def test_a_pod_that_left_before_all_had_joined_and_joined_again_counts_once() -> None:
    ends = Ends()
    ends.listed([pod(place) for place in range(3)], 0.0)
    assert ends.changed(pod(1, 1, 4)) == []  # of an earlier process; its container runs again
    assert ends.changed(pod(1)) == []
    ends.attached(5, "u0")
    assert [each for place in (0, 2) for each in ends.changed(pod(place, 71))] == []
    assert ends.changed(pod(1, 71)) == [Ended(WORKER, 5, from_outside=False)]
