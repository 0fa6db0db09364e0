"""Sessions of agents on a simulated cluster: the real router and workers, with and without names of conversations."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean

from pdserve.base.ids import RequestId
from pdserve.base.roles import Role
from pdserve.capacity.answers import OTHER
from pdserve.capacity.cluster import SimCluster, _Router
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY, Outcome, Percentiles, percentiles
from pdserve.measure.sessions import Session, Turn, sessions_of
from pdserve.measure.sessions import Shape as SessionsShape
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import Profile, read_profile, shipped_profile
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


@dataclass(frozen=True, slots=True)
class _Round:
    turns: Counter[str]
    busy_s: float
    outcomes: list[tuple[int, Outcome]]  # with the turns' numbers

    @property
    def mean_s(self) -> float:
        return mean(each.ttft_s or 0.0 for number, each in self.outcomes if number > 1)


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

    def found(self) -> _Round:
        """Return what came of them."""
        turns = sum((router.placements.sessions.turns for router in self.routers), start=Counter[str]())
        busy_s = sum(worker.busy_s for worker in self.workers if worker.core.load().role is Role.PREFILL)
        return _Round(turns, busy_s, [(number, self._outcomes[request_id]) for request_id, number in self.turns])

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
    """What came of the turns of all rounds; times to first token from the second turn on, of all rounds together."""

    name: str
    num_turns: int
    turns: dict[str, int]  # by what became of their homes
    prefill_busy_s: float  # that all prefill workers computed, mean of the rounds
    rounds_won: int  # with the lower mean time to first token
    ttft_mean_s: float
    ttft_first_s: Percentiles | None
    ttft_second_s: Percentiles | None
    ttft_later_s: Percentiles | None
    tpot_s: Percentiles | None


def measure_rounds(
    shape: Shape, sessions: SessionsShape, rounds: int, seed: int, report: Callable[[str], None]
) -> list[SessionsFound]:
    """Simulate rounds of sessions, each without names and with them."""
    profile, ways = read_profile(shipped_profile()), {"unnamed": list[_Round](), "named": list[_Round]()}
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        played = sessions_of(sessions, _VOCABULARY, seed + number)
        for name, found in ways.items():
            cluster = SimSessions(profile, shape, played, names_sessions=name == "named")
            cluster.play()
            found.append(cluster.found())
    means = {name: [each.mean_s for each in found] for name, found in ways.items()}
    pairs = list(zip(means["unnamed"], means["named"], strict=True))
    won = {"unnamed": sum(one < other for one, other in pairs), "named": sum(other < one for one, other in pairs)}
    return [_summary(name, found, won[name]) for name, found in ways.items()]


def _summary(name: str, rounds: list[_Round], rounds_won: int) -> SessionsFound:
    outcomes = [each for one in rounds for each in one.outcomes]

    def ttft_s(wanted: Callable[[int], bool]) -> Percentiles | None:
        return percentiles(each.ttft_s for number, each in outcomes if wanted(number))

    return SessionsFound(
        name=name,
        num_turns=len(outcomes),
        turns=dict(sum((each.turns for each in rounds), start=Counter[str]())),
        prefill_busy_s=mean(each.busy_s for each in rounds),
        rounds_won=rounds_won,
        ttft_mean_s=mean(each.mean_s for each in rounds),
        ttft_first_s=ttft_s(lambda number: number == 1),
        ttft_second_s=ttft_s(lambda number: number == 2),
        ttft_later_s=ttft_s(lambda number: number > 2),
        tpot_s=percentiles(each.tpot_s for _, each in outcomes),
    )
