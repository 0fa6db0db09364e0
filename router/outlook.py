"""What a decode worker would be to one request: how long its steps take, and whether it has room. Pure.

One outlook serves both ways to give it the request: by a hand-off, once the prompt is computed, or with its prompt now.
"""

from math import exp

from pdserve.router.because import Cause
from pdserve.router.predict import Prediction, Predictor, Prompt, uncached
from pdserve.router.view import WorkerView

_PAGES_BESIDE = 1.5  # of a sequence: its last one is half full, and one is kept for it to grow into
_USABLE_SHARE = 0.95  # of the pages: answers are longer than their mean, too


class Outlook:
    """One decode worker, for one prompt at one moment."""

    def __init__(self, predictor: Predictor, worker: WorkerView, prompt: Prompt, now_s: float) -> None:
        num_all, width, lengths = worker.num_sequences, prompt.num_sequences, predictor.lengths
        self.worker = worker
        self.num_later = max(1.0, lengths.expected(prompt.max_tokens) - 1)
        self._predictor, self._prompt, self._now_s = predictor, prompt, now_s
        self._costs = costs = predictor.costs.of(worker)
        self._answer_tokens, self._overdue_tokens = lengths.mean_tokens, lengths.overdue_tokens
        self._num_running = running = float(max(0, num_all - worker.num_arriving))
        self._mean_kv = (worker.kv_tokens + prompt.num_tokens * width) / (num_all + width) + self._answer_tokens / 2
        self._running_s = costs.decode_s(running, running * self._mean_kv) if running else 0.0  # a step of these alone
        self._lacks_beside = self._what_lacks_beside()

    def handed_over(self, delay_s: float) -> tuple[float, Cause | None]:
        """Predict the mean step of a request that joins by a hand-off, and say what there is no room for."""
        at_join, others, staying = self._beside(delay_s)
        return self._step_s(at_join, others, staying), self._lacks_beside or self._lacks_pages(at_join)

    def with_prompt(self, fetched_tokens: int = 0) -> tuple[Prediction, float]:
        """Predict what it brings if this worker computes the prompt now, and the seconds that others wait for it.

        `fetched_tokens`: leading ones that it has by then, if those are more than it has now.
        """
        worker, costs, prompt = self.worker, self._costs, self._prompt
        fresh, work = uncached(prompt, worker.link, fetched_tokens)
        num_waiting, waiting_work = worker.waiting_before(prompt.priority)
        compute_s = costs.prefill.marginal_s(fresh, work)  # beside decoding
        step_s, lacks = self.handed_over(0.0)
        num_beside, num_tokens = worker.num_sequences, num_waiting + fresh
        budget = max(1, worker.step_tokens - num_beside)
        ttft_s = costs.prefill_s(num_tokens, waiting_work + work, budget)
        if num_beside:
            ttft_s += -(-num_tokens // budget) * max(0.0, step_s - costs.prefill.step_s)
            ttft_s += step_s / 2  # the step that runs has to end first
        # Until it has its answer, it waits for the prompts that are here: those of half its life come before it.
        stalled_s = (costs.prefill.each_s * num_waiting + compute_s) / max(1.0, self._answer_tokens / 2)
        first = Cause.PREFILL if 2 * fresh >= num_tokens else Cause.QUEUE
        later = Cause.PROMPTS if stalled_s > step_s else Cause.BATCH
        return Prediction(ttft_s, step_s + stalled_s, first, later, lacks), compute_s * num_beside

    def _step_s(self, at_join: float, others: float, staying: float) -> float:
        """Predict the mean step while this worker runs the request.

        Of those that run now, some will have ended when it joins; all that are on their way will have come. From then
        on, as these end, the batch goes towards what arrivals and lengths of lately lead to.
        """
        costs, worker, width = self._costs, self.worker, self._prompt.num_sequences
        batch = at_join + width
        alone_s = costs.decode_s(batch, batch * self._mean_kv)
        ratio = self.num_later / self._answer_tokens
        share = (1 - exp(-ratio)) / ratio
        arriving = self._predictor.sequences_a_second(worker, self._now_s) * self._answer_s(alone_s)
        steady = min(arriving, float(worker.registration.max_num_seqs))
        batch = staying + others * share + steady * (1 - share) + width
        return costs.decode_s(batch, batch * self._mean_kv)

    def _beside(self, delay_s: float) -> tuple[float, float, float]:
        """Return how many sequences there will be when it joins, and how many of them other routers' are.

        Third comes the mean number of this router's own while it decodes, without those that come after it.
        """
        batch, others, running = self.worker.batch, self.worker.others, self._num_running
        overdue, later = self._overdue_tokens, self.num_later
        at_join, staying = float(len(batch.coming)), batch.coming.mean_left(0.0, later, 0.0, overdue)
        fade = 1.0
        if running:
            now = batch.num_steps(self._now_s)
            joins = now + delay_s / self._running_s
            at_join += batch.running.num_left(joins, now, overdue)
            staying += batch.running.mean_left(joins, later, now, overdue)
            fade = exp(-delay_s / self._answer_s(self._running_s))
        unknown = others.num_running * fade + others.num_coming  # nobody knows when these end
        return at_join + unknown, unknown, staying

    def _answer_s(self, step_s: float) -> float:
        """Return how long answers take while steps take so long: a crowd stays longer than answers took of late."""
        return max(1e-6, self._answer_tokens * step_s)

    def _what_lacks_beside(self) -> Cause | None:
        """Return what the request does not fit for beside all that is here and on its way, with their answers."""
        worker, mean_tokens, prompt = self.worker, self._answer_tokens, self._prompt
        present, width = worker.num_sequences, prompt.num_sequences
        if present == 0:
            return None if prompt.num_tokens + width <= worker.kv_capacity else Cause.PAGES
        if present + width > worker.registration.max_num_seqs:
            return Cause.ROWS
        kv_tokens = worker.kv_tokens + present * mean_tokens / 2 + prompt.num_tokens + mean_tokens * width
        kv_tokens += _PAGES_BESIDE * worker.registration.layout.page_size * (present + width)
        return None if kv_tokens <= _USABLE_SHARE * worker.kv_capacity else Cause.PAGES

    def _lacks_pages(self, at_join: float) -> Cause | None:
        """Return PAGES if there are none for the prompt when it is handed over: neither free ones, nor of what ends."""
        worker, page_size = self.worker, self.worker.registration.layout.page_size
        missing = self._prompt.num_tokens - self._prompt.cached.get(worker.link, 0)
        short = -(-missing // page_size) + self._prompt.num_sequences - worker.num_free_pages
        if short <= 0 or not worker.num_sequences:
            return None
        num_ending = worker.num_sequences - at_join
        return None if short <= num_ending * self._mean_kv / page_size else Cause.PAGES
