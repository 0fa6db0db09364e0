"""The capacity simulator beside a live cluster: the same requests, with what the router has learnt for a profile."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.errors import Errors, errors_of
from pdserve.bench.summary import Percentiles, Sample, percentiles
from pdserve.bench.workload import Arrival
from pdserve.capacity.cluster import simulate
from pdserve.capacity.shape import Objective, Outcome, Shape
from pdserve.capacity.workload import Arrival as SimArrival
from pdserve.capacity.workload import Workload
from pdserve.experiments.learnt import learnt_profile
from pdserve.experiments.live import LiveCluster, Tell
from pdserve.experiments.overload import Goal, Trial
from pdserve.perfmodel.profile import Profile
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: what clients saw."""

    name: str
    goodput_per_s: float
    attainment: float
    refused: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    tpot_errors: Errors | None  # of what was predicted for those that were served


@dataclass(frozen=True, slots=True)
class Replay:
    """A load, live and simulated."""

    load: float
    live: Side
    simulated: Side


async def replay(
    cluster: LiveCluster, policy: str, goal: Goal, trial: Trial, tell: Tell
) -> list[tuple[Replay, Profile]]:
    """Serve each load live and simulate it with the profile that the router has learnt by then."""
    found = []
    for number, load in enumerate(trial.loads, start=2):
        tell(f"{policy} at {load:.0%} of the capacity, live and simulated")
        arrivals = trial.lengths.poisson(load * goal.capacity_per_s, trial.seconds, trial.seed + number)
        samples = await cluster.run(arrivals, goal.slo, trial.seed + number)
        status = await cluster.status()
        profile = learnt_profile(status, "pdserve bench simulator")
        run = simulate(profile, shape_of(status), policy, _workload(arrivals), _objective(goal))
        live = _live(samples, goal, trial.seconds)
        found.append((Replay(load, live, _simulated(run.outcomes, goal, trial.seconds)), profile))
    return found


def shape_of(status: admin.ClusterStatus) -> Shape:
    """Return the simulator's words for a cluster."""
    workers = [worker.registration for worker in status.workers]
    prefills = [worker for worker in workers if worker.role == link.ROLE_PREFILL]
    decodes = [worker for worker in workers if worker.role == link.ROLE_DECODE]
    return Shape(
        prefill=len(prefills),
        decode=len(decodes),
        prefill_chunk=prefills[0].max_num_batched_tokens,
        decode_chunk=decodes[0].max_num_batched_tokens,
        max_num_seqs=decodes[0].max_num_seqs,
        local_prefill=False,
    )


def _workload(arrivals: Sequence[Arrival]) -> Workload:
    return Workload("live", tuple(SimArrival(a.start_s, a.prompt_len, a.output_len) for a in arrivals), exact=True)


def _objective(goal: Goal) -> Objective:
    ttft_ms, tpot_ms = goal.slo.ttft_ms, goal.slo.tpot_ms
    return Objective((ttft_ms or 1e9) / 1e3, (tpot_ms or 1e9) / 1e3)


def _live(samples: Sequence[Sample], goal: Goal, seconds: float) -> Side:
    num_met = sum(goal.slo.is_met(sample) for sample in samples)
    served = [sample for sample in samples if sample.status == "OK"]
    ttfts_s = [sample.ttft_s for sample in served if sample.ttft_s is not None]
    tpots = [(sample.predicted_tpot_s, sample.tpot_s) for sample in served if sample.tpot_s is not None]
    return _side("live", (num_met, len(served), len(samples)), ttfts_s, tpots, seconds)


def _simulated(outcomes: Sequence[Outcome], goal: Goal, seconds: float) -> Side:
    objective = _objective(goal)
    num_met = sum(outcome.meets(objective) for outcome in outcomes)
    served = [outcome for outcome in outcomes if not outcome.refused]
    ttfts_s = [outcome.ttft_s for outcome in served]
    tpots = [(outcome.predicted_tpot_s, outcome.tpot_s) for outcome in served if outcome.num_tokens > 1]
    return _side("simulated", (num_met, len(served), len(outcomes)), ttfts_s, tpots, seconds)


def _side(
    name: str,
    counts: tuple[int, int, int],
    ttfts_s: Sequence[float],
    tpots_s: Sequence[tuple[float | None, float]],
    seconds: float,
) -> Side:
    """`tpots_s`: as predicted and as seen."""
    num_met, num_served, num_all = counts
    return Side(
        name=name,
        goodput_per_s=num_met / seconds,
        attainment=num_met / max(1, num_all),
        refused=1 - num_served / max(1, num_all),
        ttft_ms=percentiles([1e3 * value for value in ttfts_s]),
        tpot_ms=percentiles([1e3 * seen_s for _, seen_s in tpots_s]),
        tpot_errors=errors_of(tpots_s),
    )
