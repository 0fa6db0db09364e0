"""Places a request where both its objectives are likely met at the least cost; else lets it wait, or refuses it.

Invariant: a request is refused or held only on the word of a model that has seen enough, lately; and never once it
has been admitted.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from enum import Enum, auto
from heapq import nlargest
from math import inf

from pdserve.errors import Status
from pdserve.router.events import Refused
from pdserve.router.forecast import Forecast, Prompt
from pdserve.router.outlook import Outlook
from pdserve.router.pairing import best_way, sample
from pdserve.router.placement import Decision, Demand, Group, Held, Pair, Placed
from pdserve.router.view import WorkerView
from pdserve.values import value

_MOST_LENIENT = 0.9  # factor of a predicted time to first token, where nobody waits
# A prompt that a decode worker computes slows all that it decodes. Near the objective it would take the room of several
# requests that prefill workers could hand over, so it may not bring steps beyond this share of it: the longer route is
# taken only while what both routes share is not scarce (trunk reservation; Kelly, Loss networks, 1991).
_LOCAL_SHARE = 0.8
# Workers of a pool; of larger ones, so many at random and as many that hold a prefix. With 12 a placement among 64 + 64
# takes a third longer, and 16 + 16 simulated workers attain no more (docs/measurements/predictions.md).
_MAX_LOOKED_AT = 8


class _Bar(Enum):
    """What keeps a way to serve a request from being taken, whatever it would bring."""

    NO_ROOM = auto()  # on the decode worker, for its pages or in its batch
    FOR_HANDOFFS = auto()  # the decode worker's steps leave time for hand-offs alone


@value
class _Option:
    """One way to serve a request, and what it would bring."""

    pair: Pair
    ttft_s: float  # from now on
    tpot_s: float
    cost_s: float  # the request's own time, and the delay of others
    bar: _Bar | None = None


class Goodput:
    """The policy. `forecast` is the router's.

    The score of a placement is the share of the tighter objective that is left by what is predicted, widened; 0 where
    it is placed though it may miss one.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast

    def __call__(self, groups: Seq[Group], demand: Demand) -> Decision:
        forecast = self._forecast
        cached = forecast.prefixes.match(demand.hashes, demand.now_s)
        prompt = Prompt(demand.num_tokens, demand.num_sequences, cached, demand.priority)
        some = [_some(group, prompt, demand.draw) for group in groups]
        options = [option for group in some for option in self._options(group, prompt, demand)]
        crowding = _crowding(some)
        spares = [self._spare(option, demand, crowding) for option in options]
        good = [place for place, spare in enumerate(spares) if spare >= 0]
        chosen = min(good or range(len(options)), key=lambda place: options[place].cost_s)
        if good or demand.is_admitted or not self._may_refuse(options[chosen], demand):
            return self._place(options[chosen], prompt, demand, max(0.0, spares[chosen]))
        return self._put_off(options, prompt, demand, some)

    # ---- options

    def _options(self, group: Group, prompt: Prompt, demand: Demand) -> Iterator[_Option]:
        """Yield the best hand-off of a group, and the best decode worker to do it all."""
        num_later = max(1.0, self._forecast.lengths.expected(demand.max_tokens) - 1)
        later = num_later, demand.now_s
        outlooks = [Outlook(self._forecast, worker, prompt, later) for worker in group.decodes]
        if group.prefills:
            yield self._handoff(group, outlooks, prompt, demand)
        if group.local and (demand.needs_decode or not group.prefills):
            limit_s = _LOCAL_SHARE * (demand.tpot_slo_s or inf) if group.prefills else inf
            yield min([self._local(outlook, limit_s) for outlook in outlooks], key=_merit(demand))

    def _handoff(self, group: Group, outlooks: list[Outlook], prompt: Prompt, demand: Demand) -> _Option:
        forecast = self._forecast
        if not outlooks:
            firsts = [(forecast.prefill_s(worker, prompt, demand.now_s), worker) for worker in group.prefills]
            ttft_s, prefill = firsts[sample(firsts, demand.draw)]
            biased_s = forecast.ttft_bias[False].factor * ttft_s
            return _Option(Pair(prefill, None), biased_s, 0.0, biased_s)
        way = best_way(forecast, group.prefills, outlooks, prompt, (demand.now_s, demand.draw))
        biased_s, num_later = forecast.ttft_bias[False].factor * way.ttft_s, outlooks[0].num_later
        joins_s = way.transfer_s + way.step_s / 2
        tpot_s = forecast.tpot_bias[False].factor * (way.step_s + joins_s / num_later)
        bar = None if way.has_room else _Bar.NO_ROOM
        return _Option(Pair(way.prefill, way.decode), biased_s, tpot_s, biased_s + tpot_s * num_later, bar)

    def _local(self, outlook: Outlook, limit_s: float) -> _Option:
        """Return what a decode worker would bring that does it all, and may only while its steps are within a limit."""
        forecast, worker, compute_s = self._forecast, outlook.worker, outlook.compute_s
        step_s = outlook.step_s(0.0)
        ttft_s = forecast.ttft_bias[True].factor * outlook.prefill_s(step_s)
        stalled_s = step_s + (outlook.waiting_s + compute_s) / max(1.0, forecast.output_tokens / 2)
        bias, shared_s = forecast.tpot_bias[True].factor, step_s / (1 - outlook.local_share_with_prompt())
        tpot_s = bias * max(shared_s, stalled_s)
        wide_s = bias * shared_s * forecast.tpot_margins[True].factor
        harm_s = compute_s * worker.num_sequences
        cost_s = ttft_s + tpot_s * outlook.num_later + harm_s
        bar = _Bar.FOR_HANDOFFS if wide_s > limit_s else None
        return _Option(Pair(None, worker), ttft_s, tpot_s, cost_s, bar if outlook.has_room(0.0) else _Bar.NO_ROOM)

    # ---- admission

    def _margin(self, option: _Option, crowding: float) -> tuple[float, float]:
        """Return by what factors predictions of both times are widened, as they have come out lately.

        To refuse what might just have been in time pays where others want its place. Where nobody waits, the chance
        is taken: the prediction is narrowed by as much as it would be widened among a crowd.
        """
        is_local = option.pair.prefill is None
        wide = self._forecast.ttft_margins[is_local].factor
        if wide > 1:
            wide = max(_MOST_LENIENT, wide ** (2 * crowding - 1))
        return wide, self._forecast.tpot_margins[is_local].factor

    def _spare(self, option: _Option, demand: Demand, crowding: float) -> float:
        """Return the share of the tighter objective that what is predicted, widened, leaves; below 0: it is missed.

        Without objectives it is 1, and where the option is barred below 0.
        """
        wide_ttft, wide_tpot = self._margin(option, crowding)
        spare = 1.0
        if demand.ttft_slo_s and not demand.is_admitted:
            spare = 1 - (demand.waited_s + option.ttft_s * wide_ttft) / demand.ttft_slo_s
        if demand.needs_decode:
            if option.bar is not None:
                return -1.0
            if demand.tpot_slo_s:
                spare = min(spare, 1 - option.tpot_s * wide_tpot / demand.tpot_slo_s)
        return spare

    def _may_refuse(self, option: _Option, demand: Demand) -> bool:
        if demand.ttft_slo_s is None and demand.tpot_slo_s is None:
            return False
        costs, now_s, decode = self._forecast.costs, demand.now_s, option.pair.decode
        first = option.pair.prefill or decode
        if first is None or not costs.of(first).knows_prefill(now_s):
            return False
        return decode is None or not demand.needs_decode or costs.of(decode).knows_decode(now_s)

    def _idle_s(self, groups: list[Group], prompt: Prompt, demand: Demand) -> tuple[float, float]:
        """Return the time to first token and the time per token of the best workers, if they did nothing else."""
        forecast, num_tokens = self._forecast, prompt.num_tokens
        firsts = [w for group in groups for w in (*group.prefills, *(group.decodes if _is_local(group) else ()))]
        decodes = [w for group in groups for w in group.decodes] if demand.needs_decode else []
        ttft_s = min([forecast.idle_prefill_s(worker, prompt) for worker in firsts])
        return ttft_s, min([forecast.costs.of(worker).decode_s(1, num_tokens) for worker in decodes], default=0.0)

    def _put_off(self, options: list[_Option], prompt: Prompt, demand: Demand, groups: list[Group]) -> Decision:
        """Let a request wait while that can still meet its objectives; refuse it else."""
        crowding = _crowding(groups)
        ttft_slo_s, tpot_slo_s = demand.ttft_slo_s or inf, demand.tpot_slo_s or inf
        soonest = min(options, key=lambda option: option.ttft_s)
        idle_ttft_s, idle_tpot_s = self._idle_s(groups, prompt, demand)
        impossible = _impossible("ttft", ttft_slo_s, idle_ttft_s) or _impossible("tpot", tpot_slo_s, idle_tpot_s)
        if impossible:
            return Refused(Status.RESOURCE_EXHAUSTED, impossible, predicted_ttft_s=idle_ttft_s)
        wide_ttft, _ = self._margin(soonest, crowding)
        predicted_s = demand.waited_s + soonest.ttft_s * wide_ttft
        if predicted_s <= ttft_slo_s:
            crowded = self._crowded(options, demand, crowding)
            wait_s = min(ttft_slo_s - predicted_s, demand.may_wait_s)
            if wait_s > 0:
                return Held(crowded, demand.now_s + wait_s)
            room_s = self._room_s(options)
            text = f"{crowded}; try again in {room_s * 1e3:.0f} ms"
            return Refused(Status.RESOURCE_EXHAUSTED, text, predicted_s, room_s)
        late_s = predicted_s - ttft_slo_s
        text = (
            f"slo.ttft_ms: the first token would come after {predicted_s * 1e3:.0f} ms, "
            f"{ttft_slo_s * 1e3:.0f} were asked for; try again in {late_s * 1e3:.0f} ms"
        )
        return Refused(Status.RESOURCE_EXHAUSTED, text, predicted_ttft_s=predicted_s, retry_after_s=late_s)

    def _crowded(self, options: list[_Option], demand: Demand, crowding: float) -> str:
        """Return why no option is taken, of which some would be in time."""
        ttft_slo_s, tpot_slo_s = demand.ttft_slo_s or inf, demand.tpot_slo_s or inf
        margins = [self._margin(option, crowding) for option in options]
        firsts_s = [demand.waited_s + o.ttft_s * wide for o, (wide, _) in zip(options, margins, strict=True)]
        in_time = [place for place, first_s in enumerate(firsts_s) if first_s <= ttft_slo_s]
        keeping = [place for place in in_time if options[place].tpot_s * margins[place][1] <= tpot_slo_s]
        if any(options[place].bar is _Bar.FOR_HANDOFFS for place in keeping):
            first_s = min(s for s, o in zip(firsts_s, options, strict=True) if o.pair.prefill is not None)
            late = f", by which the first token would come after {first_s * 1e3:.0f} ms" if first_s > ttft_slo_s else ""
            limit_ms, asked_ms = _LOCAL_SHARE * tpot_slo_s * 1e3, tpot_slo_s * 1e3
            return (
                f"slo.tpot_ms: decode workers compute prompts only while they keep {limit_ms:.0f} ms a token, of "
                f"{asked_ms:.0f} asked for, and leave the rest to hand-offs{late}"
            )
        if all(options[place].bar is _Bar.NO_ROOM for place in in_time):
            return f"no decode worker has room for {demand.num_tokens} tokens and their answer now"
        return f"slo.tpot_ms: no decode worker keeps {tpot_slo_s * 1e3:.0f} ms a token now"

    def _room_s(self, options: list[_Option]) -> float:
        """Return when a sequence will probably have ended on one of the decode workers looked at."""
        num_running = sum(option.pair.decode.num_sequences for option in options if option.pair.decode is not None)
        return self._forecast.decoding_s / max(1, num_running)

    def _place(self, option: _Option, prompt: Prompt, demand: Demand, score: float) -> Placed:
        pair = option.pair
        worker = pair.prefill or pair.decode
        cached = 0 if worker is None else min(prompt.cached.get(worker.link, 0), prompt.num_tokens - 1)
        first = f"first token in {option.ttft_s * 1e3:.0f} ms"
        later = "" if pair.decode is None else f", then {option.tpot_s * 1e3:.1f} ms a token on {pair.decode.name}"
        where = f"on {pair.decode.name} itself" if pair.prefill is None and pair.decode else "by hand-off"
        waited = f", after {demand.waited_s * 1e3:.0f} ms" if demand.waited_s > 0.001 else ""
        reason = f"goodput, {where}: {first}{later}, {cached} tokens cached{waited}"
        return Placed(pair, reason, cached, option.ttft_s, option.tpot_s, score)


