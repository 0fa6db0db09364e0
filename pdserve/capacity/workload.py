"""Requests to simulate: when they come, how long they are, and which prefixes they share."""

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, count
from math import isfinite
from pathlib import Path
from typing import TypeVar

from pdserve.errors import ConfigError

Item = TypeVar("Item")
Value = TypeVar("Value")

SPREAD = 0.8  # of random lengths
MOST_TOKENS, MOST_SPREAD = 1_000_000, 3.0
_OWN_TOKENS = 2**31  # from here on, a token for each request's own part; below, one for each shared block
MOONCAKE_BLOCK = 512  # tokens that one of its hashes stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # names of its leading blocks; equal ones are shared


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of time."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 0  # tokens of a shared block; 0: nothing is shared
    exact: bool = False  # whether clients know how long their answers will be, and ask for no more
    is_random: bool = False  # whether requests come at random, without regard for each other

    @property
    def rate(self) -> float:
        """Requests per second, on average."""
        span_s = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / span_s if span_s > 0 else float("inf")

    def first(self, count: int) -> "Workload":
        return replace(self, arrivals=self.arrivals[:count])

    def at_rate(self, rate: float) -> "Workload":
        """Stretch time, so that the same requests come at another average rate."""
        if not isfinite(self.rate):
            raise ConfigError(f"{self.name}: all of its requests come at once, so it cannot be stretched to a rate")
        factor, start_s = self.rate / rate, self.arrivals[0].at_s
        arrivals = tuple(replace(each, at_s=(each.at_s - start_s) * factor) for each in self.arrivals)
        return replace(self, arrivals=arrivals)

    def poisson(self, seed: int) -> "Workload":
        """Let the same requests come at random, at the same average rate."""
        rng, at_s, arrivals = random.Random(seed), 0.0, []
        rate = self.rate if isfinite(self.rate) else 1.0
        for each in self.arrivals:
            at_s += rng.expovariate(rate)
            arrivals.append(replace(each, at_s=at_s))
        return replace(self, arrivals=tuple(arrivals), is_random=True)

    def endless(self, rate: float) -> Iterator[Arrival]:
        """Yield the requests at another average rate, over and over.

        Random arrivals get fresh gaps each time round, and another order unless they share blocks: what shares a block
        is near in time. Requests of different times round share none.
        """
        first = self.at_rate(rate).arrivals
        num_names = 1 + max((name for each in first for name in each.blocks), default=0)
        start_s = 0.0
        for turn in count():
            arrivals = self._again(first, rate, turn) if turn and self.is_random else first
            for each in arrivals:
                names = tuple(name + turn * num_names for name in each.blocks)
                yield replace(each, at_s=start_s + each.at_s, blocks=names)
            start_s += arrivals[-1].at_s + 1 / rate

    def _again(self, arrivals: tuple[Arrival, ...], rate: float, turn: int) -> tuple[Arrival, ...]:
        rng = random.Random(turn)
        order = arrivals if self.block_tokens else rng.sample(arrivals, len(arrivals))
        times_s = accumulate((rng.expovariate(rate) for _ in order[1:]), initial=0.0)
        return tuple(replace(each, at_s=at_s) for each, at_s in zip(order, times_s, strict=True))

    def max_tokens(self, arrival: Arrival) -> int:
        """Return what a client asks for; unless it knows how long its answer will be, more than it needs."""
        return arrival.output_tokens if self.exact else max(1024, arrival.output_tokens)

    def token_ids(self, number: int, arrival: Arrival) -> tuple[int, ...]:
        """Return the prompt of the request with this number: tokens of its blocks, then tokens that no other has."""
        own = _OWN_TOKENS + number
        if not self.block_tokens:
            return (own,) * arrival.prompt_tokens
        tokens = [name + 2 for name in arrival.blocks for _ in range(self.block_tokens)]
        tokens += [own] * (arrival.prompt_tokens - len(tokens))
        del tokens[arrival.prompt_tokens :]
        return tuple(tokens)

    def scaled(self, factor: float, max_prompt_tokens: int, output_factor: float | None = None) -> "Workload":
        """Shorten prompts and shared blocks by a factor, outputs by theirs, and cut prompts that are still too long."""

        by = factor if output_factor is None else output_factor

        def scale(each: Arrival) -> Arrival:
            prompt = min(max_prompt_tokens, max(2, round(each.prompt_tokens * factor)))
            return replace(each, prompt_tokens=prompt, output_tokens=max(1, round(each.output_tokens * by)))

        block = max(1, round(self.block_tokens * factor)) if self.block_tokens else 0
        return replace(self, arrivals=tuple(map(scale, self.arrivals)), block_tokens=block)


