"""What is simulated, and what comes of it."""

from dataclasses import dataclass
from math import inf

from pdserve.capacity.workload import Arrival
from pdserve.router.events import Finished, Refused


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of. Without prefill workers it is colocated: decode workers do everything."""

    prefill: int
    decode: int
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_chunk: int = 2048  # tokens of a prefill worker's step
    decode_chunk: int = 512  # tokens of a step of a decode worker that computes prompts itself
    max_num_seqs: int = 256
    local_prefill: bool = True  # whether a policy may let decode workers compute prompts
    kv_share: float = 1.0  # of the KV pages that fit, which a worker gets
    routers: int = 1  # that place requests, in turn, each on its own

    @property
    def num_gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp

    def __str__(self) -> str:
        if not self.prefill:
            return f"colocated {self.decode} x tp{self.decode_tp}, chunk {self.decode_chunk}"
        return f"{self.prefill} x tp{self.prefill_tp} prefill + {self.decode} x tp{self.decode_tp} decode"


@dataclass(frozen=True, slots=True)
class Objective:
    """What each request asks for."""

    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Outcome:
    """What a client of the simulated cluster saw."""

    arrival: Arrival
    num_tokens: int = 0
    placed_s: float = 0.0  # when it was given to workers
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = inf  # when its client had its end; infinite: not yet
    refused: str = ""  # the status it was refused with
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None  # where it was served

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def meets(self, objective: Objective) -> bool:
        return not self.refused and self.ttft_s <= objective.ttft_s and self.tpot_s <= objective.tpot_s

    def take(self, num_tokens: int, now_s: float) -> None:
        """Receive tokens."""
        if not self.num_tokens:
            self.first_s = now_s
        self.num_tokens += num_tokens
        self.last_s = now_s

    def close(self, end: Finished | Refused, now_s: float) -> None:
        """Receive the end."""
        self.ended_s = now_s
        if isinstance(end, Refused):
            self.refused, self.predicted_ttft_s = end.status.value, end.predicted_ttft_s
        else:
            self.predicted_ttft_s = _seconds(end.ledger.predicted_ttft_ms)
            self.predicted_tpot_s = _seconds(end.ledger.predicted_tpot_ms)

    def verdict(self, objective: Objective, now_s: float) -> bool | None:
        """Return whether it has met its objectives, or None while it may still meet or miss them."""
        if self.ended_s <= now_s:
            return self.meets(objective)
        if (self.first_s if self.num_tokens else now_s) - self.arrival.at_s > objective.ttft_s:
            return False
        num_gaps = self.arrival.output_tokens - 1
        is_slow = num_gaps > 0 and self.num_tokens > 0 and now_s - self.first_s > objective.tpot_s * num_gaps
        return False if is_slow else None


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a simulation, or of a part of it."""

    outcomes: tuple[Outcome, ...]
    span_s: float  # from the first arrival to the last end, or to where it stopped
    busy: dict[str, float]  # share of the time that each worker computed
    num_steps: int


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
