"""Places a request where both its objectives are likely met at the least cost; else lets it wait, or refuses it.

Invariant: a request is refused or held only on the word of a model that has seen enough, lately; and never once it
has been admitted.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from heapq import nlargest
from math import inf

from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.placement.leaving import Leaving
from pdserve.router.placement.predict import FirstToken, Prediction, Predictor, Prompt
from pdserve.router.placement.prefix_index import Hashes
from pdserve.router.placement.refusals import impossible, late, no_room, reserved, slow
from pdserve.router.placement.routing import Decision, Demand, Group, Held, Pair, Placed
from pdserve.router.placement.sessions import Home
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import LinkId

# A prompt that a decode worker computes slows all that it decodes. Near the objective it would take the room of several
# requests that prefill workers could hand over, so it may not bring steps beyond this share of it: the longer route is
# taken only while what both routes share is not scarce (trunk reservation; Kelly, Loss networks, 1991).
_LOCAL_SHARE = 0.8
# Workers of a pool; of larger ones, so many at random and as many that hold a prefix. With 12 a placement among 64 + 64
# takes a third longer, and 16 + 16 simulated workers attain no more (docs/measurements/predictions.md).
_MAX_LOOKED_AT = 8


@value
class _Option:
    """One way to serve a request, and what it would bring."""

    pair: Pair
    prediction: Prediction
    cost_s: float  # the request's own time, and the delay of others
    num_sequences: int  # on the decode worker
    first: FirstToken | None = None  # of the prefill worker, where there is one


@value
class _First:
    """A prefill worker that computes the prompt."""

    worker: WorkerView
    token: FirstToken
    harm_s: float  # the delay of what it decodes
    away_s: float  # the price of leaving where the conversation lives

    @property
    def cost_s(self) -> float:
        return self.token.ttft_s + self.harm_s + self.away_s


@value
class _Rest:
    """A decode worker that computes the tokens after the first."""

    worker: WorkerView
    step_s: float
    lacks: Cause | None
    total_s: float  # of all these tokens, and `away_s`; infinite where room lacks: it is the last choice
    away_s: float


@value
class _Way:
    """A hand-off between two workers."""

    first: _First
    rest: _Rest
    handoff_s: float  # what is left of it after the first token
    total_s: float


class Goodput:
    """The policy. `predictor` is the router's.

    The score of a placement is 1 - predicted / objective, with margins, of the objective that is closer to being
    missed; 0 if the request is placed although it may miss one.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def __call__(self, groups: Seq[Group], demand: Demand) -> Decision:
        cached = self._predictor.prefixes.match(demand.hashes, demand.now_s)
        hinted = demand.output_tokens
        prompt = Prompt(demand.num_tokens, demand.num_sequences, cached, demand.priority, demand.max_tokens, hinted)
        some = [_some(group, prompt, demand.draw) for group in groups]
        if cached and self._predictor.may_fetch:
            prompt = replace(prompt, holders=self._holders(groups, some, cached, demand.hashes))
        judge = _Judge(self._predictor, demand, _share_queued(some))
        homes: tuple[Home | None, ...] = (None,) if demand.home is None else (demand.home, None)
        for home in homes:  # where the way that its home is worth is not good, home is worth nothing
            options = self._all_options(some, prompt, demand, home)
            slacks = [judge.slack(option) for option in options]
            good = [place for place, slack in enumerate(slacks) if slack >= 0]
            if good:
                break
        chosen = min(good or range(len(options)), key=lambda place: options[place].cost_s)
        if good or demand.is_admitted or not self._may_refuse(options[chosen].pair, demand):
            return _placed(options[chosen], prompt, demand, max(0.0, slacks[chosen]))
        return self._hopeless(some, prompt, demand) or judge.put_off(options, self._room_s(options))

    def _holders(
        self, groups: Seq[Group], some: Seq[Group], cached: dict[LinkId, int], hashes: Hashes
    ) -> tuple[tuple[WorkerView, int], ...]:
        """Return who holds most of a prompt for sure, if a prefill worker that is looked at holds less.

        What was only routed to a worker does not count: it may not be there yet.
        """
        most = max(cached.values())
        if all(cached.get(worker.link, 0) >= most for group in some for worker in group.prefills):
            return ()
        workers = [worker for group in groups for worker in (*group.prefills, *group.decodes) if worker.link in cached]
        most_held = nlargest(_MAX_LOOKED_AT, workers, key=lambda worker: cached[worker.link])
        return tuple([(worker, self._predictor.prefixes.reported(worker.link, hashes)) for worker in most_held])

    # ---- options

    def _all_options(self, groups: Seq[Group], prompt: Prompt, demand: Demand, home: Home | None) -> list[_Option]:
        firsts = [worker for group in groups for worker in group.prefills]
        firsts += [worker for group in groups if group.local or not group.prefills for worker in group.decodes]
        rests = [worker for group in groups for worker in group.decodes]
        leaving = Leaving(self._predictor, prompt, (firsts, rests), home, demand.now_s)
        return [option for group in groups for option in self._options(group, prompt, demand, leaving)]

    def _options(self, group: Group, prompt: Prompt, demand: Demand, leaving: Leaving) -> Iterator[_Option]:
        """Yield the best hand-off of a group, and the best decode worker to do it all."""
        # A worker hands nothing over to itself.
        prefills = [worker for worker in group.prefills if list(group.decodes) != [worker]]
        if prefills:
            yield self._handoff(replace(group, prefills=prefills), prompt, demand, leaving)
        alone = [worker for worker in group.decodes if group.local or worker.role is Role.MIXED]
        if alone and (demand.needs_decode or not prefills):
            reserves = any(worker.role is Role.PREFILL for worker in prefills)
            limit_s = _LOCAL_SHARE * (demand.tpot_slo_s or inf) if reserves else inf
            ways = [self._local(worker, prompt, limit_s, leaving) for worker in alone]
            yield min(ways, key=lambda way: (not _keeps(way.prediction, demand), way.cost_s))

    def _handoff(self, group: Group, prompt: Prompt, demand: Demand, leaving: Leaving) -> _Option:
        """Return the pair by which the whole answer is there soonest; of equal ones, that on which least was placed."""
        decodes = group.decodes
        firsts = [self._first(worker, decodes, prompt, demand.now_s, leaving) for worker in group.prefills]
        if not demand.needs_decode or not decodes:
            one = min(firsts, key=lambda first: (first.cost_s, first.worker.num_placed))
            prediction = Prediction(one.token.ttft_s, 0.0, one.token.because)
            return _Option(Pair(one.worker, None), prediction, one.cost_s, 0, one.token)
        num_later, soonest_s = self._num_later(prompt), min([first.token.ttft_s for first in firsts])
        source = min(firsts, key=lambda first: first.cost_s).worker
        away_s = [leaving.decoding_s(worker, source) for worker in decodes]
        rests = [self._rest(worker, prompt, soonest_s, each_s) for worker, each_s in zip(decodes, away_s, strict=True)]
        least_s, ways = min([rest.total_s for rest in rests]), list[_Way]()
        for first in sorted(firsts, key=lambda first: first.cost_s):
            if ways and first.cost_s + least_s > min([way.total_s for way in ways]):
                break  # the way from it would have to take less than no time
            handoffs_s = self._predictor.handoffs_s(first.worker, decodes, prompt, first.token.cached_tokens)
            after = zip(handoffs_s, rests, range(len(rests)), strict=True)
            after_s, _, place = min(
                [(way_s + rest.total_s, rest.worker.num_placed, place) for way_s, rest, place in after]
            )
            ways.append(_Way(first, rests[place], handoffs_s[place], first.cost_s + after_s))
        way = min(ways, key=lambda way: (way.total_s, way.first.worker.num_placed))
        first, rest = way.first, way.rest
        # The sequence joins half a step, on average, after its pages have landed.
        tpot_s = rest.step_s + (way.handoff_s + rest.step_s / 2) / num_later
        later = Cause.HANDOFF if way.handoff_s > rest.step_s * num_later else Cause.BATCH
        prediction = Prediction(first.token.ttft_s, tpot_s, first.token.because, later, rest.lacks)
        cost_s = first.cost_s + tpot_s * num_later + rest.away_s
        return _Option(Pair(first.worker, rest.worker), prediction, cost_s, rest.worker.num_sequences, first.token)

    def _first(
        self, worker: WorkerView, decodes: Seq[WorkerView], prompt: Prompt, now_s: float, leaving: Leaving
    ) -> _First:
        token, harm_s = self._predictor.first_token(worker, prompt, now_s), 0.0
        if worker.role is Role.MIXED and worker in decodes:  # it computes the prompt beside what it decodes
            beside, harm_s = self._predictor.beside_decoding(worker, prompt, token.cached_tokens)
            token = replace(token, ttft_s=max(token.ttft_s, beside.ttft_s))
        return _First(worker, token, harm_s, leaving.computing_s(worker, token))

    def _rest(self, worker: WorkerView, prompt: Prompt, after_s: float, away_s: float) -> _Rest:
        step_s, lacks = self._predictor.decode_step(worker, prompt, after_s)
        total_s = step_s * self._num_later(prompt) + away_s if lacks is None else inf
        return _Rest(worker, step_s, lacks, total_s, away_s)

    def _local(self, worker: WorkerView, prompt: Prompt, limit_s: float, leaving: Leaving) -> _Option:
        """Return what a decode worker would bring that does it all, and may only while its steps are within a limit."""
        found, harm_s = self._predictor.beside_decoding(worker, prompt)
        if found.has_room and found.tpot_s * self._predictor.tpot_margin.factor(worker.num_sequences) > limit_s:
            found = replace(found, lacks=Cause.RESERVED)
        cost_s = found.ttft_s + found.tpot_s * self._num_later(prompt) + harm_s + leaving.computing_s(worker, None)
        return _Option(Pair(None, worker), found, cost_s, worker.num_sequences)

    def _num_later(self, prompt: Prompt) -> float:
        """Return how many tokens an answer will probably have after its first."""
        return max(1.0, self._predictor.lengths.expected(prompt.max_tokens, prompt.hinted) - 1)

    # ---- admission

    def _may_refuse(self, pair: Pair, demand: Demand) -> bool:
        if demand.ttft_slo_s is None and demand.tpot_slo_s is None:
            return False
        costs, now_s, decode = self._predictor.costs, demand.now_s, pair.decode
        first = pair.prefill or decode
        if first is None or not costs.of(first).knows_prefill(now_s):
            return False
        return decode is None or not demand.needs_decode or costs.of(decode).knows_decode(now_s)

    def _hopeless(self, groups: list[Group], prompt: Prompt, demand: Demand) -> Refused | None:
        """Return a refusal of what even the best workers could not do if they did nothing else."""
        predictor, num_tokens = self._predictor, prompt.num_tokens
        firsts = [w for group in groups for w in group.prefills]
        firsts += [w for group in groups if group.local or not group.prefills for w in group.decodes]
        decodes = [w for group in groups for w in group.decodes] if demand.needs_decode else []
        ttft_s = min([predictor.idle_s(worker, prompt, demand.now_s) for worker in firsts])
        tpot_s = min([predictor.costs.of(worker).token_s(1, num_tokens) for worker in decodes], default=0.0)
        if ttft_s > (demand.ttft_slo_s or inf):
            return impossible("ttft", ttft_s, demand.ttft_slo_s or inf, ttft_s)
        if tpot_s > (demand.tpot_slo_s or inf):
            return impossible("tpot", tpot_s, demand.tpot_slo_s or inf, ttft_s)
        return None

    def _room_s(self, options: list[_Option]) -> float:
        """Return when a sequence will probably have ended on one of the decode workers looked at."""
        answer_s = self._predictor.lengths.mean_tokens * min([option.prediction.tpot_s for option in options])
        return answer_s / max(1, sum([option.num_sequences for option in options]))


