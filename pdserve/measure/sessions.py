"""Sessions of agents: trees of turns, with tools that run between them, on a live cluster.

A turn's prompt is all that its session has said so far, and what the last tool brought. A session may begin as a branch
of another one: then it shares that one's first turns. All sessions share the tokens of a system prompt with its tools.

Invariant: a turn is sent once the turn before it has ended and its tool has run, and never if that turn failed.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.measure.client import OpenLoop, new_tenant
from pdserve.measure.outcomes import Outcome, Percentiles, percentiles
from pdserve.measure.tables import counted
from pdserve.proto.v1 import inference_pb2 as inference

_SPREAD = 0.5  # of lengths and pauses: the standard deviation of their logarithms
_BEGIN_WITHIN = 2.0  # pauses: sessions begin at random moments in so long a time


@dataclass(frozen=True, slots=True)
class Shape:
    """What sessions look like; lengths are means, in tokens."""

    sessions: int = 16
    turns: int = 6
    shared_tokens: int = 512  # of the system prompt
    first_tokens: int = 256  # of a session's first message
    tool_tokens: int = 48  # that a tool brings
    answer_tokens: int = 32
    pause_s: float = 0.5  # that a tool runs
    branches: float = 0.25  # share of the sessions that begin as a branch of another one


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn before it is sent: what is said, how long the answer is, and how long the tool runs after it."""

    said: tuple[int, ...]
    answer_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    turns: tuple[Turn, ...]
    begins_s: float
    parent: int | None = None  # whose history it begins with
    fork_turn: int = 0  # turns of the parent that it has


def sessions_of(shape: Shape, vocab_size: int, seed: int) -> list[Session]:
    """Return the sessions of a shape; equal seeds give equal ones."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    def length(mean: float) -> int:
        return max(1, round(mean * rng.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)))

    def turn(mean: float) -> Turn:
        pause_s = shape.pause_s * rng.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)
        return Turn(tokens(length(mean)), length(shape.answer_tokens), pause_s)

    shared, sessions = tokens(shape.shared_tokens), list[Session]()
    for number in range(shape.sessions):
        roots = [place for place, each in enumerate(sessions) if each.parent is None]
        first, name = turn(shape.first_tokens), f"session-{number}"
        later = [turn(shape.tool_tokens) for _ in range(shape.turns - 1)]
        begins_s = rng.uniform(0, _BEGIN_WITHIN * shape.pause_s * shape.turns)
        if roots and shape.turns > 1 and rng.random() < shape.branches:
            parent, fork_turn = rng.choice(roots), rng.randrange(1, shape.turns)
            sessions.append(Session(name, tuple(later[fork_turn - 1 :]), 0.0, parent, fork_turn))
        else:
            first = Turn((*shared, *first.said), first.answer_tokens, first.pause_s)
            sessions.append(Session(name, (first, *later), begins_s))
    return sessions


@dataclass(slots=True)
class Taken:
    """A turn that was sent, and what came of it."""

    number: int  # in its conversation, from 1
    outcome: Outcome
    known_tokens: int  # leading ones of the prompt that the conversation had said or answered before
    has_moved: bool = False  # its prompt was computed, or its answer decoded, elsewhere than the turn's before


class Way(StrEnum):
    """How turns are sent: with a name of the session or without, and whether the next one is to be prepared."""

    UNNAMED = "unnamed"
    NAMED = "named"
    PREPARED = "prepared"


@dataclass(slots=True)
class _History:
    """What one session has said and got, and who served it."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of tokens, after each turn
    served_by: tuple[str, str] = ("", "")
    ended: list[asyncio.Event] = field(default_factory=list)  # a turn, whether well or not


