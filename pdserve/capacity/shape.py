"""What is simulated, and what comes of it."""

from dataclasses import dataclass

from pdserve.measure.outcomes import Outcome
from pdserve.roles import Role


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

    def tp_of(self, role: Role) -> int:
        """Return the devices of a worker of a role."""
        return self.prefill_tp if role is Role.PREFILL else self.decode_tp

    @property
    def num_gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp

    def __str__(self) -> str:
        if not self.prefill:
            return f"colocated {self.decode} x tp{self.decode_tp}, chunk {self.decode_chunk}"
        return f"{self.prefill} x tp{self.prefill_tp} prefill + {self.decode} x tp{self.decode_tp} decode"


@dataclass(frozen=True, slots=True)
class Ways:
    """Features of a simulated cluster that measurements switch on or off to see what they bring."""

    fetches: bool = True  # of cached pages from other workers
    moves: bool = False  # of answers, off workers that run out of pages; steps are then simulated one by one


USUAL = Ways()


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a simulation, or of a part of it."""

    outcomes: tuple[Outcome, ...]
    span_s: float  # from the first arrival to the last end, or to where it stopped
    busy: dict[str, float]  # share of the time that each worker computed
    num_steps: int
