"""Predicts the time to first token and the time per token of each way to serve a request. Pure.

Learns as it goes from what workers report: step times of each kind of worker, bandwidths of pairs, lengths of answers,
prefixes routed, and how predictions have come out.
"""

from collections.abc import Sequence as Seq
from math import exp, inf

from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.perfmodel.curve import Step, StepCosts, attention_work
from pdserve.perfmodel.margin import Margin, MarginBySize
from pdserve.perfmodel.model import MEMORY, LearntLinks
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.refusal import Cause
from pdserve.protocol.reports import LoadPart
from pdserve.router.placement.learnt import AnswerLengths, CostsByKind, Fetches, Rates
from pdserve.router.placement.prefix_index import UNKEYED, Hashes, PrefixIndex
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Fetch
from pdserve.router.requests.events import LinkId


@value
class Prompt:
    """What of a request predictions depend on."""

    num_tokens: int
    num_sequences: int
    cached: dict[LinkId, int]  # leading tokens that workers probably hold
    priority: int = 0
    max_tokens: int = 1 << 30  # of each answer, still to come
    hinted: int = 0  # tokens of each answer that the client expects, still to come; 0: it did not say
    holders: tuple[tuple[WorkerView, int], ...] = ()  # that may send so many leading tokens to workers of their kind

    def cached_on(self, worker: WorkerView, fetched_tokens: int = 0) -> int:
        """Return how many leading tokens a worker need not compute; it computes the last one in any case."""
        return min(max(self.cached.get(worker.link, 0), fetched_tokens), self.num_tokens - 1)

    def after(self, num_cached: int) -> tuple[int, int]:
        """Return how many tokens come after those, and the work of their attention."""
        num_tokens = self.num_tokens - num_cached
        return num_tokens, attention_work(num_tokens, num_cached)


@value
class Prediction:
    """What one way to serve a request would bring, and what binds it."""

    ttft_s: float  # from now on
    tpot_s: float  # 0: the first token ends it
    first: Cause  # what takes longest until the first token
    later: Cause = Cause.BATCH  # what takes longest of the time per token
    lacks: Cause | None = None  # what there is no room for

    @property
    def has_room(self) -> bool:
        return self.lacks is None


@value
class FirstToken:
    """A predicted time to first token on one worker, what takes longest of it, and the fetch that was considered."""

    ttft_s: float
    because: Cause
    cached_tokens: int  # that it does not compute
    fetch: Fetch | None = None  # the best that there is, taken or not


@value
class _Offer:
    """What a holder could send."""

    holder: WorkerView
    num_tokens: int  # leading ones that it holds
    transfer_s: float  # of those that the receiver lacks
    share: float  # that will probably come


