"""A local cluster that follows a policy, under a load that rises, turns from prompts to answers, and falls.

Every answer is compared with that of one engine alone.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from lab.moves import roles_of
from pdserve.autoscaler.journal import read_record
from pdserve.base.clock import MonotonicClock
from pdserve.base.roles import POOLS, Role
from pdserve.launch.folder import RECORD_FILE
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.chaos import REQUEST_DEADLINE_S
from pdserve.measure.client import Timed, new_tenant, slo_of
from pdserve.measure.html_report import Line, Plot, plot
from pdserve.measure.known_answers import KnownRequest, Lengths, check_answer, known_requests
from pdserve.measure.live import Report, started
from pdserve.measure.outcomes import Objective, Outcome, summarize

LOOK_EVERY_S = 1.0
QUIET = 0.2  # of the full rate


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    rate: float  # requests a second, on average
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class ScalePlan:
    phases: tuple[Phase, ...]
    seconds: float  # of each phase
    objective: Objective
    distinct: int = 30  # different requests of a phase, sent in turn
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    ready: dict[Role, int]
    num_active: int
    num_held: int


@dataclass(frozen=True, slots=True)
class ScaleFindings:
    plan: ScalePlan
    outcomes: tuple[tuple[Outcome, ...], ...] = field(repr=False)  # by phase
    moments: tuple[Moment, ...]
    decisions: tuple[tuple[float, str], ...]  # seconds after the start, and what was decided


def phases(rate: float, prompt_tokens: int, answer_tokens: int) -> tuple[Phase, ...]:
    """Return a load that rises with prompts, turns to answers, and falls; lengths are the longest ones."""
    prompts, answers = Lengths(prompt_tokens, 8), Lengths(32, answer_tokens)
    both = Lengths(prompt_tokens, answer_tokens)
    return (
        Phase("quiet", QUIET * rate, both),
        Phase("prompts", rate, prompts),
        Phase("answers", rate, answers),
        Phase("quiet again", QUIET * rate, both),
    )


def known(plan: ScalePlan, model: str, dtype: str) -> list[list[KnownRequest]]:
    """Return each phase's requests with their right answers."""
    lengths = (phase.lengths for phase in plan.phases)
    return [
        known_requests(model, dtype, plan.distinct, each, plan.seed + number) for number, each in enumerate(lengths)
    ]


def arrivals(plan: ScalePlan, requests: Sequence[Sequence[KnownRequest]]) -> list[tuple[float, int, KnownRequest]]:
    """Return for each request the random moment at which it is sent, its phase, and the request."""
    rng, found = random.Random(f"scale {plan.seed}"), []
    for number, phase in enumerate(plan.phases):
        at_s, end_s, sent = number * plan.seconds, (number + 1) * plan.seconds, 0
        while (at_s := at_s + rng.expovariate(phase.rate)) < end_s:
            found.append((at_s, number, requests[number][sent % len(requests[number])]))
            sent += 1
    return found


async def measure_scale(
    spec: ClusterSpec, plan: ScalePlan, requests: Sequence[Sequence[KnownRequest]], report: Report
) -> ScaleFindings:
    """Start a cluster with its autoscaler, send the load, and watch both."""
    clock, sent, moments = MonotonicClock(), arrivals(plan, requests), list[Moment]()
    async with started(spec, report) as (cluster, live, board):
        began_s = clock.now_s()

        async def watch() -> None:
            while True:
                roles, status = list(roles_of(board.last).values()), board.last
                ready = {role: roles.count(role) for role in Role}
                moments.append(Moment(clock.now_s() - began_s, ready, status.num_active, status.num_held))
                await asyncio.sleep(LOOK_EVERY_S)

        def on_end(outcome: Outcome) -> None:
            check_answer(outcome, [sent[outcome.number][2]])

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            outcomes = await live.client.run([_timed(at_s, each, plan) for at_s, _, each in sent], on_end)
            await asyncio.sleep(len(plan.phases) * plan.seconds - (clock.now_s() - began_s))
            watching.cancel()
        record = read_record(cluster.state.secret_file.with_name(RECORD_FILE))
        lasted_s = clock.now_s() - began_s
    decisions = [(lasted_s - (record.unix_s - each.unix_s), each.text) for each in record.entries]
    by_phase = tuple(
        tuple(o for o, (_, of, _) in zip(outcomes, sent, strict=True) if of == number)
        for number in range(len(plan.phases))
    )
    return ScaleFindings(plan, by_phase, tuple(moments), tuple(decisions))


def _timed(at_s: float, request: KnownRequest, plan: ScalePlan) -> Timed:
    message = request.message(REQUEST_DEADLINE_S, new_tenant())  # nothing of it is cached
    message.slo.CopyFrom(slo_of(plan.objective))
    return at_s, message


def phase_results(found: ScaleFindings) -> list[dict[str, object]]:
    """Return what clients saw of each phase, and how many replicas of each pool served, on average."""
    plan, results = found.plan, list[dict[str, object]]()
    for number, (phase, outcomes) in enumerate(zip(plan.phases, found.outcomes, strict=True)):
        here = [each for each in found.moments if number <= each.at_s / plan.seconds < number + 1]
        replicas = {
            f"{role}_replicas": sum(moment.ready[role] for moment in here) / max(1, len(here)) for role in POOLS
        }
        results.append({**asdict(summarize(phase.name, outcomes, plan.objective, plan.seconds)), **replicas})
    return results


def orders(found: ScaleFindings) -> list[str]:
    """Return the decisions that ordered something, a line each."""
    return [f"{at_s:6.1f} s  {text}" for at_s, text in found.decisions if ": hold" not in text]


def charts(found: ScaleFindings) -> list[Plot]:
    """Return the replicas that serve and the requests under way, over time."""
    label, moments = f"seconds: {', '.join(phase.name for phase in found.plan.phases)}", found.moments
    replicas = [Line(f"{role} replicas", [(each.at_s, each.ready[role]) for each in moments]) for role in POOLS]
    under_way = Line("requests under way", [(each.at_s, each.num_active + each.num_held) for each in moments])
    return [plot("Replicas that serve", (label, "replicas"), replicas), plot("Load", (label, "requests"), [under_way])]
