"""An MLP and experts over the same rows, each between norms of its own, as Gemma 4 adds them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from pdserve.model import design
from pdserve.model.mlp import CompiledExperts, Experts, Mlp, build_mlp
from pdserve.model.ops import GateUp, Linear, Ops, RmsNorm
from pdserve.model.parts import Parts


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """The sum of both."""

    before_mlp: RmsNorm
    mlp: Mlp
    after_mlp: RmsNorm
    before_experts: RmsNorm
    mixture: Experts | CompiledExperts
    after_experts: RmsNorm
    before_router: RmsNorm

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        """Return what both make of rows, which have no norm yet."""
        assert residual is None, "a norm comes after it"
        assert scale == 1.0, "a norm comes after it"
        made = ops.norm(self.mlp.forward(ops, ops.norm(x, self.before_mlp), None), self.after_mlp)
        rows = ops.side_by_side(ops.norm(x, self.before_router), ops.norm(x, self.before_experts))
        mixed = self.mixture.forward(ops, rows, None)
        return ops.norm_add(mixed, self.after_experts, made)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (*self.mlp.matrices(), *self.mixture.matrices())

    def bytes_read(self, num_rows: int) -> int:
        return self.mlp.bytes_read(num_rows) + self.mixture.bytes_read(num_rows)

    @classmethod
    def build(cls, of: design.BesideExperts, parts: Parts, name: str) -> Self:
        """name: of the MLP."""
        prefix, hidden = parts.prefix, parts.config.hidden_size

        def norm(name: str | None) -> RmsNorm:
            found = parts.after(name, of.norm)
            assert found is not None, "both have norms before and after"
            return found

        around_mlp, around_experts = of.around
        given = (hidden, parts.tensors, parts.ops, parts.rank)
        scales = parts.tensors.take(f"{prefix}{of.router_norm}", (hidden,), exact=True) * hidden**-0.5
        return cls(
            norm(around_mlp.before),
            build_mlp(f"{prefix}{name}.", of.mlp, *given),
            norm(around_mlp.after),
            norm(around_experts.before),
            Experts.build(of.experts.within(prefix), of.experts, *given),
            norm(around_experts.after),
            RmsNorm(scales.to(parts.tensors.dtype), of.norm.eps),
        )
