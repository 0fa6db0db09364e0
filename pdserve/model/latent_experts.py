"""A mixture in a latent space (Nemotron 3 Super, 2026): experts take a narrow row of each token, and make one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from pdserve.model import design
from pdserve.model.mlp import CompiledExperts, Experts, Unmixed, build_unmixed, down_added
from pdserve.model.ops import GateUp, Linear, Ops, weight_bytes
from pdserve.model.parallel import row_parallel
from pdserve.model.parts import Parts


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts between two products, and an MLP beside them that every token takes.

    Ranks have both products whole, and add what their parts of the experts have made between them.
    """

    into: Linear  # [latent_size, hidden_size]
    mixture: Experts | CompiledExperts
    out_of: Linear  # [hidden_size, latent_size]
    shared: Unmixed | None

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        made = self.mixture.forward(ops, ops.side_by_side(x, ops.linear(x, self.into)), None)
        if self.shared is not None:
            residual = self.shared.forward(ops, x, residual, scale)
        return down_added(ops, made, self.out_of, residual, scale)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.into, *self.mixture.matrices(), self.out_of)
        if self.shared is not None:
            yield from self.shared.matrices()

    def bytes_read(self, num_rows: int) -> int:
        """Return what so many tokens read, where each expert is as likely as any other."""
        shared = 0 if self.shared is None else self.shared.bytes_read(num_rows)
        return weight_bytes(self.into) + self.mixture.bytes_read(num_rows) + weight_bytes(self.out_of) + shared

    @classmethod
    def build(cls, prefix: str, of: design.Experts, latent: design.Latent, parts: Parts) -> Self:
        tensors, ops, rank, hidden = parts.tensors, parts.ops, parts.rank, parts.config.hidden_size
        shared = None
        if of.shared is not None:
            shared = build_unmixed(f"{prefix}{of.shared_name}.", of.shared, hidden, tensors, ops, rank)
            shared = replace(shared, down=row_parallel(shared.down, rank))
        into, out_of = (
            ops.held(tensors.take_matrix(f"{prefix}{name}", *shape))
            for name, shape in ((latent.into, (latent.size, hidden)), (latent.out_of, (hidden, latent.size)))
        )
        mixture = Experts.build(prefix, replace(of, shared=None), hidden, tensors, ops, rank)
        return cls(into, mixture, out_of, shared)
