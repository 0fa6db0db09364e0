"""A mixture of experts over rows: each row takes the MLPs that its router chooses, and no other is read.

What a row becomes depends on that row alone: products are those of `layers`, over the rows that have chosen an expert,
and a row's sum is in the order of its experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind, Mixture
from pdserve.kernels.cpu.layers import GATED, PLAIN, Activation, Tiles, codes_inputs, inputs_of
from pdserve.kernels.cpu.library import DTYPES
from pdserve.kernels.routing import MOST_EXPERTS, Routing


@dataclass(frozen=True, slots=True)
class Router:
    """How rows choose."""

    weight: Tensor  # [num_experts, inputs], of the inputs' dtype
    routing: Routing
    ranks_bias: Tensor | None = None  # float32 [num_experts]: added to scores where experts are chosen
    logits_bias: Tensor | None = None  # float32 [num_experts]
    shares: Tensor | None = None  # float32 [num_experts]: see `Routing`

    def __post_init__(self) -> None:
        require_tensor("weight", self.weight, (None, None), tuple(DTYPES))
        rule = self.routing
        count, (num_groups, kept) = len(self.weight), rule.groups
        require(0 < count <= MOST_EXPERTS, f"weight: {count} experts, of at most {MOST_EXPERTS}")
        require(0 < kept <= num_groups and count % num_groups == 0, f"groups: {rule.groups} of {count} experts")
        require(rule.group_best in (1, 2), f"group_best must be 1 or 2, got {rule.group_best}")
        most = kept * count // num_groups
        require(0 < rule.num_chosen <= most, f"num_chosen: {rule.num_chosen} of {most} experts")
        named = {"ranks_bias": self.ranks_bias, "logits_bias": self.logits_bias, "shares": self.shares}
        for name, bias in named.items():
            if bias is not None:
                require_tensor(name, bias, (count,), (torch.float32,))


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Matrices of one shape in tiles, one expert's behind another's; see `Tiles`."""

    data: Tensor  # [num_experts, tiles, ...]
    bias: Tensor | None  # [num_experts, outputs]
    bits: int
    width: int
    dtype: torch.dtype
    gated: bool
    input_bits: int
    is_float: bool

    @property
    def inputs(self) -> int:
        return inputs_of(self.data[0], self.bits, is_float=self.is_float)

    @property
    def codes_inputs(self) -> bool:
        return codes_inputs(self.bits, is_float=self.is_float)

    @classmethod
    def like(cls, count: int, first: Tiles) -> Self:
        """Return room for `count` matrices such as the first one."""
        data = first.data.new_empty((count, *first.data.shape))
        bias = None if first.bias is None else first.bias.new_empty((count, *first.bias.shape))
        return cls(data, bias, first.bits, first.width, first.dtype, first.gated, first.input_bits, first.is_float)

    def put(self, place: int, tiles: Tiles) -> None:
        """Copy an expert's matrix to its place."""
        same = (tiles.data.shape, tiles.is_float) == (self.data.shape[1:], self.is_float)
        require(same, f"tiles: expert {place} has other codes than the first one")
        self.data[place] = tiles.data
        if self.bias is not None and tiles.bias is not None:
            self.bias[place] = tiles.bias

    def of_expert(self, place: int) -> Tiles:
        bias = None if self.bias is None else self.bias[place]
        return Tiles(
            self.data[place],
            self.bits,
            self.width,
            self.dtype,
            bias,
            self.gated,
            self.input_bits,
            is_float=self.is_float,
        )


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """The MLPs down(activation(gate(x)) * up(x)) of all experts, or down(activation(up(x))), and their router."""

    router: Router
    gate_up: ExpertTiles  # not gated: ups alone
    activation: Activation
    down: ExpertTiles
    counts: Tensor  # int64 [num_experts]: rows that have chosen each so far; each step adds its own

    @classmethod
    def of(cls, router: Router, activation: Activation, pairs: Iterable[tuple[Tiles, Tiles]]) -> Self:
        """Put the two matrices of each expert together. They may be made one expert after the other."""
        count, made = len(router.weight), None
        for place, (gate_up, down) in enumerate(pairs):
            if made is None:
                tiles = ExpertTiles.like(count, gate_up), ExpertTiles.like(count, down)
                made = cls(router, tiles[0], activation, tiles[1], torch.zeros(count, dtype=torch.int64))
            made.gate_up.put(place, gate_up)
            made.down.put(place, down)
        if made is None:
            raise ValueError("pairs: there are none")
        return made