def random_lengths(
    num_requests: int, prompt_tokens: float, output_tokens: float, seed: int, spread: float = SPREAD
) -> Workload:
    """Return requests of log-normal lengths with these means, one a second; stretch it to the rate wanted.

    `spread` is the standard deviation of the lengths' logarithms.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(2, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))

    arrivals = [Arrival(float(i), draw(prompt_tokens), draw(output_tokens)) for i in range(num_requests)]
    return Workload(f"{prompt_tokens:g} in, {output_tokens:g} out", tuple(arrivals)).poisson(seed)


def parse_lengths(text: str) -> tuple[float, float, float] | None:
    """Return the means of prompts and outputs, and their spread, of INxOUT or INxOUT~S; None of another text."""
    means, _, spread = text.partition("~")
    prompt, _, output = means.partition("x")
    try:
        parsed = float(prompt), float(output), float(spread or SPREAD)
    except ValueError:
        return None
    for mean in parsed[:2]:
        if not 1 <= mean <= MOST_TOKENS:
            raise ConfigError(f"--workload: {text!r}: {mean:g} tokens, from 1 to {MOST_TOKENS} are possible")
    if not 0 <= parsed[2] <= MOST_SPREAD:
        raise ConfigError(f"--workload: {text!r}: a spread of {parsed[2]:g}, from 0 to {MOST_SPREAD:g} is possible")
    return parsed


def trace_path(text: str) -> Path:
    """Return a shipped slice of a trace by its name, or the path that the text is."""
    shipped = {path.stem: path for path in Path(__file__).with_name("traces").iterdir() if path.suffix != ".md"}
    return shipped.get(text, Path(text))


def read_workload(path: Path) -> Workload:
    """Read a trace: Azure's CSV, Mooncake's JSON lines, or a JSON list of {start_time (s), prompt_len, output_len}.

    ConfigError names the file, the line (or the entry) and the field that is wrong.
    """
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake, ".json": _read_list}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: known are {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    arrivals = sorted(reader(path, text), key=lambda each: each.at_s)
    if len(arrivals) < 2:
        raise ConfigError(f"{path}: {len(arrivals)} requests, at least 2 are needed")
    return Workload(path.stem, tuple(arrivals), MOONCAKE_BLOCK if reader is _read_mooncake else 0)


def _read_azure(path: Path, text: str) -> list[Arrival]:
    def read(row: dict[str, str]) -> Arrival:
        stamp = _field(row, "TIMESTAMP", str)[:26]  # its seventh decimal is more than Python keeps
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)
        return Arrival(at.timestamp(), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))

    rows = csv.DictReader(text.splitlines())
    return [_at_place(path, f"line {number}", read, row) for number, row in enumerate(rows, start=2)]


def _read_mooncake(path: Path, text: str) -> list[Arrival]:
    def read(line: str) -> Arrival:
        row = json.loads(line)
        blocks = tuple(_field(row, "hash_ids", list))
        at_s = _seconds(row, "timestamp") / 1e3
        return Arrival(at_s, _count(row, "input_length"), _count(row, "output_length"), blocks)

    lines = enumerate(text.splitlines(), start=1)
    return [_at_place(path, f"line {number}", read, line) for number, line in lines if line.strip()]


def _read_list(path: Path, text: str) -> list[Arrival]:
    def read(row: dict[str, object]) -> Arrival:
        return Arrival(_seconds(row, "start_time"), _count(row, "prompt_len"), _count(row, "output_len"))

    rows = _at_place(path, "the file", json.loads, text)
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: it has to be a list")
    return [_at_place(path, f"entry {number}", read, row) for number, row in enumerate(rows)]


def _at_place(path: Path, place: str, read: Callable[[Item], Value], item: Item) -> Value:
    try:
        return read(item)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}, {place}: {text}") from error


def _field(row: object, name: str, kind: type[Value]) -> Value:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is not an object")
    value = row[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name}: {value!r} is not a {kind.__name__}")
    return value


def _count(row: object, name: str) -> int:
    value = _number(row, name)
    if value < 1 or value != int(value):
        raise ValueError(f"{name}: {value:g} is not a number of tokens over 0")
    return int(value)


def _seconds(row: object, name: str) -> float:
    value = _number(row, name)
    if value < 0:
        raise ValueError(f"{name}: {value:g} is below 0")
    return value


def _number(row: object, name: str) -> float:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is not an object")
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {row[name]!r} is not a number") from None
    if not isfinite(value):
        raise ValueError(f"{name}: {value} is not a number")
    return value
