"""Takes the tokens of engine steps: delivers the new ones to the requests' clients, and ends complete requests.

Runs once for each sequence and step: the one part of the core where microseconds count.
"""

from collections.abc import Iterable

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt
from pdserve.perfmodel.curve import attention_work
from pdserve.protocol.drafts import MAX_DRAFT_TOKENS, Verified, count
from pdserve.protocol.link import SOURCES
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.reports import FINISH_REASONS, Stage
from pdserve.router.placement.placements import DONE, Placements
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Deliver
from pdserve.router.requests.events import PromptScored, StageReached, TokenDelta, VerifiedDraft
from pdserve.router.requests.request import OUTPUT_WEIGHT, Placement, Request, Sequence
from pdserve.router.requests.timeline import Moved

_MAX_EARLY = 4096  # deltas of a request: seconds of decoding
LENGTH = 2  # FinishReason of a continuation that has all the tokens it may have
Fault = tuple[Request, Placement, str]  # a placement whose worker broke the protocol


class Delivery:
    """Accepts each token once, in order, and ends the requests that are complete."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements

    def step(self, worker: WorkerView, deltas: Iterable[TokenDelta], now_s: float) -> list[Fault]:
        """Take one step's tokens; return the placements that cannot go on."""
        faults: list[Fault] = []
        requests = self._placements.requests
        for delta in deltas:
            request = requests.get(delta.request_id)
            placement = None if request is None else request.placements.get(delta.attempt)
            if request is None or placement is None:
                continue  # late news of a request or an attempt that is over
            if worker is not placement.decode and worker is not placement.prefill:
                continue
            try:
                if request.awaits_prompt:
                    _set_aside(request, placement, worker, delta)
                    continue
                self._take(request, placement, worker, delta, now_s)
            except ProtocolError as error:
                faults.append((request, placement, str(error)))
        return faults

    def prompts(self, worker: WorkerView, prompts: Iterable[PromptScored], now_s: float) -> list[Fault]:
        """Deliver new log probabilities of prompts, and then the tokens that had to wait for them."""
        faults: list[Fault] = []
        for scored in prompts:
            placement = self._placements.placement_of(worker, scored.request_id, scored.attempt)
            request = self._placements.requests.get(scored.request_id)
            if request is None or placement is None or not request.awaits_prompt:
                continue
            try:
                logprobs = request.take_prompt(scored)
            except ProtocolError as error:
                faults.append((request, placement, str(error)))
                continue
            if logprobs is not None:
                self._placements.emit(Deliver(request.request_id, 0, (), (), 0, logprobs))
            if not request.awaits_prompt:
                early, request.early = request.early, []
                for sender, delta in early:
                    faults += self.step(sender, (delta,), now_s)
        return faults

    def _take(
        self, request: Request, placement: Placement, worker: WorkerView, delta: TokenDelta, now_s: float
    ) -> None:
        index = delta.index
        if index not in placement.running:
            if index in placement.indices:
                return  # late news of a continuation that has ended or moved, or that is not here yet
            raise ProtocolError(f"sequence {index} is not part of this placement")
        sequence = request.sequences[index]
        num_known = 0 if delta.position == len(sequence.token_ids) else sequence.num_known(delta)
        if worker is placement.decode:
            placement.committed = True
        if delta.drafts and not num_known:
            count(request.ledger.drafts, [_verified(told) for told in delta.drafts])  # all of them, or none
        if self._accept(request, sequence, delta, num_known, now_s):
            return
        if placement.prefill is None:
            if placement.is_local:
                worker.prefilled(placement.key)
            return
        placement.prefill.prefilled(placement.key)
        if placement.decode is not None:
            placement.decode.prefilled(placement.key)
        self.release_prefill_when_done(request, placement)

    def _accept(self, request: Request, sequence: Sequence, delta: TokenDelta, num_known: int, now_s: float) -> bool:
        """Deliver the tokens of a delta that are new; return whether they end the continuation."""
        if request.params.pooling is not None:
            self._accept_pooled(request, request.params.pooling, sequence, delta, now_s)
            return True
        token_ids = delta.token_ids[num_known:]  # a list, which is cheaper to look at than what came off the wire
        logprobs = () if request.params.logprobs is None else delta.logprobs[num_known:]
        finish_reason = delta.finish_reason
        if not token_ids and not finish_reason:
            return False
        if finish_reason and finish_reason not in FINISH_REASONS:
            raise ProtocolError(f"sequence {sequence.index}: finish_reason {finish_reason} is unknown")
        known, max_tokens = sequence.token_ids, request.params.max_tokens
        num_left = max_tokens - len(known) - len(token_ids)
        if num_left < 0:
            raise ProtocolError(f"sequence {sequence.index}: more tokens came than max_tokens {max_tokens}")
        if not known and token_ids:
            request.timeline.reach(Stage.FIRST_TOKEN, now_s)
            sequence.first_s = now_s
            self._learn_ttft(request, now_s, sequence.placement)
        known.extend(token_ids)
        request.counter.served += OUTPUT_WEIGHT * len(token_ids)
        sequence.last_s = now_s
        if not num_left:
            finish_reason = finish_reason or LENGTH
        self._placements.emit(Deliver(request.request_id, sequence.index, token_ids, logprobs, finish_reason))
        if not finish_reason:
            return False
        self._note_decode(request, sequence.placement)
        self._learn_answer(request, sequence)
        self._placements.end_sequence(request, sequence.index, stop_workers=False)
        if not request.running:
            self._placements.finish(request, now_s)
        return True

    def _accept_pooled(
        self, request: Request, pooling: Pooling, sequence: Sequence, delta: TokenDelta, now_s: float
    ) -> None:
        """Deliver the vector that a request wants in place of an answer, which ends it."""
        if delta.token_ids or delta.finish_reason not in FINISH_REASONS or not pooling.fits(delta.pooled):
            came = f"{len(delta.token_ids)} tokens and {len(delta.pooled)} bytes"
            raise ProtocolError(f"sequence {sequence.index}: {came} came in place of the vector of a prompt")
        request.timeline.reach(Stage.FIRST_TOKEN, now_s)
        self._learn_ttft(request, now_s, sequence.placement)
        sequence.first_s = sequence.last_s = now_s
        self._placements.emit(Deliver(request.request_id, 0, [], (), delta.finish_reason, pooled=delta.pooled))
        self._placements.end_sequence(request, sequence.index, stop_workers=False)
        self._placements.finish(request, now_s)

    def _learn_ttft(self, request: Request, now_s: float, placement: Placement | None) -> None:
        """Note how a prediction came out. Prompts of a higher priority that came later could not be foreseen."""
        if request.is_preparation or placement is None or placement.ttft_s is None or _was_overtaken(placement):
            return
        median = placement.ttft_median if placement.computes_all else None
        self._placements.predictor.observe_first_token(placement.ttft_s, now_s - placement.placed_s, median=median)

    def _learn_answer(self, request: Request, sequence: Sequence) -> None:
        if request.is_preparation:
            return  # its one token says nothing of answers
        placement, num_tokens = sequence.placement, len(sequence.token_ids)
        predictor, decoding_s = self._placements.predictor, sequence.last_s - sequence.first_s
        predictor.lengths.observe(num_tokens, request.params.max_tokens, request.output_tokens)
        if placement is not None and placement.tpot_s is not None:
            predictor.observe_answer(placement.tpot_s, decoding_s, num_tokens, placement.num_beside)

    def release_prefill_when_done(self, request: Request, placement: Placement) -> None:
        """Let go of the prefill worker once decode has all it needs and every first token is here."""
        if not placement.committed:
            return
        self._note_decode(request, placement)
        if all(request.sequences[index].has_come for index in placement.running):
            self._placements.release_prefill(placement)

    def _note_decode(self, request: Request, placement: Placement | None) -> None:
        if placement is not None and placement.committed and placement.decode is not None:
            request.ledger.decode_worker = placement.decode.name

    def stage(self, worker: WorkerView, event: StageReached, now_s: float) -> None:
        """Note on a request's timeline what happened on a worker."""
        placement = self._placements.placement_of(worker, event.request_id, event.attempt)
        if placement is None:
            return
        request = self._placements.requests[event.request_id]
        if placement.source is not None:
            self._stage_of_move(request, placement, worker, event, now_s)
            return
        request.timeline.reach(event.stage, now_s - event.age_s)
        match event.stage:
            case Stage.PREFILL_STARTED if placement.attempt == Attempt(0):
                request.cached_tokens = min(event.cached_tokens, len(request.prompt_ids))
            case Stage.FETCHED:
                self._take_fetched(request, placement, event, now_s)
            case Stage.PREFILL_DONE if worker is placement.prefill:
                worker.prefilled(placement.key)
            case Stage.GRANTED:
                request.ledger.handoff_pages_reused = event.pages_reused
            case Stage.LANDED:
                request.ledger.handoff_bytes += event.handoff_bytes
                request.ledger.handoff_ms = round(event.handoff_s * 1e3, 3)
                if placement.prefill is not None and placement.decode is not None:
                    pair = placement.prefill.name, placement.decode.name
                    self._placements.predictor.links.observe(pair, event.handoff_bytes, event.handoff_s)
            case Stage.COMMITTED | Stage.DECODE_JOINED:
                placement.committed = True
                self.release_prefill_when_done(request, placement)
            case _:
                pass  # the time is all there is to it

    def _take_fetched(self, request: Request, placement: Placement, event: StageReached, now_s: float) -> None:
        """Note how many tokens a fetch has brought; the worker computes the rest."""
        fetch, worker = placement.fetch, placement.prefill
        if fetch is None or worker is None or worker.link != event.link:
            return
        request.ledger.fetched_tokens = min(event.cached_tokens, fetch.num_tokens)
        num_here = event.cached_tokens + event.pages_reused * worker.registration.layout.page_size
        num_missing = min(fetch.num_sent, max(0, fetch.num_tokens - num_here))
        if self._placements.workers.get(fetch.holder.link) is not None:  # else it is forgotten
            elapsed_s = now_s - event.age_s - placement.placed_s
            self._placements.predictor.observe_fetch(worker, fetch, fetch.num_sent - num_missing, elapsed_s, now_s)
        work = attention_work(num_missing, fetch.num_tokens - num_missing)
        worker.add_prefill(placement.key, num_missing, work)

    def _stage_of_move(
        self, request: Request, placement: Placement, worker: WorkerView, event: StageReached, now_s: float
    ) -> None:
        """Follow a move: once it is committed, its target takes charge. The timeline keeps the prompt's hand-off."""
        source = placement.source
        if source is None or worker is source:
            return
        if event.stage is Stage.LANDED:
            placement.landed = event.handoff_bytes, event.handoff_s
        if event.stage is not Stage.COMMITTED or placement.committed:
            return
        sequence = request.sequences[placement.indices[0]]
        if sequence.shadow is placement:
            self._placements.take_charge(request, sequence)
        placement.committed = True
        worker.prefilled(placement.key)
        num_bytes, handoff_s = placement.landed
        moved = Moved(
            sequence.index, len(sequence.token_ids), source.name, worker.name, num_bytes, round(handoff_s * 1e3, 3)
        )
        request.ledger.moves += (moved,)
        self._placements.shadows.note_end(placement, DONE, now_s)
        self._note_decode(request, placement)


def _set_aside(request: Request, placement: Placement, worker: WorkerView, delta: TokenDelta) -> None:
    """Keep tokens that have come with a hand-off until what their prompt's worker reports has come as well."""
    if worker is placement.prefill or placement.prefill is None or len(request.early) >= _MAX_EARLY:
        raise ProtocolError("tokens came, but not the log probabilities of their prompt")
    request.early.append((worker, delta))


def _verified(told: VerifiedDraft) -> Verified:
    source, num_accepted = SOURCES.get(told.source), told.num_accepted_tokens
    if source is None or not max(1, num_accepted) <= told.num_draft_tokens <= MAX_DRAFT_TOKENS:
        counts = f"{num_accepted} of {told.num_draft_tokens} guesses of source {told.source}"
        raise ProtocolError(
            f"drafts: {counts}; at most {MAX_DRAFT_TOKENS} are verified, of sources 1 to {len(SOURCES)}"
        )
    return Verified(source, told.num_draft_tokens, num_accepted)


def _was_overtaken(placement: Placement) -> bool:
    worker = placement.prefill or placement.decode
    return worker is not None and worker.shares[placement.key].is_overtaken