class _Judge:
    """Compares predictions with what one request asks for.

    Predictions are multiplied by margins, which are learnt from how predictions have come out lately. Refusing a
    request that might just have been in time pays only if another one takes its place. So the margin of TTFT is raised
    to the power of the share of workers that have prompts waiting: none counts on idle workers, all of it on busy ones.
    """

    def __init__(self, predictor: Predictor, demand: Demand, share_queued: float) -> None:
        """`share_queued`: of the workers that could compute the prompt, those that have others to compute."""
        wide = predictor.ttft_margin.factor
        self._wide_ttft = wide**share_queued if wide > 1 else wide
        self._tpot_margin = predictor.tpot_margin
        self._demand = demand
        self._ttft_slo_s, self._tpot_slo_s = demand.ttft_slo_s or inf, demand.tpot_slo_s or inf

    def _first_s(self, option: _Option) -> float:
        return self._demand.waited_s + option.prediction.ttft_s * self._wide_ttft

    def _each_s(self, option: _Option) -> float:
        # On an empty worker the chance is taken: with a margin that refuses even there, nothing would be learnt.
        wide = self._tpot_margin.factor(option.num_sequences)
        return option.prediction.tpot_s * (wide if option.num_sequences else min(1.0, wide))

    def slack(self, option: _Option) -> float:
        """Return the share of the tighter objective that is left; below 0: it is missed, or there is no room."""
        demand, slack = self._demand, 1.0
        if demand.needs_decode and not option.prediction.has_room:
            return -1.0
        if not demand.is_admitted:
            slack = 1 - self._first_s(option) / self._ttft_slo_s
        return min(slack, 1 - self._each_s(option) / self._tpot_slo_s) if demand.needs_decode else slack

    def put_off(self, options: list[_Option], room_s: float) -> Decision:
        """Let a request wait while that can still meet its objectives; refuse it else."""
        first_s = min([self._first_s(option) for option in options])
        if first_s > self._ttft_slo_s:
            soonest = min(options, key=self._first_s)
            why, again_s = late(soonest.prediction.first, first_s, self._ttft_slo_s), first_s - self._ttft_slo_s
        else:
            why, again_s = self._crowded(options), room_s
            wait_s = min(self._ttft_slo_s - first_s, self._demand.may_wait_s)
            if wait_s > 0:
                return Held(why, self._demand.now_s + wait_s)
        return Refused(why.cause, f"{why.message}; try again in {again_s * 1e3:.0f} ms", first_s, again_s)

    def _crowded(self, options: list[_Option]) -> Refused:
        """Return why no option is taken, of which some would be in time."""
        in_time = [option for option in options if self._first_s(option) <= self._ttft_slo_s]
        causes = [option.prediction.lacks for option in in_time if option.prediction.lacks is not None]
        if Cause.RESERVED in causes and any(self._each_s(option) <= self._tpot_slo_s for option in in_time):
            handed_s = min([self._first_s(option) for option in options if option.pair.prefill is not None])
            late_s = handed_s if handed_s > self._ttft_slo_s else None
            return reserved(_LOCAL_SHARE * self._tpot_slo_s, self._tpot_slo_s, late_s)
        if len(causes) == len(in_time):
            return no_room(causes[0], self._demand.num_tokens)
        quickest = min([option for option in in_time if option.prediction.has_room], key=self._each_s)
        return slow(quickest.prediction.later, self._each_s(quickest), self._tpot_slo_s)