class Predictor:
    """All that a router has learnt of its cluster's performance."""

    def __init__(
        self,
        start: dict[Role, StepCosts] | None = None,
        hasher: PrefixHasher = UNKEYED,
        *,
        may_fetch: bool = True,
    ) -> None:
        """`hasher` hashes prompts as the cluster's workers do. `may_fetch`: whether fetches are among the ways."""
        self.may_fetch = may_fetch
        self.costs = CostsByKind(start or {})
        self.links = LearntLinks()
        self.fetches = Fetches()
        self.prefixes = PrefixIndex(hasher)
        self.lengths = AnswerLengths()
        self.ttft_margin, self.tpot_margin = Margin(), MarginBySize()
        self.ttft_median = 1.0  # of observed : predicted, of prompts computed by prefill workers
        self._tokens = Rates()  # of prompts, sent to prefill workers

    # ---- learning

    def observe_step(self, worker: WorkerView, step: Step, elapsed_s: float, now_s: float) -> None:
        if elapsed_s <= 0 or not (step.prefill_tokens or step.sequences):
            return
        self.costs.of(worker).observe(step, elapsed_s, now_s)

    def observe_first_token(self, predicted_s: float, observed_s: float, *, median: float | None) -> None:
        """Learn from when a first token came and was predicted to come, both since its placement.

        `median`: the factor `ttft_median` when this was predicted, None where a decode worker computed the prompt. The
        present factor would be moved too far, and swing: predictions of requests under way were made with an older one.

        One first token moves the median of observed : predicted by 1 / MEMORY. On four recorded live runs the median
        error is 31 % without this median, 24 % with it, and 30 % with the median of the last hundred.
        """
        if median is not None:
            is_late = observed_s * median > predicted_s * self.ttft_median
            self.ttft_median *= exp((1 if is_late else -1) / MEMORY)
        self.ttft_margin.observe(predicted_s, observed_s)

    def observe_fetch(self, worker: WorkerView, fetch: Fetch, num_came: int, elapsed_s: float, now_s: float) -> None:
        """Learn from a fetch that came or was given up so long after it was asked for."""
        pair = fetch.holder.worker_id, worker.name
        link_s = self.links.transfer_s(pair, worker.registration.layout.sent_bytes(fetch.num_sent))
        self.fetches.observe(pair, min(1.0, num_came / fetch.num_sent), elapsed_s - link_s, now_s)

    def observe_answer(self, predicted_s: float, decoding_s: float, num_tokens: int, num_beside: int) -> None:
        """Learn from an answer that joined so many sequences how the predicted time per token came out."""
        if num_tokens > 1:
            self.tpot_margin.observe(num_beside, predicted_s, decoding_s / (num_tokens - 1))

    def note_placed(
        self, prefill: WorkerView | None, decode: WorkerView | None, hashes: Hashes, num_fresh: int, now_s: float
    ) -> None:
        """Note where a prompt's KV will be, and that so many tokens of it are to be computed."""
        workers = [worker for worker in (prefill, decode) if worker is not None]
        self.prefixes.note([worker.link for worker in workers], hashes, now_s)
        if prefill is not None:
            self._tokens.add(prefill, num_fresh, now_s)

    def note_others(self, worker: WorkerView, sent: LoadPart, now_s: float) -> None:
        """Note what other routers have sent to a worker since it last reported."""
        if sent.num_taken and worker.role.is_in(Role.PREFILL):
            self._tokens.add(worker, sent.taken_tokens, now_s)

    def forget(self, worker: WorkerView) -> None:
        self.prefixes.forget(worker.link)
        self.costs.forget(worker)
        self.links.forget(worker.name)
        self.fetches.forget(worker.name)
        self._tokens.forget(worker)

    # ---- predicting

    def first_token(self, worker: WorkerView, prompt: Prompt, now_s: float) -> FirstToken:
        """Predict when the first token comes from a prefill worker, from now on, by computing or fetching."""
        cached = prompt.cached_on(worker)
        computed = self._computed(worker, prompt, cached, now_s)
        offer = self._best_offer(worker, prompt, now_s) if prompt.holders else None
        if offer is None:
            return computed
        later = self._computed(worker, prompt, offer.num_tokens, now_s)
        all_s, rest_s = (
            self.ttft_median * self._alone_s(worker, prompt, each.cached_tokens) for each in (computed, later)
        )
        ttft_s = max(later.ttft_s, offer.transfer_s + rest_s)  # it is transferred while prompts before it are computed
        compute_s, wait_s = all_s - rest_s, max(0.0, computed.ttft_s - all_s)
        # One that comes saves computing. One that does not wastes what computing the same tokens takes, at most.
        is_taken = offer.share * (computed.ttft_s - ttft_s) > (1 - offer.share) * compute_s
        num_sent, holder = offer.num_tokens - cached, offer.holder.registration
        fetch = Fetch(holder, offer.num_tokens, num_sent, offer.transfer_s, compute_s, wait_s, is_taken)
        if not is_taken:
            return FirstToken(computed.ttft_s, computed.because, cached, fetch)
        cause = Cause.FETCH if offer.transfer_s > ttft_s / 2 and ttft_s > later.ttft_s else later.because
        return FirstToken(ttft_s, cause, offer.num_tokens, fetch)

    def _best_offer(self, worker: WorkerView, prompt: Prompt, now_s: float) -> _Offer | None:
        """Return what to fetch for the greatest gain, if somebody holds more of a prompt than this worker."""
        cached, layout = prompt.cached.get(worker.link, 0), worker.registration.layout
        curve, best, best_s = self.costs.of(worker).prefill, None, -inf
        for holder, num_held in prompt.holders:
            if num_held <= cached or holder.kind != worker.kind:
                continue
            if holder.registration.layout.dtype != layout.dtype:
                continue  # rows that were rounded once would be cached as if they had been computed
            pair = holder.name, worker.name
            share, delay_s = self.fetches.expected(pair, now_s)
            transfer_s = self.links.transfer_s(pair, layout.sent_bytes(num_held - cached)) + delay_s
            num_sent = num_held - cached
            saved_s = share * curve.marginal_s(num_sent, attention_work(num_sent, cached)) - transfer_s
            if saved_s > best_s:
                best, best_s = _Offer(holder, num_held, transfer_s, share), saved_s
        return best

    def _alone_s(self, worker: WorkerView, prompt: Prompt, cached: int) -> float:
        """Predict how long a prompt takes by itself of which so many leading tokens need no computing."""
        return self.costs.of(worker).prefill_s(*prompt.after(cached), worker.step_tokens)

    def _computed(self, worker: WorkerView, prompt: Prompt, cached: int, now_s: float) -> FirstToken:
        """Predict the first token where so many leading tokens need no computing."""
        fresh, work = prompt.after(cached)
        costs = self.costs.of(worker)
        budget, running = worker.step_tokens, worker.running
        queued, queued_work = worker.waiting_before(prompt.priority)
        if not queued:
            alone_s = costs.prefill_s(fresh, work, budget)
            return FirstToken(self.ttft_median * alone_s, Cause.PREFILL, cached)
        running_s = costs.prefill_s(running.prefill_tokens, running.prefill_work, budget)
        tokens = max(0, queued - running.prefill_tokens) + fresh
        later_s = costs.prefill_s(tokens, max(0, queued_work - running.prefill_work) + work, budget)
        left_s = max(0.0, running_s - (now_s - running.since_s))
        last_s = costs.prefill.step_s + costs.prefill.each_s * (tokens % budget or budget)
        total_s = left_s + later_s
        # Later prompts that will probably share its last step prolong it.
        joining = max(0.0, total_s - last_s) * self._tokens.rate(worker, now_s)
        total_s += costs.prefill.each_s * min(-tokens % budget, joining)
        own_s = costs.prefill.marginal_s(fresh, work)
        return FirstToken(self.ttft_median * total_s, Cause.PREFILL if own_s > total_s / 2 else Cause.QUEUE, cached)

    def idle_s(self, worker: WorkerView, prompt: Prompt, now_s: float) -> float:
        """Predict the time to first token of a worker that does nothing else."""
        alone_s = self._alone_s(worker, prompt, prompt.cached_on(worker))
        offer = self._best_offer(worker, prompt, now_s) if prompt.holders else None
        if offer is None:
            return alone_s
        return min(alone_s, offer.transfer_s + self._alone_s(worker, prompt, offer.num_tokens))

    def handoffs_s(
        self, prefill: WorkerView, decodes: Seq[WorkerView], prompt: Prompt, cached_tokens: int
    ) -> list[float]:
        """Predict what of a hand-off to each decode worker is left after the first token, on an idle link.

        `cached_tokens` need no computing. What is left is the last chunk at least, and all that a slow link has not
        carried while later chunks were computed. Leading pages that the decode worker holds are not sent. Infinite to
        the prefill worker itself.
        """
        fresh = prompt.num_tokens - cached_tokens
        budget, sent = prefill.step_tokens, {}
        meanwhile_s = self.costs.of(prefill).prefill.each_s * (fresh - min(fresh, budget))
        links, cached, name, left_s = self.links, prompt.cached, prefill.name, []
        for worker in decodes:
            if worker is prefill:
                left_s.append(inf)
                continue
            layout = worker.registration.layout  # pages are sent as the receiver holds them
            if layout.dtype not in sent:
                sent[layout.dtype] = layout.sent_bytes(fresh % budget or budget), layout.sent_bytes(prompt.num_tokens)
            last_bytes, all_bytes = sent[layout.dtype]
            held = cached.get(worker.link, 0) if cached else 0
            num_bytes = layout.sent_bytes(prompt.num_tokens - held) if held else all_bytes
            rate = links.bytes_per_s((name, worker.name))
            left_s.append(links.latency_s + max(num_bytes / rate - meanwhile_s, min(num_bytes, last_bytes) / rate))
        return left_s

    def decode_step(self, worker: WorkerView, prompt: Prompt, after_s: float = 0.0) -> tuple[float, Cause | None]:
        """Predict a token's time for a request that joins a worker after so long; say what it lacks room for.

        Of what is on the worker and on its way there, a part will have ended by then: answers are taken to end at
        random, each after as many steps as a mean answer has tokens, and prompts to be computed at an even rate until
        this one is. While it decodes, as many are taken to come as end.
        """
        width, answer_tokens, costs = prompt.num_sequences, self.lengths.mean_tokens, self.costs.of(worker)
        batch = worker.num_sequences + width
        kv_tokens = worker.kv_tokens + prompt.num_tokens * width + batch * answer_tokens / 2
        step_s = costs.token_s(batch, kv_tokens)
        if after_s > 0 and worker.num_sequences:
            lives = after_s / max(1e-6, answer_tokens * step_s)  # of mean answers, if none of them ended
            left, arriving = exp(-lives), worker.num_arriving
            beside = (worker.num_sequences - arriving) * left + arriving * (1 - left) / lives
            step_s = costs.token_s(beside + width, kv_tokens * (beside + width) / batch)
        return step_s, self._lacks(worker, prompt)

    def beside_decoding(self, worker: WorkerView, prompt: Prompt, fetched_tokens: int = 0) -> tuple[Prediction, float]:
        """Predict what it brings if a decode worker computes a prompt now, and the seconds that others wait for it.

        `fetched_tokens`: leading ones that it has by then, if those are more than it has now.
        """
        costs, num_beside = self.costs.of(worker), worker.num_sequences
        fresh, work = prompt.after(prompt.cached_on(worker, fetched_tokens))
        num_waiting, waiting_work = worker.waiting_before(prompt.priority)
        compute_s = costs.prefill.marginal_s(fresh, work)  # beside decoding
        num_tokens, budget = num_waiting + fresh, max(1, worker.step_tokens - num_beside)
        ttft_s = costs.prefill_s(num_tokens, waiting_work + work, budget)
        step_s, lacks = self.decode_step(worker, prompt, ttft_s)
        if num_beside:
            ttft_s += -(-num_tokens // budget) * max(0.0, step_s - costs.prefill.step_s)
            ttft_s += step_s / 2  # the step that runs has to end first
        # Until it has its answer, it waits for the prompts that are here: those of half its life come before it.
        stalled_s = (costs.prefill.each_s * num_waiting + compute_s) / max(1.0, self.lengths.mean_tokens / 2)
        first = Cause.PREFILL if 2 * fresh >= num_tokens else Cause.QUEUE
        later = Cause.PROMPTS if stalled_s > step_s else Cause.BATCH
        return Prediction(ttft_s, step_s + stalled_s, first, later, lacks), compute_s * num_beside

    def _lacks(self, worker: WorkerView, prompt: Prompt) -> Cause | None:
        """Return what a request does not fit for beside all that is there and on its way, with their answers."""
        present, width, layout = worker.num_sequences, prompt.num_sequences, worker.registration.layout
        if not present:
            return None if layout.paging.most_pages(prompt.num_tokens + width) <= worker.num_pages else Cause.PAGES
        if present + width > worker.registration.max_num_seqs:
            return Cause.ROWS
        own = self.lengths.mean_tokens
        if prompt.hinted:  # may ask for more room; less than others take would be theirs if it were not true
            own = max(own, self.lengths.expected(prompt.max_tokens, prompt.hinted))
        answer_tokens = self.lengths.mean_tokens * present / 2 + own * width
        answer_tokens += layout.paging.pages_beside * layout.page_size * (present + width)
        missing = prompt.num_tokens - prompt.cached.get(worker.link, 0)
        num_tokens = worker.kv_tokens + prompt.num_tokens + answer_tokens
        is_full = layout.paging.mean_pages(num_tokens, present + width) > worker.num_pages
        return Cause.PAGES if is_full or layout.paging.most_pages(missing) + width > worker.num_free_pages else None
