"""How tokens choose experts: the rules of `kernels/routing.py`, in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.routing import Routing
from pdserve.model.ops import Dense


def route(
    x: Tensor, router: Dense, bias: Tensor | None, routing: Routing, shares: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights, float32, and the experts, int64, that each token takes: [num_tokens, num_chosen].

    shares: float32 [num_experts], see `Routing`.
    """
    added = None if router.bias is None else router.bias.float()
    weights, chosen = routed(functional.linear(x.float(), router.data.float(), added), bias, routing)
    return weights if shares is None else weights * shares[chosen], chosen


def routed(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's weights and experts; see `Routing`. logits: float32 [num_tokens, num_experts].

    Of experts with equal scores, the first ones are chosen.
    """
    scores = torch.sigmoid(logits) if routing.by_sigmoid else torch.softmax(logits, -1)
    ranks = scores if bias is None else scores + bias
    num_groups, num_chosen_groups = routing.groups
    if num_chosen_groups < num_groups:
        grouped = ranks.unflatten(1, (num_groups, ranks.shape[1] // num_groups))
        best = grouped.topk(min(routing.group_best, grouped.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _first_of(best, num_chosen_groups), 1)
        ranks = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    chosen = _first_of(ranks, routing.num_chosen)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.added).clamp(min=1e-20)
    return weights * routing.scale, chosen


def _first_of(ranks: Tensor, count: int) -> Tensor:
    return torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :count]
