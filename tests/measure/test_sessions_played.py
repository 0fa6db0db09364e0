"""Sessions of agents, as `pdserve bench agents` plays them."""

import asyncio
from itertools import pairwise

from pdserve.base.clock import MonotonicClock
from pdserve.measure.client import OpenLoop
from pdserve.measure.outcomes import Outcome
from pdserve.measure.sessions import Round as PlayedRound
from pdserve.measure.sessions import Shape, Way, measure_sessions, rows, sessions_of
from pdserve.proto.v1 import inference_pb2 as inference

SHAPE = Shape(sessions=6, turns=4, pause_s=0.001, branches=0.5)


class Echo(OpenLoop):
    """Answers at once with tokens that depend on the prompt; some prompts fail."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(MonotonicClock())
        self.requests: list[inference.GenerateRequest] = []
        self.fails = fails  # of every so many requests, the last

    async def vocab_size(self) -> int:
        return 1000

    async def _receive(self, request: inference.GenerateRequest, outcome: Outcome, began_s: float) -> None:
        self.requests.append(request)
        if self.fails and len(self.requests) % self.fails == 0:
            outcome.status = "UNAVAILABLE"
            return
        await asyncio.sleep(0)
        self._take(outcome, [(0, [len(request.token_ids.ids)] * request.sampling.max_tokens)], began_s)


async def test_each_prompt_goes_on_with_what_was_said_and_answered() -> None:
    client = Echo()
    taken = await PlayedRound(client, sessions_of(SHAPE, 1000, 0), Way.NAMED, SHAPE.turns).run()
    by_session: dict[str, list[list[int]]] = {}
    for request in client.requests:
        by_session.setdefault(request.session, []).append(list(request.token_ids.ids))
    assert len(by_session) == SHAPE.sessions
    prompts = [prompt for session in by_session.values() for prompt in session]
    for session in by_session.values():
        for earlier, later in pairwise(session):
            assert later[: len(earlier)] == earlier
            assert later[len(earlier)] == len(earlier)  # then comes the answer
    assert all(prompt[:512] == prompts[0][:512] for prompt in prompts)
    assert {each.number for each in taken} == {1, 2, 3, 4}
    later = [each for each in taken if each.number > 1]
    reuse = sum(each.known_tokens for each in later) / sum(each.outcome.prompt_tokens for each in later)
    assert 0.85 < reuse < 0.97


async def test_a_session_ends_with_a_turn_that_fails_and_the_table_says_so() -> None:
    client = Echo(fails=3)
    taken = await PlayedRound(client, sessions_of(SHAPE, 1000, 0), Way.UNNAMED, SHAPE.turns).run()
    assert sum(row.failures.get("UNAVAILABLE", 0) for row in rows("unnamed", taken)) == len(client.requests) // 3
    assert not any(request.session or request.prepare_next for request in client.requests)


async def test_the_ways_of_a_round_have_equal_sessions_and_tenants_of_their_own() -> None:
    client = Echo()
    found = await measure_sessions(client, SHAPE, [Way.UNNAMED, Way.PREPARED], rounds=2, seed=3)
    assert [row.name for row in found[:2]] == ["unnamed, turn 1", "unnamed, turn 2"]
    lengths: dict[str, list[int]] = {}
    for request in client.requests:
        lengths.setdefault(request.tenant, []).append(len(request.token_ids.ids))
    assert len(lengths) == 4
    assert len({tuple(sorted(each)) for each in lengths.values()}) == 2
    assert {request.prepare_next for request in client.requests if request.session} == {True}


def test_equal_seeds_give_equal_sessions_of_which_some_are_branches() -> None:
    assert sessions_of(SHAPE, 1000, 5) == sessions_of(SHAPE, 1000, 5) != sessions_of(SHAPE, 1000, 6)
    assert any(session.parent is not None for session in sessions_of(SHAPE, 1000, 5))
