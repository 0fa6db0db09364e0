"""What a placement would bring: predicted time to first token and time per token, from what workers report. Pure.

Learns as it goes: step times of each kind of worker, bandwidths of pairs, lengths of answers, prefixes routed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import exp

from pdserve.kvlayout import KvLayout
from pdserve.load import LoadPart
from pdserve.perfmodel.curve import Step, StepCosts
from pdserve.perfmodel.margin import Bias, Margin
from pdserve.perfmodel.model import LearntLinks
from pdserve.prefix_hash import PrefixHasher
from pdserve.router.costs import CostsByKind
from pdserve.router.events import LinkId, Role
from pdserve.router.lengths import AnswerLengths
from pdserve.router.machines import Machines
from pdserve.router.prefix_index import UNKEYED, Hashes, PrefixIndex
from pdserve.router.view import WorkerView
from pdserve.values import value

_CROWD_STEP = 0.005  # of the bias of times per token: a crowd's requests are wrong all alike, and count as one
_LEARN = 0.02  # weight of the latest answer in running means
_LOCAL_S = 2.0  # over which, at least, the share of prompts in a decode worker's time is taken
_SEQUENCES_S = 10.0  # over which, at least, the rate of sequences is taken
_RATE_S = 2.0  # over which the rate of prompt tokens is taken


@value
class Prompt:
    """What of a request predictions depend on."""

    num_tokens: int
    num_sequences: int
    cached: dict[LinkId, int]  # leading tokens that workers probably hold
    priority: int = 0


@dataclass(slots=True)
class _Fading:
    """A sum that fades with time."""

    amount: float
    at_s: float
    since_s: float  # when it began

    def now(self, now_s: float, life_s: float) -> float:
        return self.amount * exp((self.at_s - now_s) / life_s)

    def rate(self, now_s: float, life_s: float) -> float:
        """Return how much is added a second."""
        seen_s = life_s * (1 - exp(min(0.0, (self.since_s - now_s) / life_s)))
        return self.now(now_s, life_s) / max(0.1 * life_s, seen_s)


class Forecast:
    """All that a router has learnt of its cluster's performance."""

    def __init__(self, start: dict[Role, StepCosts] | None = None, hasher: PrefixHasher = UNKEYED) -> None:
        """`hasher` hashes prompts as the cluster's workers do."""
        self.costs = CostsByKind(start or {})
        self.links = LearntLinks()
        self.machines = Machines()
        self.prefixes = PrefixIndex(hasher)
        self.lengths = AnswerLengths()
        self.decoding_s = 2.0  # running mean of the time from first to last token
        self.ttft_bias = {True: Bias(), False: Bias()}  # by whether a decode worker computes the prompt
        self.ttft_margins = {True: Margin(), False: Margin()}
        # The same decode workers run the steps: with a bias or a margin of its own, a way could be shunned for good,
        # since nothing is learnt of what is not used.
        self.tpot_bias = dict.fromkeys((True, False), Bias(_CROWD_STEP))
        self.tpot_margins = dict.fromkeys((True, False), Margin())
        self._local: dict[LinkId, _Fading] = {}  # seconds of prompts computed on decode workers
        self._tokens: dict[LinkId, _Fading] = {}  # prompt tokens sent to workers
        self._sequences: dict[LinkId, _Fading] = {}  # sequences sent to decode workers

    # ---- learning

    def observe_step(self, worker: WorkerView, step: Step, elapsed_s: float, now_s: float) -> None:
        if elapsed_s > 0 and (step.prefill_tokens or step.sequences):
            crowd = self.machines.end_step(worker, elapsed_s, now_s)
            self.costs.of(worker).observe(step, elapsed_s, now_s, crowd)

    @property
    def output_tokens(self) -> float:
        """Mean length of answers."""
        return self.lengths.mean_tokens

    def observe_answer(self, num_tokens: int, max_tokens: int, decoding_s: float) -> None:
        self.lengths.observe(num_tokens, max_tokens)
        self.decoding_s = max(0.05, self.decoding_s + _LEARN * (decoding_s - self.decoding_s))

    def note_placed(
        self, prefill: WorkerView | None, decode: WorkerView | None, hashes: Hashes, prompt: Prompt, now_s: float
    ) -> None:
        """Note where a prompt's KV will be, and who will be busy with it."""
        workers = [worker for worker in (prefill, decode) if worker is not None]
        for worker in workers:
            self.machines.look(worker, now_s)
        self.prefixes.note([worker.link for worker in workers], hashes, now_s)
        if prefill is not None:
            fresh, _ = uncached(prompt, prefill.link)
            _add(self._tokens, prefill, fresh, now_s, _RATE_S)
        if decode is None:
            return
        _add(self._sequences, decode, prompt.num_sequences, now_s, self._life_s)
        if prefill is None:
            self._note_local(decode, *uncached(prompt, decode.link), now_s)

    def note_others(self, worker: WorkerView, sent: LoadPart, now_s: float) -> None:
        """Note what other routers have sent to a worker since it last reported."""
        if not sent.num_taken:
            return
        self.machines.look(worker, now_s)
        if worker.role is Role.PREFILL:
            _add(self._tokens, worker, sent.taken_tokens, now_s, _RATE_S)
            return
        _add(self._sequences, worker, sent.num_taken, now_s, self._life_s)
        if sent.taken_tokens:
            self._note_local(worker, sent.taken_tokens, sent.taken_work, now_s)

    def _note_local(self, worker: WorkerView, num_tokens: int, work: int, now_s: float) -> None:
        local_s = self.costs.of(worker).prefill.marginal_s(num_tokens, work)
        _add(self._local, worker, local_s, now_s, max(_LOCAL_S, self.decoding_s))

    def forget(self, worker: WorkerView) -> None:
        self.prefixes.forget(worker.link)
        self.machines.forget(worker)
        self.costs.forget(worker)
        self.links.forget(worker.name)
        self._local.pop(worker.link, None)
        self._tokens.pop(worker.link, None)
        self._sequences.pop(worker.link, None)

    # ---- predicting

    def prefill_s(self, worker: WorkerView, prompt: Prompt, now_s: float) -> float:
        """Predict when the first token comes from a prefill worker, from now on."""
        fresh, work = uncached(prompt, worker.link)
        costs = self.costs.of(worker)
        budget, running = worker.step_tokens, worker.running
        queued, queued_work = worker.waiting_before(prompt.priority)
        if not queued:
            alone_s = costs.prefill_s(fresh, work, budget)
            return alone_s * costs.prefill_slowdown(self.machines.expected(worker, alone_s))
        running_s = costs.prefill_s(running.prefill_tokens, running.prefill_work, budget)
        tokens = max(0, queued - running.prefill_tokens) + fresh
        later_s = costs.prefill_s(tokens, max(0, queued_work - running.prefill_work) + work, budget)
        slowdown = costs.prefill_slowdown(self.machines.expected(worker, running_s + later_s))
        left_s = max(0.0, slowdown * running_s - (now_s - running.since_s))
        last_s = slowdown * (costs.prefill.step_s + costs.prefill.each_s * (tokens % budget or budget))
        total_s = left_s + slowdown * later_s
        return total_s + slowdown * costs.prefill.each_s * self._joining(worker, total_s - last_s, tokens, now_s)

    def _joining(self, worker: WorkerView, wait_s: float, num_tokens: int, now_s: float) -> float:
        """Return how many tokens of later prompts will probably share a prompt's last step, and prolong it."""
        sent = self._tokens.get(worker.link)
        if sent is None:
            return 0.0
        return min(-num_tokens % worker.step_tokens, max(0.0, wait_s) * sent.now(now_s, _RATE_S) / _RATE_S)

    def idle_prefill_s(self, worker: WorkerView, prompt: Prompt) -> float:
        """Predict the time to first token of a worker that does nothing else."""
        return self.costs.of(worker).prefill_s(*uncached(prompt, worker.link), worker.step_tokens)

    @property
    def _life_s(self) -> float:
        """Over which the rate of sequences is taken."""
        return max(_SEQUENCES_S, 2 * self.decoding_s)

    def sequences_a_second(self, worker: WorkerView, now_s: float) -> float:
        """Return how many sequences a decode worker is given a second, of late."""
        sent = self._sequences.get(worker.link)
        return 0.0 if sent is None else sent.rate(now_s, self._life_s)

    def local_s(self, worker: WorkerView, now_s: float) -> float:
        """Return the seconds that a decode worker spends on prompts, over about one sequence's life."""
        local = self._local.get(worker.link)
        return 0.0 if local is None else local.now(now_s, max(_LOCAL_S, self.decoding_s))

    def local_share(self, local_s: float) -> float:
        """Return the share of a decode worker's time that so many seconds of prompts are."""
        return min(0.9, local_s / max(_LOCAL_S, self.decoding_s))

    def handoffs_s(self, prefill: WorkerView, decodes: Seq[WorkerView], prompt: Prompt) -> list[float]:
        """Predict what of a hand-off to each decode worker is left after the first token, on an idle link.

        That is the last chunk at least, and all that a slow link has not carried while later chunks were computed.
        Leading pages that the decode worker holds are not sent.
        """
        fresh, _ = uncached(prompt, prefill.link)
        budget, token_bytes = prefill.step_tokens, _bytes_per_token(prefill.registration.layout)
        meanwhile_s = self.costs.of(prefill).prefill.each_s * (fresh - min(fresh, budget))
        last_bytes, all_bytes = (fresh % budget or budget) * token_bytes, prompt.num_tokens * token_bytes
        links, cached, name, left_s = self.links, prompt.cached, prefill.name, []
        for worker in decodes:
            num_bytes = all_bytes - cached.get(worker.link, 0) * token_bytes if cached else all_bytes
            rate = links.bytes_per_s((name, worker.name))
            left_s.append(links.latency_s + max(num_bytes / rate - meanwhile_s, min(num_bytes, last_bytes) / rate))
        return left_s


def _add(sums: dict[LinkId, _Fading], worker: WorkerView, amount: float, now_s: float, life_s: float) -> None:
    """Add to a worker's fading sum."""
    known = sums.get(worker.link)
    if known is None:
        sums[worker.link] = _Fading(amount, now_s, now_s)
    else:
        sums[worker.link] = _Fading(known.now(now_s, life_s) + amount, now_s, known.since_s)


def uncached(prompt: Prompt, link: LinkId) -> tuple[int, int]:
    """Return the tokens that a worker has to compute of a prompt, and the work of their attention."""
    cached = min(prompt.cached.get(link, 0), prompt.num_tokens - 1)
    return prompt.num_tokens - cached, prompt.num_tokens**2 - cached**2


def _bytes_per_token(layout: KvLayout) -> float:
    return layout.page_bytes / layout.page_size