@dataclass(frozen=True, slots=True)
class SharedRows:
    """What an expert that all rows take has made of them."""

    made: Tensor  # [num_rows, hidden_size]
    gate: Tensor | None  # [1, hidden_size]: the sigmoid of its product with a row multiplies that


def mix(
    calls: Calls,
    x: Tensor,
    experts: TiledExperts,
    shared: SharedRows | None,
    residual: Tensor | None,
    scale: float = 1.0,
) -> Tensor:
    """Return the sum of what a row's experts make of it, by weights, times `scale`: [num_rows, experts' inputs] as x.

    x: what the router takes, and behind it what experts take where that is something else. The result is added to the
    residual, which it overwrites, if there is one. What experts make is summed in float32.
    """
    of_router, inputs = experts.router.weight.shape[1], experts.gate_up.inputs
    width = of_router if x.shape[-1] <= of_router else of_router + inputs
    require_tensor("x", x, (None, width), (experts.router.weight.dtype,))
    require(width > of_router or inputs == of_router, f"x: experts take {inputs} features, the router {of_router}")
    for name, each in (("residual", residual), ("shared", None if shared is None else shared.made)):
        if each is not None:
            require_tensor(name, each, (len(x), inputs), (x.dtype,))
    routed, taken = x[:, :of_router], x[:, width - inputs :]
    logits = _logits(calls, routed, experts.router.weight, experts.router.logits_bias)
    step = _Step.begun(calls, logits, experts)
    inner = step.product(step.gathered(taken, experts.gate_up), experts.gate_up, experts.activation)
    made = step.product(step.coded(inner, experts.down), experts.down)
    return step.summed(made, routed, shared, residual, scale)


