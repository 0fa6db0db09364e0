"""Teach a router the speed of its workers: requests of many lengths, alone and in batches of many sizes."""

import random
from dataclasses import dataclass

from pdserve.bench.workload import Arrival
from pdserve.experiments.live import LiveCluster, Tell

_PROMPT = (8, 1024)  # shortest and longest
_BATCH = (1, 24)
_STEPS = (8, 24)  # that each decodes


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at once."""

    size: int
    prompt_tokens: int
    output_tokens: int


def bursts(count: int, max_tokens: int, seed: int) -> list[Burst]:
    """Return bursts of all shapes: each length and size as likely as one twice as large."""
    draw = random.Random(seed)

    def between(low: float, high: float) -> int:
        return round(low * float((high / low) ** draw.random()))

    shapes = []
    for number in range(count):
        size = 1 if number % 3 == 0 else between(*_BATCH)
        outputs = 1 if number % 4 == 0 else between(*_STEPS)
        longest = min(_PROMPT[1], max(_PROMPT[0], max_tokens - outputs))
        shapes.append(Burst(size, between(_PROMPT[0], max(_PROMPT[0], longest / size**0.5)), outputs))
    return shapes


async def sweep(cluster: LiveCluster, shapes: list[Burst], tell: Tell) -> None:
    """Send the bursts, each when the one before has ended; every fourth comes while the one before decodes."""
    for number, shape in enumerate(shapes):
        if number % 20 == 0:
            tell(f"burst {number} of {len(shapes)}")
        arrivals = [Arrival(0.0, shape.prompt_tokens, shape.output_tokens)] * shape.size
        arrivals += [Arrival(0.1, shapes[number - 1].prompt_tokens, 1)] * (number % 4 == 3)
        await cluster.run(arrivals, seed=number)
