"""A live cluster at shares of its capacity, beside a simulation of the same requests."""

from dataclasses import replace

from pdserve.capacity.cluster import simulate
from pdserve.capacity.worker import Shape
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.live import Report, live_cluster
from pdserve.measure.outcomes import Summary, summarize
from pdserve.measure.overload import Findings, Trial, calibrate, served
from pdserve.measure.profile import learnt_profile
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link


async def measure_simulator(spec: ClusterSpec, policy: str, trial: Trial, report: Report) -> tuple[Findings, Profile]:
    """Serve each load live, then simulate it with the profile that the router has learnt by then."""
    runs = list[Summary]()
    async with live_cluster(spec, report) as cluster:
        goal = await calibrate(cluster, trial, report)
        async for load, arrivals, outcomes in served(cluster, trial, goal, report):
            status = await cluster.status()
            profile = learnt_profile(status, "lab simulator")
            sent = Workload("live", tuple(arrivals), exact=True)
            simulated = simulate(profile, shape_of(status), policy, sent, goal.objective)
            for side, seen in (("live", outcomes), ("simulated", simulated.outcomes)):
                runs.append(summarize(f"{load:.0%}, {side}", seen, goal.objective, trial.seconds))
    return replace(goal, runs=tuple(runs)), profile


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
