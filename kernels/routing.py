"""The rule by which a token chooses its experts; `model/routing.py` computes it in torch, `cpu/src/routing.c` in C."""

from dataclasses import dataclass

MOST_EXPERTS = 4096  # of a mixture: the C library has their scores on a thread's stack


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its experts, in float32 from the logits of a router."""

    num_chosen: int
    by_sigmoid: bool = False  # scores; else by softmax over all experts
    bias: str | None = None  # a tensor that is added to scores where experts are chosen, not where they are weighed
    groups: tuple[int, int] = (1, 1)  # of experts, and how many of them may be chosen from
    normalized: bool = True  # weights are divided by their sum
    scale: float = 1.0  # of weights
    added: float = 0.0  # to the sum that weights are divided by
    shares: str | None = None  # a tensor of each expert's factor, which weights are multiplied with at last
    group_best: int = 2  # by the sum of so many of its experts' scores a group is chosen
