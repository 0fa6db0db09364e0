"""What a decode worker would be to one request: how long its steps take, and whether it has room. Pure.

One outlook serves both ways to give it the request: by a hand-off, once the prompt is computed, or with its prompt now.
"""

from math import exp

from pdserve.router.forecast import Forecast, Prompt, uncached
from pdserve.router.view import WorkerView
from pdserve.values import value

_LEAST_ANSWER_S = 0.05
_PAGES_BESIDE = 1.5  # of a sequence: its last one is half full, and one is kept for it to grow into


@value
class _Crowd:
    """The sequences beside a request while it decodes, without those that come after it."""

    at_join: float  # when it joins
    fading: float  # those of them that end nobody knows when
    staying: float  # of the others, those there are on average while it decodes


class Outlook:
    """One decode worker, for one prompt at one moment."""

    def __init__(self, forecast: Forecast, worker: WorkerView, prompt: Prompt, later: tuple[float, float]) -> None:
        """`later`: how many tokens the request will take part in, and the present moment."""
        num_all, width, output_tokens = worker.num_sequences, prompt.num_sequences, forecast.output_tokens
        costs = forecast.costs.of(worker)
        self.worker = worker
        self._forecast = forecast
        self._costs = costs
        self.num_later, now_s = later
        self._now_s = now_s
        self._width = width
        self._num_running = running = float(max(0, num_all - worker.num_arriving))
        self._mean_kv = (worker.kv_tokens + prompt.num_tokens * width) / (num_all + width) + output_tokens / 2
        self._running_s = costs.decode_s(running, running * self._mean_kv) if running else 0.0  # a step of these alone
        self._rate = forecast.sequences_a_second(worker, now_s)
        self._local_s = forecast.local_s(worker, now_s)
        self.local_share = forecast.local_share(self._local_s)  # of this worker's time: what goes to prompts
        self._answer_steps = output_tokens / (1 - self.local_share)
        self._fresh, self._work = uncached(prompt, worker.link)
        curve = costs.prefill
        self._num_waiting, self._waiting_work = worker.waiting_before(prompt.priority)
        self.compute_s = curve.marginal_s(self._fresh, self._work)  # of the prompt, beside decoding
        self.waiting_s = curve.each_s * self._num_waiting  # of prompts that are here already
        self._prompt = prompt
        self._fits = self._fits_beside()

    def step_s(self, delay_s: float) -> float:
        """Predict the mean step time while this worker runs the request, which joins `delay_s` from now.

        Of those that run now, some will have ended when it joins; all that are on their way will have come. From then
        on, as these end, the batch goes towards what arrivals and lengths of lately lead to.
        """
        forecast, costs, worker = self._forecast, self._costs, self.worker
        crowd = self._crowd(delay_s)
        batch = crowd.at_join + self._width
        alone_s = costs.decode_s(batch, batch * self._mean_kv)
        slowdown = costs.decode_slowdown(forecast.machines.expected(worker, alone_s * self.num_later))
        answer_s = self._answer_s(alone_s * slowdown)
        ratio = max(1e-6, alone_s * slowdown * self.num_later / answer_s)
        share = (1 - exp(-ratio)) / ratio
        steady = min(self._rate * answer_s, float(worker.registration.max_num_seqs))
        batch = crowd.staying + crowd.fading * share + steady * (1 - share) + self._width
        return costs.decode_s(batch, batch * self._mean_kv) * slowdown

    def _crowd(self, delay_s: float) -> "_Crowd":
        """Return who will be there when the request joins."""
        running, batch, later = self._num_running, self.worker.batch, self.num_later
        fade = exp(-delay_s / self._answer_s(self._running_s)) if running and delay_s else 1.0
        if not self._forecast.lengths.follow_limits:
            fading = running * fade + self.worker.num_arriving
            return _Crowd(fading, fading, 0.0)
        overdue_steps = self._forecast.lengths.overdue_tokens
        staying, at_join = batch.coming.mean_left(0.0, later, 0.0, overdue_steps), float(len(batch.coming))
        if running:
            now = batch.num_steps(self._now_s)
            joins = now + delay_s / self._running_s
            at_join += batch.running.num_left(joins, now, overdue_steps)
            staying += batch.running.mean_left(joins, later, now, overdue_steps)
        others = self.worker.others
        fading = others.num_running * fade + others.num_coming
        return _Crowd(at_join + fading, fading, staying)

    def _answer_s(self, step_s: float) -> float:
        """Return how long answers take while steps take so long: a crowd stays longer than answers took of late."""
        return max(_LEAST_ANSWER_S, self._answer_steps * step_s)

    def local_share_with_prompt(self) -> float:
        """Return the share of this worker's time that would go to prompts with this one."""
        return self._forecast.local_share(self._local_s + self.compute_s)

    def prefill_s(self, step_s: float) -> float:
        """Predict when the first token comes if this worker computes the prompt, and goes on decoding meanwhile."""
        worker, costs, running = self.worker, self._costs, self.worker.num_sequences
        budget, work = max(1, worker.step_tokens - running), self._waiting_work + self._work
        num_tokens = self._num_waiting + self._fresh
        total_s = costs.prefill_s(num_tokens, work, budget)
        if not running:
            return total_s
        total_s += -(-num_tokens // budget) * max(0.0, step_s - costs.prefill.step_s)
        return total_s + step_s / 2  # the step that runs has to end first

    def has_room(self, delay_s: float) -> bool:
        """Return whether there will probably be pages and a row for the request when it joins, and until it ends."""
        return self._fits and self._has_pages_at(delay_s)

    def _fits_beside(self) -> bool:
        """Return whether the request fits beside all that is here and on its way, with their answers."""
        worker, mean_tokens, prompt = self.worker, self._forecast.output_tokens, self._prompt
        present = worker.num_sequences
        if present == 0:
            return prompt.num_tokens + self._width <= worker.kv_capacity
        count = present + self._width
        coming = prompt.num_tokens + mean_tokens * self._width
        held = worker.kv_tokens * present / max(1, worker.num_sequences)
        kv_tokens = held + present * mean_tokens / 2 + coming
        kv_tokens += _PAGES_BESIDE * worker.registration.layout.page_size * count
        return count <= worker.registration.max_num_seqs and kv_tokens <= 0.95 * worker.kv_capacity

    def _has_pages_at(self, delay_s: float) -> bool:
        """Return whether the worker has pages for the prompt when it is handed over: free ones, or of what ends."""
        worker, page_size = self.worker, self.worker.registration.layout.page_size
        missing = self._prompt.num_tokens - self._prompt.cached.get(worker.link, 0)
        short = -(-missing // page_size) + self._width - worker.num_free_pages
        if short <= 0 or not worker.num_sequences:
            return True
        num_ending = worker.num_sequences - self._crowd(delay_s).at_join
        return short <= num_ending * self._mean_kv / page_size