def _logits(calls: Calls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return products in float32: [num_rows, width]."""
    require_tensor("weight", weight, (None, x.shape[1]), (x.dtype,))
    require(weight.is_contiguous(), "weight: rows must follow one another")
    out = calls.empty(len(x), len(weight), torch.float32)
    call = Call(
        kind=Kind.LOGITS, type=DTYPES[x.dtype], x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(),
        out_stride=out.stride(0), inputs=x.shape[1], width=len(weight), weights=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )  # fmt: skip
    calls.take(len(x), call)
    return out


@dataclass(frozen=True, slots=True)
class _Step:
    """The calls of one mixture. A slot is a pair of a row and an expert that it has chosen (src/chosen.h)."""

    calls: Calls
    num_rows: int
    num_slots: int
    chosen: Tensor  # the memory of `mixture.chosen`
    mixture: Mixture

    @classmethod
    def begun(cls, calls: Calls, logits: Tensor, experts: TiledExperts) -> Self:
        """Let rows choose, and put their choices in order."""
        router, rule, (num_rows, count) = experts.router, experts.router.routing, logits.shape
        num_slots = num_rows * rule.num_chosen
        chosen = calls.empty(1, 4 * (2 * (count + 1) + 5 * num_slots), torch.uint8)
        mixture = Mixture(
            chosen=chosen.data_ptr(), num_experts=count, num_chosen=rule.num_chosen, by_sigmoid=rule.by_sigmoid,
            normalized=rule.normalized, num_groups=rule.groups[0], num_kept_groups=rule.groups[1],
            group_best=rule.group_best, counts=experts.counts.data_ptr(), added=rule.added,
        )  # fmt: skip
        routing = Call(kind=Kind.ROUTING, x=logits.data_ptr(), x_stride=count, scale=rule.scale, mixture=mixture)
        routing.bias = None if router.ranks_bias is None else router.ranks_bias.data_ptr()
        routing.weights = None if router.shares is None else router.shares.data_ptr()
        calls.take(num_rows, routing, Call(kind=Kind.GROUPING, mixture=mixture))
        return cls(calls, num_rows, num_slots, chosen, mixture)

    def gathered(self, x: Tensor, tiles: ExpertTiles) -> Tensor:
        """Return each slot's row of x, in codes where weights are."""
        inputs, calls = x.shape[1], self.calls
        call = Call(
            kind=Kind.GATHERING, type=DTYPES[x.dtype], inputs=inputs, bits=tiles.bits, is_float=tiles.is_float,
            mixture=self.mixture,
        )  # fmt: skip
        if not tiles.codes_inputs:
            slots = calls.empty(self.num_slots, inputs, x.dtype)
            call.x, call.x_stride, call.out, call.out_stride = x.data_ptr(), x.stride(0), slots.data_ptr(), inputs
            calls.take(self.num_rows, call)
            return slots
        codes, slots = self._codes(self.num_rows, inputs, tiles), self._codes(self.num_slots, inputs, tiles)
        coding = Call(
            kind=Kind.CODING, type=call.type, x=x.data_ptr(), x_stride=x.stride(0), inputs=inputs,
            scratch=codes.data_ptr(), input_bits=tiles.input_bits,
        )  # fmt: skip
        call.x, call.scratch, call.input_bits = codes.data_ptr(), slots.data_ptr(), tiles.input_bits
        calls.take(self.num_rows, coding, call)
        return slots

    def coded(self, slots: Tensor, tiles: ExpertTiles) -> Tensor:
        """Return slots in codes where weights are codes, else as they are."""
        if not tiles.codes_inputs:
            return slots
        codes = self._codes(self.num_slots, slots.shape[1], tiles)
        call = Call(
            kind=Kind.EXPERTS_CODING, type=DTYPES[slots.dtype], x=slots.data_ptr(), x_stride=slots.stride(0),
            inputs=slots.shape[1], bits=tiles.bits, scratch=codes.data_ptr(), input_bits=tiles.input_bits,
            mixture=self.mixture,
        )  # fmt: skip
        self.calls.take(self.num_rows, call)
        return codes

    def product(self, slots: Tensor, tiles: ExpertTiles, activation: Activation | None = None) -> Tensor:
        """Multiply each expert's slots with its matrix; without an activation in float32, if it can be.

        slots: in codes where weights are.
        """
        dtype = tiles.dtype if activation is not None or tiles.bias is not None else torch.float32
        out = self.calls.empty(self.num_slots, tiles.width, dtype)
        call = Call(
            kind=Kind.EXPERTS, type=DTYPES[tiles.dtype], out_type=DTYPES[dtype], out=out.data_ptr(),
            out_stride=tiles.width, inputs=tiles.inputs, width=tiles.width, weights=tiles.data.data_ptr(),
            bias=None if tiles.bias is None else tiles.bias.data_ptr(), after=GATED if tiles.gated else PLAIN,
            activation=activation or Activation.NONE, scale=1.0, bits=tiles.bits, is_float=tiles.is_float,
            input_bits=tiles.input_bits, mixture=self.mixture,
        )  # fmt: skip
        call.mixture.expert_bytes = tiles.data.stride(0) * tiles.data.element_size()
        if not tiles.codes_inputs:
            call.x, call.x_stride = slots.data_ptr(), slots.stride(0)
        else:
            call.scratch = slots.data_ptr()
        self.calls.take(self.num_rows, call)
        return out

    def summed(
        self, made: Tensor, x: Tensor, shared: SharedRows | None, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Return rows' sums. made: of slots."""
        calls, width = self.calls, made.shape[1]
        out = calls.empty(self.num_rows, width, x.dtype) if residual is None else residual
        call = Call(
            kind=Kind.SUMMING, type=DTYPES[made.dtype], out_type=DTYPES[x.dtype], x=made.data_ptr(), x_stride=width,
            out=out.data_ptr(), out_stride=out.stride(0), width=width, scale=scale, mixture=self.mixture,
        )  # fmt: skip
        if residual is not None:
            call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
        gates = None  # is kept until the call is taken
        if shared is not None:
            require(shared.made.is_contiguous(), "shared: rows must follow one another")
            call.mixture.shared = shared.made.data_ptr()
            if shared.gate is not None:
                gates = _logits(calls, x, shared.gate)
                call.mixture.shared_gates = gates.data_ptr()
        calls.take(self.num_rows, call)
        return out

    def _codes(self, num_rows: int, inputs: int, tiles: ExpertTiles) -> Tensor:
        return self.calls.empty(num_rows, inputs * tiles.input_bits // 8 + inputs // 4, torch.uint8)
