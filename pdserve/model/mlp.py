"""The MLPs of a model's layers, as values. A layer knows no more of its MLP than this protocol."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.base.errors import ConfigError
from pdserve.kernels.cpu.experts import Router, SharedRows, TiledExperts
from pdserve.kernels.cpu.layers import Activation as CompiledActivation
from pdserve.kernels.cpu.layers import Tiles
from pdserve.kernels.routing import Routing
from pdserve.model import design
from pdserve.model.activations import MlpActivation, XIelu
from pdserve.model.design import Activation
from pdserve.model.device_codes import joined_blocks
from pdserve.model.elementwise import times
from pdserve.model.family import TensorSource
from pdserve.model.ops import Dense, DeviceOps, ExpertStack, GateUp, Linear, Matrix, Mixture, Ops, rows_of, weight_bytes
from pdserve.model.parallel import row_parallel
from pdserve.model.routing import route
from pdserve.model.weights import Rank


class Mlp(Protocol):
    """What a layer does with each token alone."""

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        """Return residual + mlp(x) * scale, all [num_tokens, hidden_size]; the residual may be overwritten.

        Returns mlp(x) if there is no residual.
        """
        ...

    def matrices(self) -> Iterator[Linear | GateUp]:
        """Yield all that is multiplied."""
        ...

    def bytes_read(self, num_rows: int) -> int:
        """Return the bytes of weights that `num_rows` tokens need, as expected before they are known."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear | GateUp
    activation: Activation
    down: Linear
    input_scale: float = 1.0
    output_scale: float = 1.0

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        inner = ops.gated(ops.scaled(x, self.input_scale), self.gate_up, self.activation)
        return down_added(ops, inner, self.down, residual, scale * self.output_scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.gate_up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        return sum(map(weight_bytes, self.matrices()))

    @classmethod
    def build(
        cls, prefix: str, of: design.GatedMlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
    ) -> Self:
        """Put it together; its products are those of the rank's features."""
        gate_name, up_name, down_name = of.names
        inner, group = of.inner_size, tensors.group(f"{prefix}{down_name}")
        rows = rank.rows(group)

        def taken(name: str) -> Matrix:
            return tensors.take_matrix(f"{prefix}{name}", inner, hidden_size, bias=of.bias, shard=rows)

        if of.fused:
            both = tensors.take_matrix(f"{prefix}{gate_name}", 2 * inner, hidden_size, bias=of.bias)
            span = slice(0, inner) if rows is None else rows.span(f"{prefix}{gate_name}", inner)
            gate, up = rows_of(both, span), rows_of(both, slice(inner + span.start, inner + span.stop))
        else:
            gate, up = taken(gate_name), taken(up_name)
        down = tensors.take_matrix(f"{prefix}{down_name}", hidden_size, inner, bias=of.bias, shard=rank.columns(group))
        scales = of.input_scale, of.output_scale
        return cls(ops.held_gate_up(gate, up), of.activation, ops.held(down), *scales)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x)))."""

    up: Linear
    activation: MlpActivation
    down: Linear

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        return down_added(ops, ops.activated(x, self.up, self.activation), self.down, residual, scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        return sum(map(weight_bytes, self.matrices()))

    @classmethod
    def build(
        cls, prefix: str, of: design.PlainMlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
    ) -> Self:
        inner, group = of.inner_size, tensors.group(f"{prefix}{of.down}")
        rows, columns = rank.rows(group), rank.columns(group)
        up = tensors.take_matrix(f"{prefix}{of.up}", inner, hidden_size, bias=of.bias, shard=rows)
        down = tensors.take_matrix(f"{prefix}{of.down}", hidden_size, inner, bias=of.bias, shard=columns)
        activation: MlpActivation = of.activation
        if of.activation is Activation.XIELU:
            scalars = (tensors.take(f"{prefix}act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
            activation = XIelu(*scalars)
        return cls(ops.held(up), activation, ops.held(down))


Unmixed = GatedMlp | PlainMlp


@dataclass(frozen=True, slots=True)
class Shared:
    """An MLP that every token takes beside its experts."""

    mlp: Unmixed
    gate: Tensor | None  # [1, hidden_size]: the sigmoid of its product multiplies the result


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: each token takes the MLPs that the router chooses for it.

    Experts come one after the other, each with all tokens that have chosen it, so only their weights are read. What a
    token gets is summed in the order of the experts, whoever is in the step beside it. Ranks divide the features of
    each expert, and sum what all experts have made.
    """

    router: Dense  # [num_experts, hidden_size]
    bias: Tensor | None  # [num_experts]: see `Routing`
    routing: Routing
    experts: tuple[Unmixed, ...]
    shared: Shared | None
    counts: Tensor  # int64 [num_experts]: tokens that have chosen each so far; each step adds its own
    inputs: int  # of experts: the last features of rows, whose first ones the router takes
    weighs_inputs: bool = False
    shares: Tensor | None = None  # float32 [num_experts], likewise

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        weights, chosen = route(x[:, : self.router.data.shape[1]], self.router, self.bias, self.routing, self.shares)
        x = x[:, x.shape[1] - self.inputs :]
        out = torch.zeros_like(x, dtype=torch.float32)
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens, shares = order // chosen.shape[1], weights.flatten()[order, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        self.counts.add_(counts)
        first = 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if count:
                rows, share = tokens[first : first + count], shares[first : first + count]
                taken = x.index_select(0, rows)
                if self.weighs_inputs:
                    out.index_add_(0, rows, expert.forward(ops, taken * share.to(x.dtype), None).float())
                else:
                    out.index_add_(0, rows, expert.forward(ops, taken, None).float() * share)
                first += count
        if self.shared is not None:
            made, gate = self.shared.mlp.forward(ops, x, None).float(), self.shared.gate
            out += made if gate is None else made * torch.sigmoid(functional.linear(x.float(), gate.float()))
        out = ops.all_reduce(out.mul_(scale).to(x.dtype))
        return out if residual is None else residual.add_(out)

    def matrices(self) -> Iterator[Linear | GateUp]:
        for expert in self.experts:
            yield from expert.matrices()
        if self.shared is not None:
            yield from self.shared.mlp.matrices()

    def bytes_read(self, num_rows: int) -> int:
        """Return what so many tokens read, where each expert is as likely as any other."""
        touched = expected_experts(len(self.experts), self.routing.num_chosen, num_rows)
        always = 0 if self.shared is None else self.shared.mlp.bytes_read(num_rows)
        return int(touched * self.experts[0].bytes_read(1)) + always + self.router.data.nbytes

    @classmethod
    def build(
        cls, prefix: str, of: design.Experts, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
    ) -> "Self | CompiledExperts":
        parts = (hidden_size, tensors, ops, rank)
        routing, shared = of.routing, None
        if of.shared is not None:
            gate = tensors.take(f"{prefix}{of.shared_gate}.weight", (1, hidden_size)) if of.shared_gate else None
            outside = prefix.removesuffix(f"{of.block}.") if of.shared_is_outside else prefix
            shared = Shared(build_unmixed(f"{outside}{of.shared_name}.", of.shared, *parts), gate)
        router = Dense(
            tensors.take(f"{prefix}{of.router}.weight", (of.num_experts, hidden_size)),
            tensors.take(f"{prefix}{of.router}.bias", (of.num_experts,)) if of.router_bias else None,
        )
        shares = tensors.take(f"{prefix}{routing.shares}", (of.num_experts,), exact=True) if routing.shares else None
        bias = _bias_of_choices(f"{prefix}{routing.bias}", of, tensors) if routing.bias else None
        inputs = hidden_size if of.latent is None else of.latent.size
        made = (build_unmixed(f"{prefix}experts.{i}.", of.expert, inputs, *parts[1:]) for i in range(of.num_experts))
        if ops.stacks_experts:
            try:
                stack = _stacked(router, bias, of, made)
            except ValueError as error:
                raise ConfigError(f"{prefix}experts: {error}") from error
            return CompiledExperts(replace(stack, shares=shares), shared)
        first = next(made)
        if not of.weighs_inputs and all(isinstance(each, Tiles) for each in first.matrices()):
            chooses = Router(router.data, routing, bias, None if router.bias is None else router.bias.float(), shares)
            try:
                tiled = _tiled(chooses, of.expert.activation, chain((first,), made))
            except ValueError as error:
                raise ConfigError(f"{prefix}experts: {error}") from error
            return CompiledExperts(tiled, shared)
        counts = torch.zeros(of.num_experts, dtype=torch.int64, device=tensors.device)
        return cls(router, bias, routing, (first, *made), shared, counts, inputs, of.weighs_inputs, shares)


