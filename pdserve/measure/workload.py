"""Requests to send or to simulate: when they come, how long they are, and which prefixes they share."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, cycle, islice, takewhile
from math import inf, isfinite

from pdserve.base.errors import ConfigError
from pdserve.base.ids import RequestId

SPREAD = 0.8  # of random lengths
_AGAIN_WITHIN_S = 10.0  # a repeated request comes within so many seconds, far less than a trace takes to rise or fall
_OWN_TOKENS = 2**31  # token ids from here on fill requests' own parts, one id each; smaller ones name shared blocks


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # names of its leading blocks; equal ones are shared


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 0  # tokens of a shared block; 0: nothing is shared
    exact: bool = False  # whether clients know how long their answers will be, and ask for no more
    is_random: bool = False  # whether arrivals are Poisson

    @property
    def rate(self) -> float:
        """Requests per second, on average."""
        span_s = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / span_s if span_s > 0 else inf

    @property
    def is_timed(self) -> bool:
        """Return whether the times of the arrivals mean something, as those of a trace do."""
        return not self.is_random and isfinite(self.rate)

    def sent_at(self, rate: float | None, seed: int) -> "Workload":
        """Return the workload with the times at which requests are sent to a live cluster.

        A trace keeps its own times, or is stretched to an average rate. Other requests are sent all at once, or with
        Poisson arrivals at that rate.
        """
        start_s = self.arrivals[0].at_s
        if rate is not None:
            return self.at_rate(rate) if self.is_timed else self.poisson(seed, rate)
        times_s = (each.at_s - start_s if self.is_timed else 0.0 for each in self.arrivals)
        return replace(self, arrivals=_at(times_s, self.arrivals))

    def first(self, count: int) -> "Workload":
        return replace(self, arrivals=self.arrivals[:count])

    def between(self, from_s: float, until_s: float) -> "Workload":
        """Return the requests of a stretch of time, seconds from the first one; ConfigError where there are under 2."""
        start_s = self.arrivals[0].at_s
        kept = tuple(
            replace(each, at_s=each.at_s - start_s - from_s)
            for each in self.arrivals
            if from_s <= each.at_s - start_s < until_s
        )
        if len(kept) < 2:
            raise ConfigError(f"{self.name}: {len(kept)} requests between {from_s:g} and {until_s:g} s")
        return replace(self, arrivals=kept)

    def multiplied(self, factor: float, seed: int) -> "Workload":
        """Multiply the requests in the same time: copies come up to some seconds after their original.

        The first copies of all requests share blocks with each other, and so do the second ones; originals share none.
        """
        rng, arrivals = random.Random(seed), list[Arrival]()
        num_names = 1 + max((name for each in self.arrivals for name in each.blocks), default=0)
        for each in self.arrivals:
            for turn in range(int(factor + rng.random())):
                names = tuple(name + turn * num_names for name in each.blocks)
                later_s = rng.uniform(0, _AGAIN_WITHIN_S) if turn else 0.0
                arrivals.append(replace(each, at_s=each.at_s + later_s, blocks=names))
        arrivals.sort(key=lambda each: each.at_s)
        return replace(self, name=f"{self.name} x {factor:g}", arrivals=tuple(arrivals))

    def at_rate(self, rate: float) -> "Workload":
        """Return the same requests with all times scaled to give this average rate."""
        if not isfinite(self.rate):
            raise ConfigError(f"{self.name}: all of its requests come at once, so it cannot be stretched to a rate")
        factor, start_s = self.rate / rate, self.arrivals[0].at_s
        times_s = ((each.at_s - start_s) * factor for each in self.arrivals)
        return replace(self, arrivals=_at(times_s, self.arrivals))

    def poisson(self, seed: int, rate: float | None = None) -> "Workload":
        """Return the same requests with Poisson arrivals, by default at the same average rate, or one a second."""
        times_s = _poisson(random.Random(seed), rate or (self.rate if isfinite(self.rate) else 1.0))
        return replace(self, arrivals=_at(times_s, self.arrivals), is_random=True)

    def during(self, seconds: float, rate: float, seed: int) -> tuple[Arrival, ...]:
        """Return Poisson arrivals for some seconds; requests are taken in order, from a random place on."""
        rng = random.Random(seed)
        requests = islice(cycle(self.arrivals), rng.randrange(len(self.arrivals)), None)
        return _at(takewhile(lambda at_s: at_s <= seconds, _poisson(rng, rate)), requests)

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
        return _at(chain((0.0,), _poisson(rng, rate)), order)

    def max_tokens(self, arrival: Arrival) -> int:
        """Return `max_tokens` of the request: the answer's length if clients know it, otherwise 1,024 at least."""
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

    def scaled(self, factor: float, max_length: int, output_factor: float | None = None) -> "Workload":
        """Shorten prompts and shared blocks by a factor and outputs by theirs; cut both where they are still longer."""
        by = factor if output_factor is None else output_factor

        def scale(each: Arrival) -> Arrival:
            prompt = max(min(2, each.prompt_tokens), round(each.prompt_tokens * factor))
            output = max(1, round(each.output_tokens * by))
            return replace(each, prompt_tokens=min(max_length, prompt), output_tokens=min(max_length, output))

        block = max(1, round(self.block_tokens * factor)) if self.block_tokens else 0
        name = self.name if factor == by == 1 else f"{self.name}, lengths x {factor:g}"
        return replace(self, name=name, arrivals=tuple(map(scale, self.arrivals)), block_tokens=block)


def _poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Yield the moments of Poisson arrivals."""
    return accumulate(rng.expovariate(rate) for _ in count())


def _at(times_s: Iterable[float], requests: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Return requests that come at these times, as many as there are of both."""
    return tuple(replace(each, at_s=at_s) for at_s, each in zip(times_s, requests, strict=False))


def request_id_of(number: int) -> RequestId:
    """Return a request id that ends in the request's number, and begins with bits that differ like random ones."""
    return RequestId((number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") + number.to_bytes(8, "big"))


def random_lengths(
    num_requests: int, prompt_tokens: float, output_tokens: float, seed: int, spread: float = SPREAD
) -> Workload:
    """Return requests of log-normal lengths with these means, one a second; stretch it to the rate wanted.

    `spread` is the standard deviation of the lengths' logarithms.
    """
    rng = random.Random(seed)

    def sample(mean: float) -> int:
        return max(2, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))

    arrivals = [Arrival(float(i), sample(prompt_tokens), sample(output_tokens)) for i in range(num_requests)]
    return Workload(f"{prompt_tokens:g} in, {output_tokens:g} out", tuple(arrivals)).poisson(seed)


def fixed_lengths(name: str, num_requests: int, prompt_tokens: int, output_tokens: int) -> Workload:
    return Workload(name, (Arrival(0.0, prompt_tokens, output_tokens),) * num_requests)


def random_prompts(arrivals: Sequence[Arrival], vocab_size: int, seed: int) -> list[list[int]]:
    """Return a prompt of random token ids for each arrival; equal seeds give equal prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(arrival.prompt_tokens)] for arrival in arrivals]
