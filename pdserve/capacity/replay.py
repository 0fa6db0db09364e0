"""The capacity simulator beside a live cluster: the same requests, with what the router has learnt for a profile."""

from pdserve.capacity.cluster import simulate
from pdserve.capacity.shape import Shape
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.live import Findings, LoadRun, Report, Trial, live_cluster
from pdserve.measure.overload import find_goal
from pdserve.measure.profile import learnt_profile
from pdserve.measure.summary import shown_all, summarize
from pdserve.measure.tables import Column, Sheet
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

_COLUMNS = (
    Column("load", "share of the capacity"),
    Column("side", is_text=True),
    Column("goodput/s", "requests within both objectives"),
    Column("attained", "share of all requests within both objectives", rank=1),
    Column("refused", rank=1),
    Column("TTFT", "p50 / p90 / p99, ms"),
    Column("TPOT", "p50 / p90 / p99, ms"),
    Column("TPOT error", "median of |predicted - seen| / seen", rank=2),
)


async def measure_simulator(spec: ClusterSpec, policy: str, trial: Trial, report: Report) -> tuple[Findings, Profile]:
    """Serve each load live, then simulate it with the profile that the router has learnt by then."""
    runs = list[LoadRun]()
    async with live_cluster(spec, report) as cluster:
        goal = await find_goal(cluster, trial, report)
        objective = goal.objective
        async for load, arrivals, outcomes in cluster.loaded(trial, goal.capacity_per_s, objective, report):
            status = await cluster.status()
            profile = learnt_profile(status, "pdserve bench simulator")
            sent = Workload("live", tuple(arrivals), exact=True)
            simulated = simulate(profile, shape_of(status), policy, sent, objective)
            runs.append(LoadRun(load, summarize("live", outcomes, objective, trial.seconds)))
            runs.append(LoadRun(load, summarize("simulated", simulated.outcomes, objective, trial.seconds)))
    return Findings(goal.workload, goal.capacity_per_s, objective, tuple(runs)), profile


def shape_of(status: admin.ClusterStatus) -> Shape:
    """Return the simulator's description of a live cluster."""
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


def replay_table(found: Findings) -> Sheet:
    """Return two rows a load, live and simulated."""
    rows = []
    for run in found.runs:
        side = run.summary
        rates = (f"{side.goodput_per_s:.2f}", f"{side.attainment:.1%}", f"{side.refused:.1%}")
        error = "-" if side.tpot_error is None else f"{side.tpot_error.p50:.1%}"
        rows.append(
            (f"{run.load:.0%}", side.name, *rates, shown_all(side.ttft_s, 1e3), shown_all(side.tpot_s, 1e3), error)
        )
    return Sheet(found.title, _COLUMNS, rows)
