"""docs/handoff.md says what each half does on every event in every state; the halves do exactly that."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from capsules import capsule

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Generation, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.decode_worker import receiver as r
from pdserve.kvtransfer.doors import (
    CopyStopped,
    DigestsChecked,
    PeerGone,
    ReceiverLost,
    RequestEnded,
    SenderAttached,
    SenderLost,
)
from pdserve.kvtransfer.session import Commit, Grant, PagesLanded, Quiesced, Taken, Withdrawn
from pdserve.prefill_worker import sender as s
from pdserve.protocol.paging import PageOrder, Paging
from pdserve.protocol.reports import Failure

DOCUMENT = (Path(__file__).parents[2] / "docs" / "handoff.md").read_text()

PEER = Peer(WorkerId("p0"), Incarnation(1))
KEY = AttemptKey(RequestId(bytes(16)), Attempt(0))
GRANT = Grant(0, (PageId(8), PageId(9)), (Generation(1), Generation(4)), b"c" * 16, 4.0)
CAPSULE = capsule(40, (0, 7))
COMMIT = Commit(GRANT.capability, CAPSULE)
WRITTEN = PagesLanded((21,))
ATTACHED, GRANTED = SenderAttached(PEER), GRANT
READY, DONE = s.PagesReady((PageId(3),)), s.PrefillDone(CAPSULE)
LANDED, FAILED, DOUBTED = CopyStopped((5,)), CopyStopped(None, "error"), CopyStopped(None, "error", True)

Half = r.Receiver | s.Sender
Event = r.Event | s.Event
RECEIVER_STATES: dict[str, Sequence[r.Event]] = {
    "RESERVED": (),
    "GRANTED": (ATTACHED, WRITTEN),
    "LANDING": (ATTACHED, WRITTEN, COMMIT),
    "COMMITTED": (ATTACHED, WRITTEN, COMMIT, DigestsChecked(KEY, None)),
    "QUARANTINED": (ATTACHED, WRITTEN, RequestEnded("cancelled")),
    "FREE": (RequestEnded("cancelled"),),
}
RECEIVER_EVENTS: dict[str, r.Event] = {
    "the sender's stream stands, or its lease begins anew": ATTACHED,
    "`Landed`": WRITTEN,
    "`Landed`, of more pages than were granted": PagesLanded((21, 22, 23)),
    "`Commit`, right": COMMIT,
    "`Commit`, for anything but the grant": replace(COMMIT, capability=b"x" * 16),
    "digests agree": DigestsChecked(KEY, None),
    "a digest differs": DigestsChecked(KEY, 0),
    "the request has ended here": RequestEnded("cancelled"),
    "`Quiesced`": Quiesced("no copy"),
    "the stream has ended": SenderLost(PEER, "cut"),
    "the lease has lapsed": r.LeaseLapsed("silent"),
    "the sender's process has ended": PeerGone(PEER),
}
SENDER_STATES: dict[str, Sequence[s.Event]] = {
    "COMPUTING": (),
    "OFFERED": (READY, READY, DONE),
    "SENDING": (GRANTED, READY),
    "LANDED": (READY, READY, DONE, GRANTED, CopyStopped((5, 6))),
    "DRAINING": (GRANTED, READY, RequestEnded("cancelled")),
    "CLOSED": (RequestEnded("cancelled"),),
    "IN_DOUBT": (GRANTED, READY, DOUBTED),
}
SENDER_EVENTS: dict[str, s.Event] = {
    "more pages are final": READY,
    "the prompt is done": DONE,
    "`Grant`": GRANTED,
    "a copy has landed": LANDED,
    "a copy has failed": FAILED,
    "a copy has failed, in doubt": DOUBTED,
    "`Taken`": Taken(),
    "`Withdrawn`": Withdrawn("cancelled"),
    "the request has ended here": RequestEnded("cancelled"),
    "the stream has ended": ReceiverLost(PEER, "cut"),
    "this process was silent for its lease": s.FellSilent(4.0),
}


def reached(half: Half, path: Sequence[Event]) -> Half:
    for event in path:
        half.handle(event)
    return half


def cell(half: Half, event: Event) -> str:
    """Return what a half does on an event, in the words of the tables."""
    before = half.state
    try:
        commands = half.handle(event)
    except ProtocolError:
        assert half.state is before
        return "refused"
    done = ", ".join(type(command).__name__ for command in commands)
    moved = f"→ {half.state.name}" if half.state is not before else ""
    return " ".join(part for part in (done, moved) if part) or "-"


def table(
    states: Mapping[str, Sequence[Event]], events: Mapping[str, Event], new_half: Callable[[], Half]
) -> list[list[str]]:
    """Return what halves do on each event in each state, reached from new ones."""
    rows = [["event", *states]]
    for name, event in events.items():
        row = [name]
        for state, path in states.items():
            half = reached(new_half(), path)
            assert half.state.name == state
            row.append(cell(half, event))
        rows.append(row)
    return rows


RECEIVER_TABLE = table(RECEIVER_STATES, RECEIVER_EVENTS, lambda: r.Receiver(KEY, GRANT, PageOrder(Paging.of(64), 0)))
SENDER_TABLE = table(SENDER_STATES, SENDER_EVENTS, lambda: s.Sender(PEER, KEY))


def tables(document: str) -> list[list[list[str]]]:
    """Return every table of a page as rows of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", document, re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in block.split("\n") if row] for block in blocks
    ]


@pytest.mark.parametrize("table", [RECEIVER_TABLE, SENDER_TABLE], ids=["receiver", "sender"])
def test_a_half_does_on_every_event_in_every_state_what_the_page_says(table: list[list[str]]) -> None:
    written = [rows for rows in tables(DOCUMENT) if rows[0] == table[0]]
    assert len(written) == 1
    assert [written[0][0], *written[0][2:]] == table


def test_the_page_names_every_refusal_and_every_failure() -> None:
    for refusal in PeerFault:
        assert f"`{refusal.value}`" in DOCUMENT
    for code in Failure:
        assert f"`{code.name}`" in DOCUMENT