class Round:
    """All sessions once, one way, for a tenant of its own."""

    def __init__(self, client: OpenLoop, sessions: Sequence[Session], way: Way, turns: int) -> None:
        self._client = client
        self._sessions = sessions
        self._way = way
        self._tenant = new_tenant()
        self._histories = [_History(ended=[asyncio.Event() for _ in range(turns)]) for _ in sessions]
        self.taken: list[Taken] = []

    async def run(self, on_turn: Callable[[], None] = lambda: None) -> list[Taken]:
        began_s = self._client.clock.now_s()
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._sessions)):
                tasks.create_task(self._session(number, began_s, on_turn))
        return self.taken

    async def _session(self, number: int, began_s: float, on_turn: Callable[[], None]) -> None:
        session, history = self._sessions[number], self._histories[number]
        if session.parent is None:
            await asyncio.sleep(max(0.0, began_s + session.begins_s - self._client.clock.now_s()))
        else:
            parent = self._histories[session.parent]
            await parent.ended[session.fork_turn - 1].wait()
            if len(parent.ends) < session.fork_turn:
                return  # the turn failed
            history.tokens = parent.tokens[: parent.ends[session.fork_turn - 1]]
            history.ends = parent.ends[: session.fork_turn]
        try:
            for turn in session.turns:
                if not await self._turn(session, history, turn, began_s):
                    return
                on_turn()
                await asyncio.sleep(turn.pause_s)
        finally:
            for event in history.ended:
                event.set()

    async def _turn(self, session: Session, history: _History, turn: Turn, began_s: float) -> bool:
        known, place = len(history.tokens), len(history.ends)
        history.tokens += turn.said
        outcome = await self._client.send(self._request(session, history.tokens, turn), began_s)
        served_by = outcome.prefill_worker, outcome.decode_worker
        has_moved = history.served_by not in (("", ""), served_by)
        self.taken.append(Taken(place + 1, outcome, known, has_moved))
        if not outcome.is_good:
            return False
        history.served_by = served_by
        history.tokens += outcome.tokens[0]
        history.ends.append(len(history.tokens))
        history.ended[place].set()
        return True

    def _request(self, session: Session, token_ids: Sequence[int], turn: Turn) -> inference.GenerateRequest:
        sampling = inference.SamplingParams(max_tokens=turn.answer_tokens, ignore_eos=True, temperature=0.0)
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=token_ids),
            sampling=sampling,
            tenant=self._tenant,
            session="" if self._way is Way.UNNAMED else session.name,
            prepare_next=self._way is Way.PREPARED,
        )


@dataclass(frozen=True, slots=True)
class TurnRow:
    """Turns of one number, sent one way."""

    name: str
    num_turns: int
    failures: dict[str, int]  # by status
    prompt_tokens: float  # mean
    reuse: float  # share of the prompts' tokens that their conversations had said or answered before
    cached: float  # share that was in the prefix cache of who computed the prompt, fetched or not
    fetched: float  # share that was fetched
    moved: float  # share of the turns that other workers served than the turn before
    ttft_s: Percentiles | None


async def measure_sessions(
    client: OpenLoop, shape: Shape, ways: Sequence[Way], rounds: int, seed: int
) -> list["TurnRow"]:
    """Play sessions each way, all ways in each round, forth and back; return what came of the turns by their numbers.

    Rounds differ in their sessions; the ways of a round have equal ones.
    """
    taken: dict[Way, list[Taken]] = {way: [] for way in ways}
    vocab_size = await client.vocab_size()
    for number in range(rounds):
        sessions = sessions_of(shape, vocab_size, seed + number)
        for way in ways if number % 2 == 0 else reversed(ways):
            with counted(f"round {number + 1}, {way}", sum(len(each.turns) for each in sessions)) as advance:
                taken[way] += await Round(client, sessions, way, shape.turns).run(advance)
    return [row for way, turns in taken.items() for row in rows(way, turns)]


def rows(way: str, taken: Iterable[Taken]) -> Iterator[TurnRow]:
    """Yield the first turns, the second ones, and the later ones."""
    taken = list(taken)
    kinds: dict[str, Callable[[int], bool]] = {
        "turn 1": lambda number: number == 1,
        "turn 2": lambda number: number == 2,
        "turns 3+": lambda number: number > 2,
    }
    for kind, matches in kinds.items():
        if chosen := [each for each in taken if matches(each.number)]:
            yield _row(f"{way}, {kind}", chosen)


def _row(name: str, taken: Sequence[Taken]) -> TurnRow:
    outcomes = [each.outcome for each in taken]
    num_tokens = sum(each.prompt_tokens for each in outcomes)
    return TurnRow(
        name=name,
        num_turns=len(taken),
        failures=dict(Counter(each.wrong or each.status for each in outcomes if not each.is_good)),
        prompt_tokens=num_tokens / len(taken),
        reuse=sum(each.known_tokens for each in taken) / num_tokens,
        cached=sum(each.cached_tokens for each in outcomes) / num_tokens,
        fetched=sum(each.fetched_tokens for each in outcomes) / num_tokens,
        moved=sum(each.has_moved for each in taken) / len(taken),
        ttft_s=percentiles(each.ttft_s for each in outcomes if each.is_good),
    )
