"""Between which two workers a hand-off is best made: their own times, and the time of the way between them. Pure.

Of choices nearly as good as the best, the better of two sampled at random is taken: requests that come together, to one
router or to several, do not all go to one worker.
"""

from collections.abc import Sequence as Seq

from pdserve.router.events import LinkId
from pdserve.router.forecast import Forecast, Prompt
from pdserve.router.outlook import Outlook
from pdserve.router.view import WorkerView
from pdserve.values import value

_NEAR = 0.02  # costs that differ by less are as good as equal
_NEAR_S = 0.002
_NO_ROOM_S = 1.0  # a step: a decode worker without room is the last choice


@value
class Way:
    """A hand-off between two workers, and what it would bring."""

    prefill: WorkerView
    decode: WorkerView
    ttft_s: float
    step_s: float  # of the decode worker, once the sequence is there
    transfer_s: float  # what is left of the hand-off after the first token
    has_room: bool  # on the decode worker


Scored = tuple[float, WorkerView]


def best_way(
    forecast: Forecast, prefills: Seq[WorkerView], outlooks: Seq[Outlook], prompt: Prompt, moment: tuple[float, int]
) -> Way:
    """Choose a hand-off; `moment` is the time and random bits."""
    now_s, bits = moment
    firsts = [(forecast.prefill_s(worker, prompt, now_s), worker) for worker in prefills]
    soonest_s, num_later = min([ttft_s for ttft_s, _ in firsts]), outlooks[0].num_later
    workers = [outlook.worker for outlook in outlooks]
    rooms = [outlook.has_room(soonest_s) for outlook in outlooks]
    steps_s = [outlook.step_s(soonest_s) / (1 - outlook.local_share) for outlook in outlooks]
    decodes_s = [step_s if has_room else step_s + _NO_ROOM_S for step_s, has_room in zip(steps_s, rooms, strict=True)]
    least_s, nearest_s = min(decodes_s) * num_later, float("inf")
    scored: list[Scored] = []
    transfers_s: dict[LinkId, list[float]] = {}
    for ttft_s, worker in sorted(firsts, key=_score):
        if ttft_s > nearest_s:
            break  # the way from it would have to take less than no time
        ways_s = transfers_s[worker.link] = forecast.handoffs_s(worker, workers, prompt)
        rest_s = min([each_s * num_later + way_s for each_s, way_s in zip(decodes_s, ways_s, strict=True)])
        scored.append((ttft_s + rest_s - least_s, worker))
        nearest_s = min(nearest_s, _near(scored[-1][0]))
    prefill = scored[sample(scored, bits)][1]
    ways_s = transfers_s[prefill.link]
    chosen = sample(
        [(decodes_s[n] + ways_s[n] / num_later, outlook.worker) for n, outlook in enumerate(outlooks)], bits // 4099
    )
    ttft_s = next(ttft_s for ttft_s, worker in firsts if worker is prefill)
    return Way(prefill, outlooks[chosen].worker, ttft_s, steps_s[chosen], ways_s[chosen], rooms[chosen])


def sample(scored: Seq[Scored], bits: int) -> int:
    """Return the place of one of the best: of those nearly as good as the best, the better of two at random."""
    limit = _near(min([score for score, _ in scored]))
    near = [place for place, (score, _) in enumerate(scored) if score <= limit]
    one, other = near[bits % len(near)], near[(bits // 65537) % len(near)]
    return one if one == other else min(one, other, key=lambda place: _fullness(scored[place]))


def _near(score: float) -> float:
    return score * (1 + _NEAR) + _NEAR_S


def _score(entry: Scored) -> float:
    return entry[0]


def _fullness(entry: Scored) -> tuple[float, int, LinkId]:
    score, worker = entry
    return score, worker.num_placed, worker.link
