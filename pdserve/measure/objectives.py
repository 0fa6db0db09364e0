"""What a request asks for: limits of its time to first token and of its mean time per later token."""

from dataclasses import dataclass
from math import inf, isfinite

from pdserve.errors import ConfigError


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


def parse_objective(text: str) -> Objective:
    """Return the objective written "ttft:MS tpot:MS"; either may be missing."""
    limits: dict[str, float] = {}
    for part in text.split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput: {part!r} is not ttft:MS or tpot:MS") from None
        if name not in ("ttft", "tpot"):
            raise ConfigError(f"--goodput: {name!r} is neither ttft nor tpot")
        if not 0 < limits[name] < inf:
            raise ConfigError(f"--goodput: {part!r} must be over 0 milliseconds and finite")
    return Objective(limits.get("ttft", inf), limits.get("tpot", inf))
