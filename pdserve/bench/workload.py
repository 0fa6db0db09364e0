"""What a benchmark sends, and when: requests of given lengths, all at once, at random moments, or as a trace says."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdserve.errors import ConfigError

_MOST_DIGITS = 6  # of a number of requests or tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it is sent, how long its prompt is, and how long its answer."""

    start_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, in the order of their start."""

    name: str
    arrivals: tuple[Arrival, ...]


class _TraceLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    start_time: float = Field(ge=0)
    prompt_len: int = Field(ge=1)
    output_len: int = Field(ge=1)


def parse(text: str) -> Workload:
    """Return the workload written NUMxINxOUT: requests, prompt tokens, answer tokens; all start at once."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--workload: {text!r} is not NUMxINxOUT, for example 16x32x128")
    if any(len(part) > _MOST_DIGITS for part in parts):
        raise ConfigError(f"--workload: {text!r}: none of its numbers may have more than {_MOST_DIGITS} digits")
    number, prompt_len, output_len = map(int, parts)
    return Workload(text, (Arrival(0.0, prompt_len, output_len),) * number)


def read_trace(path: Path, scale: float) -> Workload:
    """Return the requests of a JSON trace, its time stretched by `scale`: 2 sends half as many a second."""
    try:
        lines = TypeAdapter(list[_TraceLine]).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--trace: {path}: {where}: {first['msg']}") from error
    if not lines:
        raise ConfigError(f"--trace: {path} has no requests")
    arrivals = [Arrival(line.start_time, line.prompt_len, line.output_len) for line in lines]
    return stretched(Workload(path.name, tuple(sorted(arrivals, key=lambda arrival: arrival.start_s))), scale)


def stretched(workload: Workload, scale: float) -> Workload:
    """Return the same requests, their times multiplied by `scale`; ConfigError unless that is finite and over 0."""
    _check_positive("--scale", scale)
    arrivals = [replace(arrival, start_s=arrival.start_s * scale) for arrival in workload.arrivals]
    return replace(workload, arrivals=tuple(arrivals))


def poisson(workload: Workload, rate_per_s: float, seed: int) -> Workload:
    """Return the same requests, sent at random moments `rate_per_s` times a second on average."""
    _check_positive("--rate", rate_per_s)
    draw = random.Random(seed)
    now_s = 0.0
    spread = []
    for arrival in workload.arrivals:
        now_s += draw.expovariate(rate_per_s)
        spread.append(replace(arrival, start_s=now_s))
    return replace(workload, arrivals=tuple(spread))


def _check_positive(flag: str, value: float) -> None:
    if not 0 < value < inf:
        raise ConfigError(f"{flag}: {value:g} must be over 0 and finite")


def prompts(arrivals: Sequence[Arrival], vocab_size: int, seed: int) -> list[list[int]]:
    """Return a prompt of random token ids for each arrival; equal seeds give equal prompts."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(arrival.prompt_len)] for arrival in arrivals]