@dataclass(frozen=True, slots=True)
class CompiledExperts:
    """A mixture whose matrices lie together: the same compiled calls compute it, whichever experts are chosen."""

    experts: Mixture
    shared: Shared | None

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        shared = None
        if self.shared is not None:
            shared = SharedRows(self.shared.mlp.forward(ops, x, None), self.shared.gate)
        return ops.mix(x, self.experts, shared, residual, scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from _matrices(self.experts)
        if self.shared is not None:
            yield from self.shared.mlp.matrices()

    def bytes_read(self, num_rows: int) -> int:
        """Return what so many tokens read, where each expert is as likely as any other."""
        of = self.experts
        weight = of.router.weight if isinstance(of, TiledExperts) else of.router.data
        num_chosen = (of.router if isinstance(of, TiledExperts) else of).routing.num_chosen
        touched = expected_experts(len(weight), num_chosen, num_rows)
        every = sum(map(weight_bytes, _matrices(of)))
        always = 0 if self.shared is None else self.shared.mlp.bytes_read(num_rows)
        return int(touched * every / len(weight)) + always + weight.nbytes


def expected_experts(count: int, num_chosen: int, num_rows: int) -> float:
    """Return how many experts so many tokens choose, where each is as likely as any other."""
    return count * (1.0 - (1.0 - num_chosen / count) ** num_rows)


def build_mlp(
    prefix: str, of: design.Mlp, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
) -> GatedMlp | PlainMlp | Experts | CompiledExperts:
    """Put a layer's MLP together from the tensors below `prefix`."""
    parts = (hidden_size, tensors, ops, rank)
    if isinstance(of, design.Experts):
        return Experts.build(prefix, of, *parts)
    assert not isinstance(of, design.BesideExperts), "it has norms, which `layers` builds"
    mlp = build_unmixed(prefix, of, *parts)
    return replace(mlp, down=row_parallel(mlp.down, rank))


def build_unmixed(
    prefix: str, of: design.Unmixed, hidden_size: int, tensors: TensorSource, ops: DeviceOps, rank: Rank
) -> Unmixed:
    """Put an MLP together; its products are those of the rank's features."""
    parts = (hidden_size, tensors, ops, rank)
    if isinstance(of, design.GatedMlp):
        return GatedMlp.build(prefix, of, *parts)
    return PlainMlp.build(prefix, of, *parts)


def _tiled(router: Router, activation: Activation, mlps: Iterable[Unmixed]) -> TiledExperts:
    """Put experts in tiles together; each is given up once it is copied."""

    def pairs() -> Iterator[tuple[Tiles, Tiles]]:
        for mlp in mlps:
            first, down = mlp.matrices()
            if not isinstance(first, Tiles) or not isinstance(down, Tiles):
                raise ValueError("some have codes, and some have none")
            yield first, down

    return TiledExperts.of(router, CompiledActivation[activation.name], pairs())


def _bias_of_choices(name: str, of: design.Experts, tensors: TensorSource) -> Tensor:
    shape = (1, of.num_experts) if of.bias_in_row else (of.num_experts,)
    return tensors.take(name, shape, exact=True).flatten()


def _stacked(router: Dense, bias: Tensor | None, of: design.Experts, mlps: Iterable[Unmixed]) -> ExpertStack:
    """Put experts together; each of floats is given up once it is copied. ValueError if some have codes, some none."""
    rooms, coded = dict[int, Dense](), (list[object](), list[object]())
    for place, mlp in enumerate(mlps):
        for which, each in enumerate(mlp.matrices()):
            if not isinstance(each, Dense):
                coded[which].append(each)
                continue
            stack = rooms.get(which) or rooms.setdefault(which, _room(of.num_experts, each))
            stack.data[place] = each.data
            if stack.bias is not None and each.bias is not None:
                stack.bias[place] = each.bias
    gate_up, down = (
        joined_blocks([*codes, *filter(None, [rooms.get(which)])]) if codes else rooms[which]
        for which, codes in enumerate(coded)
    )
    is_gated = isinstance(of.expert, design.GatedMlp)
    return ExpertStack(router, of.routing, bias, gate_up, of.expert.activation, down, is_gated)


def _room(count: int, like: Dense) -> Dense:
    bias = None if like.bias is None else like.bias.new_empty((count, *like.bias.shape))
    return Dense(like.data.new_empty((count, *like.data.shape)), bias)


def _matrices(of: Mixture) -> Iterator[Linear]:
    """Yield the matrices of all experts."""
    match of:
        case TiledExperts():
            for place in range(len(of.router.weight)):
                yield from (of.gate_up.of_expert(place), of.down.of_expert(place))
        case ExpertStack():
            yield from (of.gate_up, of.down)


def down_added(ops: Ops, inner: Tensor, weight: Linear, residual: Tensor | None, scale: float) -> Tensor:
    """Return the product times `scale`, plus the residual if there is one, which may be overwritten."""
    if residual is None:
        return times(ops.linear(inner, weight), scale)
    return ops.linear_add(inner, weight, residual, scale)
