"""Steps as workers report them in link.proto, and costs as routers learn them in admin.proto: written and read."""

from collections.abc import Iterable

from pdserve.base.roles import Role
from pdserve.perfmodel.curve import ENOUGH_STEPS, Curve, DecodePiece, Step, TimedStep
from pdserve.perfmodel.model import LearntCosts
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import ROLE_NUMBERS, layout_to_proto


def write_cost(step: Step, elapsed_s: float, cost: link.StepCost) -> None:
    cost.elapsed_us = round(elapsed_s * 1e6)
    if step.prefill_tokens:
        cost.prefill_tokens, cost.prefill_work = step.prefill_tokens, step.prefill_work
    if step.sequences:
        cost.decode_sequences, cost.decode_kv_tokens = step.sequences, step.kv_tokens
        cost.decode_guesses, cost.decode_kept_guesses = step.guesses, step.kept_guesses


def read_cost(cost: link.StepCost) -> TimedStep:
    guesses = min(cost.decode_guesses, max(0, cost.decode_sequences - 1))
    kept = min(cost.decode_kept_guesses, guesses)
    decoding = cost.decode_sequences, cost.decode_kv_tokens, guesses, kept
    return TimedStep(Step(cost.prefill_tokens, cost.prefill_work, *decoding), cost.elapsed_us / 1e6)


def costs_to_proto(role: Role, device: str, layout: KvLayout, costs: LearntCosts) -> admin.LearntCosts:
    return admin.LearntCosts(
        role=ROLE_NUMBERS[role],
        device=device,
        layout=layout_to_proto(layout),
        prefill_step_s=costs.prefill.step_s,
        prefill_token_s=costs.prefill.each_s,
        prefill_work_s=costs.prefill.context_s,
        decode_step_s=costs.decode.step_s,
        decode_sequence_s=costs.decode.each_s,
        decode_kv_token_s=costs.decode.context_s,
        num_prefill_steps=costs.prefill_fit.num_observed,
        num_decode_steps=costs.decode_fits.num_observed,
        decode_batches=[
            admin.LearntBatches(
                max_sequences=max_sequences,
                step_s=fit.curve.step_s,
                sequence_s=fit.curve.each_s,
                kv_token_s=fit.curve.context_s,
                num_steps=fit.num_observed,
            )
            for max_sequences, fit in costs.decode_fits.seen()
        ],
    )


def most_seen(learnt: Iterable[admin.LearntCosts], role: "link.Role.ValueType") -> admin.LearntCosts:
    """Return the costs of a role with the most steps; empty costs where there are none. Kinds differ by device."""
    kinds = [costs for costs in learnt if costs.role == role]
    return max(kinds, key=lambda c: c.num_prefill_steps + c.num_decode_steps, default=admin.LearntCosts(role=role))


def prefill_curve(learnt: admin.LearntCosts) -> Curve:
    return Curve(learnt.prefill_step_s, learnt.prefill_token_s, learnt.prefill_work_s)


def decode_pieces(learnt: admin.LearntCosts) -> tuple[DecodePiece, ...]:
    """Return decode costs by size of batch; those of the largest size hold for all larger ones."""
    known = [batches for batches in learnt.decode_batches if batches.num_steps >= ENOUGH_STEPS]
    if not known:
        curve = Curve(learnt.decode_step_s, learnt.decode_sequence_s, learnt.decode_kv_token_s)
        return (DecodePiece(None, curve),)
    sizes = [batches.max_sequences for batches in known[:-1]]
    return tuple(
        DecodePiece(size, Curve(batches.step_s, batches.sequence_s, batches.kv_token_s))
        for size, batches in zip([*sizes, None], known, strict=True)
    )
