"""The outcome of one request, as its client saw it, on a live cluster or on a simulated one."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite

from pdserve.errors import ConfigError, Status


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds; infinite: any time will do."""

    ttft_s: float = inf
    tpot_s: float = inf

    def __str__(self) -> str:
        named = ("TTFT", self.ttft_s), ("TPOT", self.tpot_s)
        limits = [f"{name} {1e3 * limit_s:.4g} ms" for name, limit_s in named if isfinite(limit_s)]
        return ", ".join(limits) or "no objective"


ANY = Objective()


def parse_objective(*texts: str) -> Objective:
    """Return the objective written "ttft:MS tpot:MS", in one text or in several; either limit may be missing."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).split():
        name, _, value = part.partition(":")
        if name in limits:
            raise ConfigError(f"--goodput: {name} is given twice")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput: {part!r} is not ttft:MS or tpot:MS") from None
        if name not in ("ttft", "tpot"):
            raise ConfigError(f"--goodput: {name!r} is neither ttft nor tpot")
        if not 0 < limits[name] < inf:
            raise ConfigError(f"--goodput: {part!r} must be over 0 milliseconds and finite")
    return Objective(limits.get("ttft", inf), limits.get("tpot", inf))


OK = "OK"


@dataclass(frozen=True, slots=True)
class Moved:
    """A move of one continuation to another worker, as the ledger has it."""

    index: int
    num_tokens: int  # of the continuation, known when the target took charge
    source: str
    target: str
    num_bytes: int
    handoff_s: float  # of its last page


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of its run; the cluster fills in the rest as it answers."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int  # that were asked for
    number: int = 0  # in its run
    status: str = ""  # "OK" or the name of a gRPC status; empty: it has not ended
    detail: str = ""
    wrong: str = ""  # how its tokens differ from the expected ones; empty: they do not, or were not compared
    num_tokens: int = 0
    placed_s: float = 0.0  # when it was given to workers; of a simulated cluster
    first_s: float = 0.0  # when the first token came
    last_s: float = 0.0
    ended_s: float = inf
    gaps_s: list[float] = field(default_factory=list)  # between messages that brought tokens
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of a live cluster, by continuation
    times_s: dict[int, list[float]] = field(default_factory=dict)  # when each of these tokens came
    predicted_ttft_s: float | None = None  # by the router, when it placed or refused the request
    predicted_tpot_s: float | None = None
    retry_after_s: float | None = None  # as a refusal proposed
    attempts: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefill worker's prefix cache
    prefill_worker: str = ""
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    fetched_tokens: int = 0  # of the prompt, fetched from another worker's prefix cache
    moves: tuple[Moved, ...] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)  # of its timeline, after "received"

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without one."""
        return self.first_s - self.sent_s if self.num_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per later token; None with fewer than two tokens."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens. Those that came in one message are 0 apart."""
        return self.gaps_s + [0.0] * (self.num_tokens - 1 - len(self.gaps_s))

    @property
    def is_good(self) -> bool:
        return self.status == OK and not self.wrong

    @property
    def is_refused(self) -> bool:
        return self.status == Status.RESOURCE_EXHAUSTED.value

    def meets(self, objective: Objective) -> bool:
        """Return whether it ended well and in time. One token alone has no TPOT to miss."""
        if not self.is_good or self.ttft_s is None or self.ttft_s > objective.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= objective.tpot_s

    def take(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.num_tokens += num_tokens
        self.last_s = now_s


_Stages = Mapping[str, float]

# Where a request's time went. The first four parts add up to the router's TTFT; the last four to the time from the end
# of the prompt's computing to the decode worker's first step.
PARTS: dict[str, Callable[[_Stages], float]] = {
    "placed": lambda at: at["placed"] - at["received"],
    "prefill queue": lambda at: at["prefill_started"] - at["placed"],
    "prefill": lambda at: at["prefill_done"] - at["prefill_started"],
    "first token": lambda at: at["first_token"] - at["prefill_done"],
    "wait for a grant": lambda at: max(0.0, at["granted"] - at["prefill_done"]),
    "until landed": lambda at: at["landed"] - max(at["prefill_done"], at["granted"]),
    "until committed": lambda at: at["committed"] - at["landed"],
    "until decoding": lambda at: at["decode_joined"] - at["committed"],
}


def part_times(stages_s: _Stages) -> dict[str, float]:
    """Return the time in each part whose stages a request has reached: without a hand-off, only the first four."""
    times = {}
    for name, part in PARTS.items():
        with suppress(KeyError):
            times[name] = part(stages_s)
    return times