def _some(group: Group, prompt: Prompt, draw: int) -> Group:
    """Return a group small enough to look at each of its workers."""
    if max(len(group.prefills), len(group.decodes)) <= _MAX_LOOKED_AT:
        return group
    return Group(_sample(group.prefills, prompt, draw), _sample(group.decodes, prompt, draw // 8191), group.local)


def _sample(workers: Seq[WorkerView], prompt: Prompt, draw: int) -> Seq[WorkerView]:
    if len(workers) <= _MAX_LOOKED_AT:
        return workers
    start = draw % len(workers)
    around = [*workers[start : start + _MAX_LOOKED_AT], *workers[: max(0, start + _MAX_LOOKED_AT - len(workers))]]
    near = {worker.link for worker in around}
    holders = [worker for worker in workers if worker.link in prompt.cached and worker.link not in near]
    return around + nlargest(_MAX_LOOKED_AT, holders, key=lambda worker: prompt.cached[worker.link])


def _merit(demand: Demand) -> "_Merit":
    return _Merit(demand.ttft_slo_s or inf, demand.tpot_slo_s or inf)


@value
class _Merit:
    """Orders options: those that keep both objectives first, then by cost."""

    ttft_slo_s: float
    tpot_slo_s: float

    def __call__(self, option: _Option) -> tuple[bool, float]:
        keeps = option.bar is None and option.ttft_s <= self.ttft_slo_s and option.tpot_s <= self.tpot_slo_s
        return not keeps, option.cost_s


def _crowding(groups: Seq[Group]) -> float:
    """Return the share of the workers that could compute a prompt which have others to compute, 0 to 1."""
    workers = [worker for group in groups for worker in (group.prefills or group.decodes)]
    return sum([worker.pending_prefill_tokens > 0 for worker in workers]) / len(workers)


def _is_local(group: Group) -> bool:
    return group.local or not group.prefills


def _impossible(name: str, asked_s: float, idle_s: float) -> str:
    if idle_s <= asked_s:
        return ""
    return f"slo.{name}_ms: {asked_s * 1e3:.0f} ms cannot be met here: an idle cluster would need {idle_s * 1e3:.0f} ms"
