"""Prompts that hold pages before they are granted any leave room for others, and start as soon as they have room."""

from lone_core import PAGE_SIZE, VOCAB, LoneCore, job

from pdserve.base.ids import Incarnation, Peer, WorkerId

PEER = Peer(WorkerId("decode"), Incarnation(1))


def test_a_prompt_that_waits_for_room_starts_with_the_step_after_the_one_that_made_it() -> None:
    worker = LoneCore(ends=frozenset(range(VOCAB)))
    for number in range(2):  # six pages are left for prompts without a grant: one of these fits
        worker.place(job(number, 5 * PAGE_SIZE), target=PEER)
    for _ in range(2):  # nothing else happens that would start the second one
        worker.step()  # its first token ends it
    assert worker.core.idle
