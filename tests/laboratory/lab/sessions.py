"""Sessions of agents on a simulated cluster: the real router and workers, with and without names of conversations."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.base.ids import RequestId
from pdserve.capacity.cluster import SimCluster, _Router
from pdserve.capacity.leaping import OTHER
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY, Percentiles, percentiles
from pdserve.measure.sessions import Session, Turn, sessions_of
from pdserve.measure.sessions import Shape as SessionsShape
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import Profile
from pdserve.router.requests.commands import Command, End

_VOCABULARY = 1 << 30
_BLOCK = 64


@dataclass(slots=True)
class _Running:
    session: Session
    number: int  # of the session
    turn: int = 0
    history: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class SimSessions(SimCluster):
    """A simulated cluster whose clients are agents: each turn is sent a pause after the last one's end."""

    def __init__(self, profile: Profile, shape: Shape, sessions: list[Session], *, names_sessions: bool) -> None:
        longest = max(_length(sessions, number) for number in range(len(sessions)))
        workload = Workload("sessions", (Arrival(0.0, longest, 1),) * 2, block_tokens=_BLOCK, exact=True)
        super().__init__(profile, shape, "goodput", workload, ANY)
        self._sessions = [_Running(session, number) for number, session in enumerate(sessions)]
        self._names_sessions = names_sessions
        self._sent: dict[RequestId, tuple[_Running, int, int]] = {}
        self.turns: list[tuple[RequestId, int]] = []  # with their numbers in their conversations

    def play(self) -> None:
        """Serve all sessions to their ends."""
        for running in self._sessions:
            if running.session.parent is None:
                self.clock.at(running.session.begins_s, self._next, running)
        self.clock.run()
        for router in self.routers:
            router.check_idle()

    def _next(self, running: _Running) -> None:
        turn: Turn = running.session.turns[running.turn]
        running.history += turn.said
        arrival = Arrival(self.clock.now_s(), len(running.history), turn.answer_tokens)
        name = running.session.name if self._names_sessions else ""
        request_id = self._send(len(self._outcomes) + 1, arrival, tuple(running.history), name)
        self._sent[request_id] = running, turn.answer_tokens, len(running.ends)
        self.turns.append((request_id, len(running.ends) + 1))

    def _carry_out(self, router: _Router, command: Command) -> None:
        super()._carry_out(router, command)
        if isinstance(command, End):
            self._note_ended(command.request_id)

    def _note_ended(self, request_id: RequestId) -> None:
        running, num_tokens, _ = self._sent.pop(request_id)
        outcome, turn = self._outcomes[request_id], running.session.turns[running.turn]
        assert outcome.is_good, outcome
        running.history += [OTHER] * num_tokens
        running.ends.append(len(running.history))
        running.turn += 1
        for other in self._branches(running):
            other.history, other.ends = running.history.copy(), running.ends.copy()
            self.clock.at(self.clock.now_s() + turn.pause_s, self._next, other)
        if running.turn < len(running.session.turns):
            self.clock.at(self.clock.now_s() + turn.pause_s, self._next, running)

    def _branches(self, parent: _Running) -> Iterator[_Running]:
        for each in self._sessions:
            if each.session.parent == parent.number and each.session.fork_turn == len(parent.ends):
                yield each


def _length(sessions: list[Session], number: int) -> int:
    session = sessions[number]
    own = sum(len(turn.said) + turn.answer_tokens for turn in session.turns)
    if session.parent is None:
        return own
    parent = sessions[session.parent].turns[: session.fork_turn]
    return own + sum(len(turn.said) + turn.answer_tokens for turn in parent)


@dataclass(frozen=True, slots=True)
class SessionsFound:
    """What came of all turns of a round but the first ones."""

    name: str
    num_turns: int
    turns: dict[str, int]  # by what became of their homes
    ttft_1_s: Percentiles | None
    ttft_2_s: Percentiles | None
    ttft_later_s: Percentiles | None
    ttft_mean_s: float
    tpot_s: Percentiles | None
    busy_prefill_s: float
    span_s: float


def measure_sessions(
    profile: Profile, shape: Shape, sessions: SessionsShape, seed: int, *, names_sessions: bool
) -> SessionsFound:
    """Serve sessions once."""
    cluster = SimSessions(profile, shape, sessions_of(sessions, _VOCABULARY, seed), names_sessions=names_sessions)
    cluster.play()
    found = [(number, cluster._outcomes[request_id]) for request_id, number in cluster.turns]
    counts = sum((router.placements.sessions.turns for router in cluster.routers), start=Counter[str]())
    return SessionsFound(
        name="named" if names_sessions else "unnamed",
        num_turns=len(found),
        turns=dict(counts),
        ttft_1_s=percentiles(each.ttft_s for number, each in found if number == 1),
        ttft_2_s=percentiles(each.ttft_s for number, each in found if number == 2),
        ttft_later_s=percentiles(each.ttft_s for number, each in found if number > 2),
        ttft_mean_s=sum(each.ttft_s or 0.0 for number, each in found if number > 1)
        / max(1, sum(number > 1 for number, _ in found)),
        tpot_s=percentiles(each.tpot_s for _, each in found),
        busy_prefill_s=sum(w.busy_s for w in cluster.workers if str(w.peer.worker_id).startswith("p")),
        span_s=max(each.ended_s for _, each in found),
    )
