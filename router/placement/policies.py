"""The placement policies by name, and those of them that predict nothing."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import lcm

from pdserve.router.placement.goodput import Goodput
from pdserve.router.placement.predict import Predictor
from pdserve.router.placement.routing import Decision, Demand, Group, Pair, Placed, Policy, paired
from pdserve.router.placement.view import WorkerView


def least_loaded(groups: Seq[Group], demand: Demand) -> Decision:
    """Take the fewest prompt tokens to wait for and the emptiest decode batch; then take turns.

    The score is the share that is free: of the batch, or of the longest prompt's room in the queue if that is less.
    """
    best = min((_emptiest(group) for group in groups), key=_pair_load)
    computes = best.prefill or best.decode
    waiting = (
        [] if computes is None else [f"{computes.name} has {computes.pending_prefill_tokens} prompt tokens waiting"]
    )
    if best.decode is not None:
        waiting.append(f"{best.decode.name} {best.decode.num_sequences} sequences")
    return Placed(best, f"least loaded: {', '.join(waiting)}", score=max(0.0, 1 - max(_shares(best))))


def _emptiest(group: Group) -> Pair:
    prefill = min(group.prefills, key=lambda w: (_queue_share(w), w.num_placed, w.name), default=None)
    decode = min(group.decodes, key=lambda w: (_batch_share(w), w.num_placed, w.name), default=None)
    return paired(prefill, decode)


def _pair_load(pair: Pair) -> tuple[bool, float]:
    queue, batch = _shares(pair)
    return batch >= 1.0, queue + batch


def _shares(pair: Pair) -> tuple[float, float]:
    computes, decode = pair.prefill or pair.decode, pair.decode
    return 0.0 if computes is None else _queue_share(computes), 0.0 if decode is None else _batch_share(decode)


def _queue_share(worker: WorkerView) -> float:
    """Return the prompt tokens in front, in units of the longest prompt."""
    return worker.pending_prefill_tokens / worker.registration.max_model_len


def _batch_share(worker: WorkerView) -> float:
    return worker.num_sequences / worker.registration.max_num_seqs


def round_robin(groups: Seq[Group], demand: Demand) -> Decision:
    """Take the workers of each pool in turn, in the order of their names; in time, every pair."""
    turn = demand.turn
    group = groups[turn % len(groups)]
    turn //= len(groups)
    round_length = lcm(max(1, len(group.prefills)), max(1, len(group.decodes)))
    prefill, decode = _in_turn(group.prefills, turn), _in_turn(group.decodes, turn + turn // round_length)
    return Placed(paired(prefill, decode), f"turn {demand.turn}")


def _in_turn(workers: Seq[WorkerView], turn: int) -> WorkerView | None:
    return sorted(workers, key=lambda worker: worker.name)[turn % len(workers)] if workers else None


POLICIES: dict[str, Callable[[Predictor], Policy]] = {
    "goodput": Goodput,
    "least_loaded": lambda _: least_loaded,
    "round_robin": lambda _: round_robin,
}
