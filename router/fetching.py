"""Fetches of cached pages from another worker: what one would bring, and how far those of a pair are believed. Pure.

A fetch pays if what it is expected to save is more than what it is expected to waste. One that comes saves computing.
One that does not come wastes the time that was waited for it: at most as long as computing the same tokens takes.
"""

from dataclasses import dataclass
from math import exp

from pdserve.router.view import WorkerView
from pdserve.values import value

_START_SHARE = 0.8  # that comes where nothing is known: a transfer pays that takes less than 3/4 of computing
_STEP = 0.3  # by how much one fetch moves what is known of its pair: two that do not come end them
_LIFE_S = 60.0  # in which that is forgotten: so a pair is tried again
_START_DELAY_S = 0.005  # of messages between router, holder and receiver, beyond the transfer
_LEAST_WITHIN_S = 0.02  # the least time for these messages

PairName = tuple[str, str]  # of holder and receiver


@value
class Fetch:
    """Leading pages of a prompt that a holder would send to the worker which computes the rest."""

    holder: WorkerView
    num_tokens: int  # leading ones that the worker has after it
    num_sent: int  # of these, what it does not have without it
    transfer_s: float  # predicted, from now on
    compute_s: float  # what computing the same tokens takes there
    wait_s: float  # that the prompt has to wait there anyway
    is_taken: bool  # whether it pays

    @property
    def within_s(self) -> float:
        """How long to wait for it, from now on: computing brings a later one's tokens as soon."""
        return max(_LEAST_WITHIN_S, self.wait_s + self.compute_s)

    def told(self, num_prompt_tokens: int) -> str:
        """Return what was decided and why, for a request's ledger."""
        verb = "fetches" if self.is_taken else "computes, and does not fetch"
        tokens = f"{self.num_sent:,} of {num_prompt_tokens:,} tokens from {self.holder.name}"
        return f"{verb} {tokens}: {self.transfer_s * 1e3:.0f} ms against {self.compute_s * 1e3:.0f} ms"


@value
class Offer:
    """What a holder could send."""

    holder: WorkerView
    num_tokens: int  # leading ones that it holds
    transfer_s: float  # of those that the receiver lacks
    share: float  # that will probably come


def pays(saved_s: float, compute_s: float, share: float) -> bool:
    """Return whether to try a fetch that saves so much if it comes, when a share of such fetches comes."""
    return share * saved_s > (1 - share) * compute_s


@dataclass(slots=True)
class _Record:
    """How the fetches of a pair have come out lately."""

    at_s: float
    share: float = _START_SHARE
    delay_s: float = _START_DELAY_S

    def fade(self, now_s: float) -> None:
        keep = exp(min(0.0, self.at_s - now_s) / _LIFE_S)
        self.share = _START_SHARE + (self.share - _START_SHARE) * keep
        self.delay_s = _START_DELAY_S + (self.delay_s - _START_DELAY_S) * keep
        self.at_s = now_s


class Fetches:
    """Learns which share of each pair's fetches comes, and how late."""

    def __init__(self) -> None:
        self._records: dict[PairName, _Record] = {}

    def expected(self, pair: PairName, now_s: float) -> tuple[float, float]:
        """Return the share that will probably come, and the delay beyond what the link takes, seconds."""
        record = self._records.get(pair)
        if record is None:
            return _START_SHARE, _START_DELAY_S
        record.fade(now_s)
        return record.share, record.delay_s

    def observe(self, pair: PairName, share: float, late_s: float, now_s: float) -> None:
        """Take in which share of a fetch came, and how much later than predicted without what is learnt here."""
        record = self._records.setdefault(pair, _Record(now_s))
        record.fade(now_s)
        record.share += _STEP * (share - record.share)
        record.delay_s = max(0.0, record.delay_s + _STEP * (late_s - record.delay_s))

    def forget(self, worker: str) -> None:
        """Drop what concerns a worker that has left."""
        self._records = {pair: record for pair, record in self._records.items() if worker not in pair}
