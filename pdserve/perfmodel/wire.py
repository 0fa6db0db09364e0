"""Step costs that a router has learnt, read from admin.proto for sizing and for simulation."""

from collections.abc import Iterable

from pdserve.perfmodel.curve import Curve, DecodePiece
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

ENOUGH_STEPS = 20  # of a kind, to trust what was learnt of it


def most_seen(learnt: Iterable[admin.LearntCosts], role: "link.Role.ValueType") -> admin.LearntCosts:
    """Return the costs of a role with the most steps; empty costs where there are none. Kinds differ by device."""
    kinds = [costs for costs in learnt if costs.role == role]
    return max(kinds, key=lambda c: c.num_prefill_steps + c.num_decode_steps, default=admin.LearntCosts(role=role))


def prefill_curve(learnt: admin.LearntCosts) -> Curve:
    return Curve(learnt.prefill_step_s, learnt.prefill_token_s, learnt.prefill_work_s)


def decode_pieces(learnt: admin.LearntCosts) -> tuple[DecodePiece, ...]:
    """Return decode costs by size of batch; the largest size seen holds for all beyond."""
    known = [batches for batches in learnt.decode_batches if batches.num_steps >= ENOUGH_STEPS]
    if not known:
        curve = Curve(learnt.decode_step_s, learnt.decode_sequence_s, learnt.decode_kv_token_s)
        return (DecodePiece(None, curve),)
    sizes = [batches.max_sequences for batches in known[:-1]]
    return tuple(
        DecodePiece(size, Curve(batches.step_s, batches.sequence_s, batches.kv_token_s))
        for size, batches in zip([*sizes, None], known, strict=True)
    )