def _placed(option: _Option, prompt: Prompt, demand: Demand, score: float) -> Placed:
    pair, prediction = option.pair, option.prediction
    fetch = None if option.first is None else option.first.fetch
    if option.first is not None:
        cached = option.first.cached_tokens
    else:
        cached = 0 if pair.decode is None else prompt.cached_on(pair.decode)
    first = f"first token in {prediction.ttft_s * 1e3:.0f} ms ({prediction.first})"
    later = "" if pair.decode is None else f", then {prediction.tpot_s * 1e3:.1f} ms a token on {pair.decode.name}"
    later += "" if pair.decode is None else f" ({prediction.later})"
    where = f"on {pair.decode.name} itself" if pair.prefill is None and pair.decode else "by hand-off"
    waited = f", after {demand.waited_s * 1e3:.0f} ms" if demand.waited_s > 0.001 else ""
    reason = f"goodput, {where}: {first}{later}, {cached} tokens cached{waited}"
    if fetch is not None:
        reason += f"; {fetch.summary(prompt.num_tokens)}"
    taken = fetch if fetch is not None and fetch.is_taken else None
    return Placed(pair, reason, cached, prediction.ttft_s, prediction.tpot_s, score, taken)


def _keeps(prediction: Prediction, demand: Demand) -> bool:
    if not prediction.has_room or prediction.ttft_s > (demand.ttft_slo_s or inf):
        return False
    return prediction.tpot_s <= (demand.tpot_slo_s or inf)


def _some(group: Group, prompt: Prompt, draw: int) -> Group:
    """Return a group small enough to look at each of its workers."""
    if max(len(group.prefills), len(group.decodes)) <= _MAX_LOOKED_AT:
        return group
    return Group(_around(group.prefills, prompt, draw), _around(group.decodes, prompt, draw // 8191), group.local)


def _around(workers: Seq[WorkerView], prompt: Prompt, draw: int) -> Seq[WorkerView]:
    if len(workers) <= _MAX_LOOKED_AT:
        return workers
    start = draw % len(workers)
    around = [*workers[start : start + _MAX_LOOKED_AT], *workers[: max(0, start + _MAX_LOOKED_AT - len(workers))]]
    near = {worker.link for worker in around}
    holders = [worker for worker in workers if worker.link in prompt.cached and worker.link not in near]
    return around + nlargest(_MAX_LOOKED_AT, holders, key=lambda worker: prompt.cached[worker.link])


def _share_queued(groups: Seq[Group]) -> float:
    """Return the share of the workers that could compute a prompt which have others to compute, 0 to 1."""
    workers = [worker for group in groups for worker in (group.prefills or group.decodes)]
    return sum([worker.pending_prefill_tokens > 0 for worker in workers]) / len(workers)
