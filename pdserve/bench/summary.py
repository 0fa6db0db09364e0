"""What a run's measurements add up to. Every request that was sent counts, the failed ones too."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.bench.ladder import PARTS, part_times
from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; times are seconds since the run's start."""

    sent_s: float
    token_times_s: tuple[float, ...]  # of each token, when it arrived
    ended_s: float
    status: str  # "OK" or a gRPC status name
    prompt_len: int
    handoff_bytes: int = 0
    handoff_ms: float = 0.0
    predicted_ttft_s: float | None = None  # by the router when it placed the request, or refused it
    predicted_tpot_s: float | None = None
    retry_after_s: float | None = None  # as told with a refusal
    rungs_ms: Mapping[str, float] = field(default_factory=dict)  # of the ledger, after "received"
    cached_tokens: int = 0  # of the prompt, found in the prefill worker's prefix cache
    prefill_worker: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without one."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per later token; None with fewer than two tokens."""
        if len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Gaps between tokens. Those that arrived in one message are 0 apart."""
        return tuple(b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request needs; None where it does not matter."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, sample: Sample) -> bool:
        """Return whether a request ended well and in time. One token alone has no TPOT to miss."""
        if sample.status != "OK" or sample.ttft_s is None:
            return False
        if self.ttft_ms is not None and 1e3 * sample.ttft_s > self.ttft_ms:
            return False
        return self.tpot_ms is None or sample.tpot_s is None or 1e3 * sample.tpot_s <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one quantity, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run."""

    name: str
    num_requests: int
    duration_s: float  # from the first send to the last end
    ttft_ms: Percentiles | None  # None when nothing was measured
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    handoff_ms: Percentiles | None
    handoff_bytes: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float  # that ended well
    goodput_per_s: float  # that ended well and met the objective
    attainment: float  # share of all requests that did
    failures: dict[str, int]  # by status
    parts_ms: dict[str, Percentiles]  # from rung to rung, of the requests that ended well


def parse_slo(text: str) -> Slo:
    """Return the objective written ttft=MS,tpot=MS; either may be missing."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--slo: {part!r} is not ttft=MS or tpot=MS") from None
    if unknown := values.keys() - {"ttft", "tpot"}:
        raise ConfigError(f"--slo: {unknown.pop()!r} is neither ttft nor tpot")
    if any(not value > 0 for value in values.values()):
        raise ConfigError(f"--slo: {text!r} must be over 0 milliseconds")
    return Slo(values.get("ttft"), values.get("tpot"))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the ordered values lie, interpolated linearly."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values_ms: Sequence[float]) -> Percentiles | None:
    """Return the usual percentiles, or None of nothing."""
    if not values_ms:
        return None
    ordered = sorted(values_ms)
    return Percentiles(*(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def _parts(samples: Sequence[Sample]) -> dict[str, Percentiles]:
    times = [part_times(s.rungs_ms) for s in samples]
    found = {name: percentiles([each[name] for each in times if name in each]) for name in PARTS}
    return {name: values for name, values in found.items() if values is not None}


def summarize(name: str, samples: Sequence[Sample], slo: Slo) -> Summary:
    """Return what the samples of one run add up to."""
    duration_s = max(s.ended_s for s in samples) - min(s.sent_s for s in samples)
    succeeded = [s for s in samples if s.status == "OK"]
    handed_off = [s for s in succeeded if s.handoff_bytes]
    num_met = sum(slo.is_met(s) for s in samples)
    return Summary(
        name=name,
        num_requests=len(samples),
        duration_s=duration_s,
        ttft_ms=percentiles([1e3 * s.ttft_s for s in samples if s.ttft_s is not None]),
        tpot_ms=percentiles([1e3 * s.tpot_s for s in samples if s.tpot_s is not None]),
        itl_ms=percentiles([1e3 * gap for s in samples for gap in s.itls_s]),
        handoff_ms=percentiles([s.handoff_ms for s in handed_off]),
        handoff_bytes=sum(s.handoff_bytes for s in handed_off),
        input_tokens_per_s=sum(s.prompt_len for s in succeeded) / duration_s,
        output_tokens_per_s=sum(len(s.token_times_s) for s in samples) / duration_s,
        requests_per_s=len(succeeded) / duration_s,
        goodput_per_s=num_met / duration_s,
        attainment=num_met / len(samples),
        failures=dict(Counter(s.status for s in samples if s.status != "OK")),
        parts_ms=_parts(succeeded),
    )
