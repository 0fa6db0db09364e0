"""What it costs others that a turn leaves the workers where its conversation lives. Pure.

A turn elsewhere is computed where less of it is cached: somebody's prompt waits behind those tokens, or behind their
transfer, which would not have been there. `goodput.py` adds that time to what it predicts, so a turn leaves for a
worker that serves it sooner by more than that.

Invariant: no price is below 0 or over MOST_S, and none is asked at home, for a conversation without a home, or for one
whose home is not among the workers that may serve.
"""

from collections.abc import Sequence as Seq

from pdserve.router.placement.predict import FirstToken, Predictor, Prompt
from pdserve.router.placement.sessions import Home
from pdserve.router.placement.view import WorkerView

MOST_S = 0.5  # for the prompt, and as much for the answer
# Of the time that others wait for this turn. The turns to come count, too: another copy of the conversation takes pages
# from others, which have to be computed again. Where conversations fill the caches, prefill workers compute 4 % less
# with 1, 9 % less with 4 and 12 % less with 10; times to first token are the same.
_WEIGHT = 4


class Leaving:
    """The prices of one request."""

    def __init__(
        self,
        predictor: Predictor,
        prompt: Prompt,
        workers: tuple[Seq[WorkerView], Seq[WorkerView]],
        home: Home | None,
        now_s: float,
    ) -> None:
        """`workers`: that may compute the prompt, and that may decode. One that changed its role is no home."""
        self._predictor, self._prompt = predictor, prompt
        firsts, rests = workers if home is not None else ((), ())
        computes = next((worker for worker in firsts if home is not None and worker.link == home.computes), None)
        self._decode = next((worker for worker in rests if home is not None and worker.link == home.decode), None)
        self._busy_s: float | None = None  # of who computed the last turn, with this one
        if computes is not None:
            fetches = computes is not self._decode
            token = predictor.first_token(computes, prompt, now_s) if fetches else None
            self._busy_s = self._busy(computes, token)

    def computing_s(self, worker: WorkerView, token: FirstToken | None) -> float:
        """Return the price of a prompt's computing; `token` is what a prefill worker would bring, None of others."""
        if self._busy_s is None:
            return 0.0
        return min(MOST_S, _WEIGHT * max(0.0, self._busy(worker, token) - self._busy_s))

    def decoding_s(self, worker: WorkerView, source: WorkerView) -> float:
        """Return the price of pages that a source has to send to a decode worker, and would not have to send home."""
        home, cached = self._decode, self._prompt.cached
        if home is None or home is worker:
            return 0.0
        num_tokens = max(0, cached.get(home.link, 0) - cached.get(worker.link, 0))
        rate = self._predictor.links.bytes_per_s((source.name, worker.name))
        return min(MOST_S, _WEIGHT * worker.registration.layout.sent_bytes(num_tokens) / rate)

    def _busy(self, worker: WorkerView, token: FirstToken | None) -> float:
        """Return how long a prompt keeps a worker, or its link, from others."""
        cached = self._prompt.cached_on(worker) if token is None else token.cached_tokens
        compute_s = self._predictor.costs.of(worker).prefill.marginal_s(*self._prompt.after(cached))
        fetch = None if token is None else token.fetch
        return compute_s + (fetch.transfer_s if fetch is not None and fetch.is_taken else 0.0)
