"""Answers as vLLM's servicer writes them.

A streamed chunk has what is new alone. The last tokens of a continuation come twice, in its last chunk and in its
completion: clients of streams add up the chunks.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from smg_grpc_proto import vllm_engine_pb2 as vllm

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.answer import Gain
from pdserve.sampling import PromptLogprobs

Reply: TypeAlias = vllm.GenerateResponse


class Replies:
    """One request's replies, made of what its answer gains."""

    def __init__(self, request: inference.GenerateRequest, *, streams: bool) -> None:
        self._streams = streams
        self.prompt_ids: Sequence[int] = ()  # set before anything is taken
        self._has_top = request.sampling.logprobs > 0
        self._scored: list[PromptLogprobs] = []  # until every continuation has begun
        self._begun: set[int] = set()
        self._whole: dict[int, Gain] = {}  # by continuation, where nothing streams

    def take(self, gains: Iterable[Gain], cached_tokens: int) -> list[Reply]:
        """Return what is to be written now. `cached_tokens`: of the prompt, as far as they are known."""
        replies: list[Reply] = []
        for gain in gains:
            self._scored += gain.prompt_logprobs
            if self._streams:
                replies += self._stream(gain, cached_tokens)
            else:
                self._add(gain)
        return replies

    def complete(self, cached_tokens: int) -> list[Reply]:
        """Return all continuations, where nothing streams."""
        return [self._completed(gain, cached_tokens) for _, gain in sorted(self._whole.items())]

    def _add(self, gain: Gain) -> None:
        whole = self._whole.setdefault(gain.index, Gain(gain.index))
        whole.token_ids += gain.token_ids
        whole.logprobs += gain.logprobs
        whole.finish_reason = gain.finish_reason
        whole.stop_match = gain.stop_match

    def _stream(self, gain: Gain, cached_tokens: int) -> list[Reply]:
        replies: list[Reply] = []
        if gain.token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=gain.token_ids,
                prompt_tokens=len(self.prompt_ids),
                completion_tokens=len(gain.token_ids),
                cached_tokens=cached_tokens,
                output_logprobs=self._output_logprobs(gain),
                input_logprobs=None if gain.index in self._begun else self._input_logprobs(),
                index=gain.index,
            )
            self._begun.add(gain.index)
            replies.append(Reply(chunk=chunk))
        if gain.finish_reason:
            replies.append(self._completed(gain, cached_tokens))
        return replies

    def _completed(self, gain: Gain, cached_tokens: int) -> Reply:
        complete = vllm.GenerateComplete(
            output_ids=gain.token_ids,
            finish_reason="length" if gain.finish_reason == inference.FINISH_REASON_LENGTH else "stop",
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(gain.token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=self._output_logprobs(gain),
            input_logprobs=None if self._streams else self._input_logprobs(),
            index=gain.index,
        )
        if isinstance(gain.stop_match, str):
            complete.matched_stop_str = gain.stop_match
        elif gain.stop_match is not None:
            complete.matched_token_id = gain.stop_match
        return Reply(complete=complete)

    def _output_logprobs(self, gain: Gain) -> vllm.OutputLogProbs | None:
        if not gain.logprobs:
            return None
        tops = [_top((each.token_id, each.logprob) for each in entry.top) for entry in gain.logprobs]
        chosen = [entry.chosen for entry in gain.logprobs]
        return vllm.OutputLogProbs(
            token_logprobs=chosen, token_ids=gain.token_ids, top_logprobs=tops if self._has_top else ()
        )

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        """Return the prompt's log probabilities, if they were asked for; nothing comes before its first token."""
        if not self._scored:
            return None
        entries = [entry for part in self._scored for entry in part.entries()]
        values = [vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=entry.chosen) for entry in entries)]
        has_top = any(entry.top for entry in entries)
        tops = [vllm.TopLogProbs(), *(_top(entry.top) for entry in entries)] if has_top else ()
        return vllm.InputLogProbs(token_logprobs=values, token_ids=self.prompt_ids, top_logprobs=tops)


def _top(pairs: Iterable[tuple[int, float]]) -> vllm.TopLogProbs:
    top = vllm.TopLogProbs()
    for token_id, logprob in pairs:
        top.token_ids.append(token_id)
        top.values.append(logprob)
    return top
