"""Messages of the control stream: what a peer may not say is named."""

import pytest
from capsules import capsule

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Generation, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.session import Commit, Grant, Hello, Introduction, Withdrawn
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.reports import Stage
from pdserve.worker.messages import Progress, RouterRef
from pdserve.worker.wire import step_report

KEY = AttemptKey(RequestId(b"r" * 16), Attempt(2**32 - 1))
GRANT = Grant(3, (PageId(2**32 - 1), PageId(0)), (Generation(2**64 - 1), Generation(0)), b"c" * 16, 4.0)


LAYOUT = KvLayout("w", 4, 2, 64, 16, "bfloat16", others=(KvGroup("window", 16, 2, 64, 4, window=512),))
BYTES_OF_HELLO = (
    "0a480a01701007180b22340a01771004180220402810320862666c6f617431364a04787868"
    "3352150a0677696e646f771010180220402804308004380258022a046e69786c380940e807"
)


def grant() -> handoff.HandoffServiceAttachResponse:
    return wire.from_receiver(KEY, GRANT)


def test_a_grant_of_the_largest_numbers_comes_back_unchanged() -> None:
    key, event = wire.to_sender(grant())
    assert key == KEY
    assert event == GRANT


def test_a_hello_has_the_bytes_that_peers_of_its_version_read() -> None:
    hello = Hello(Introduction(Peer(WorkerId("p"), Incarnation(7)), LAYOUT), "nixl", Incarnation(9), 1.0)
    found = wire.hello_to_proto(hello).SerializeToString(deterministic=True).hex()
    assert found == BYTES_OF_HELLO, "give PROTOCOL_VERSION a new number, and then note the bytes here"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pages", []),
        ("pages", [4, 4]),
        ("generations", [1]),
        ("first_page", wire.MAX_PAGES + 1),
        ("capability", b"c" * 15),
        ("capability", b""),
        ("lease_ms", 999),
    ],
)
def test_a_false_grant_is_refused_and_the_field_named(field: str, value: list[int] | int | bytes) -> None:
    message = grant()
    message.grant.ClearField(field)
    message.grant.MergeFrom(handoff.Grant(**{field: value}))
    with pytest.raises(ProtocolError, match=field):
        wire.to_sender(message)


def test_a_grant_of_more_pages_than_any_hand_off_has_is_refused() -> None:
    message = grant()
    message.grant.pages.extend(range(1, wire.MAX_PAGES + 1))
    with pytest.raises(ProtocolError, match=r"pages: 1048578 named"):
        wire.to_sender(message)


@pytest.mark.parametrize(
    "message",
    [
        handoff.HandoffServiceAttachResponse(),
        handoff.HandoffServiceAttachResponse(hello_ack=handoff.HelloAck()),
        handoff.HandoffServiceAttachResponse(taken=handoff.Taken(handoff=handoff.HandoffId(request_id=b"r" * 17))),
        handoff.HandoffServiceAttachResponse(withdrawn=handoff.Withdrawn()),
    ],
)
def test_a_message_that_names_no_hand_off_is_refused(message: handoff.HandoffServiceAttachResponse) -> None:
    with pytest.raises(ProtocolError, match=r"message|request_id"):
        wire.to_sender(message)


def test_whatever_a_commit_tells_for_the_ledger_can_be_told_to_routers() -> None:
    commit = Commit(GRANT.capability, capsule(9, (0, 1)))
    message = wire.from_sender(KEY, commit)
    message.commit.handoff_us = 2**64 - 1
    _, event = wire.to_receiver(message)
    assert isinstance(event, Commit)
    landed = Progress(RouterRef(1), KEY, Stage.LANDED, 0.0, handoff_s=event.handoff_s)
    (progress,) = step_report((), (), (landed,), (), 0.0).step.progress
    assert progress.handoff_us == wire.MAX_REPORTED


def test_a_reason_is_cut_on_both_ends() -> None:
    message = wire.from_receiver(KEY, Withdrawn("x" * 10_000))
    assert len(message.withdrawn.reason) == wire.MAX_REASON_CHARS
    message.withdrawn.reason = "y" * 10_000
    _, event = wire.to_sender(message)
    assert event == Withdrawn("y" * wire.MAX_REASON_CHARS)
