"""Translates vLLM's GenerateRequest to pdserve's, and writes answers as vLLM's servicer does.

A streamed chunk has only new tokens. The last tokens of a continuation come twice, in its last chunk and in its
completion: clients of streams add up the chunks.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from smg_grpc_proto import vllm_engine_pb2 as vllm

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import invalid
from pdserve.protocol.sampling import PromptLogprobs
from pdserve.router.frontend.answer import Gain, Outcome
from pdserve.router.frontend.terms import usable_label
from pdserve.router.requests.commands import Finished

Params: TypeAlias = vllm.SamplingParams

# In these fields 0 means off, in vLLM and in pdserve.
_PLAIN = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
_OPTIONAL = ("logprobs", "prompt_logprobs")
_NOT_SERVED = {  # fields of a request, and what a client may do instead
    "mm_inputs": "the models served here read text alone",
    "extra_mm_inputs": "the models served here read text alone",
    "media_refs": "the models served here read text alone",
    "kv_transfer_params": "a router hands prompts over by itself: send the request once, without them",
    "kv_transfer_params_json": "a router hands prompts over by itself: send the request once, without them",
}


def native(asked: vllm.GenerateRequest, max_model_len: int) -> inference.GenerateRequest:
    """Return what a client asks for; RefusedError for what is not served or has no meaning."""
    for field, _ in asked.ListFields():
        if field.name in _NOT_SERVED:
            raise invalid(field.name, _NOT_SERVED[field.name])
    request = inference.GenerateRequest(request_label=usable_label(asked.request_id), stop=asked.sampling_params.stop)
    match asked.WhichOneof("input"):
        case "tokenized":
            request.token_ids.ids.extend(_cut(asked, max_model_len))
        case "text":
            if asked.sampling_params.HasField("truncate_prompt_tokens"):
                raise invalid("truncate_prompt_tokens", "it is served with token ids alone")
            request.text = asked.text
        case _:
            raise invalid("input", "none was given; tokenized or text is needed")
    request.sampling.CopyFrom(_sampling(asked.sampling_params))
    return request


def _cut(asked: vllm.GenerateRequest, max_model_len: int) -> list[int]:
    """Return the prompt's token ids; if it is to be truncated, its last ones."""
    ids: list[int] = asked.tokenized.input_ids[:]
    params = asked.sampling_params
    if not params.HasField("truncate_prompt_tokens"):
        return ids
    limit = max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    if limit < 1:
        raise invalid("truncate_prompt_tokens", f"{limit} is neither -1 nor at least 1")
    return ids[-limit:]


def _sampling(asked: Params) -> inference.SamplingParams:
    params = inference.SamplingParams(
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_p=asked.top_p or 1.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        n=asked.n or 1,
        stop_token_ids=asked.stop_token_ids,
        skip_special_tokens=asked.skip_special_tokens,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        fill_model_len=not asked.HasField("max_tokens"),
        **{name: getattr(asked, name) for name in _PLAIN},
    )
    if asked.HasField("max_tokens"):
        params.max_tokens = asked.max_tokens
    if asked.HasField("seed"):
        params.seed = asked.seed % 2**64
    for name in _OPTIONAL:
        if asked.HasField(name):
            if getattr(asked, name) < 0:
                raise invalid(name, f"{getattr(asked, name)} is below 0: all tokens are never reported")
            setattr(params, name, getattr(asked, name))
    for token_id, bias in asked.logit_bias.items():
        if token_id < 0:
            raise invalid("logit_bias token", f"{token_id} is below 0")
        params.logit_bias[token_id] = bias
    _constrain(params, asked)
    return params


def _constrain(params: inference.SamplingParams, asked: Params) -> None:
    match asked.WhichOneof("constraint"):
        case None:
            return
        case "json_schema" | "json_object" | "regex" | "grammar" as name:  # the same names in pdserve
            setattr(params.structured_output, name, getattr(asked, name))
        case "choice":
            params.structured_output.choice.texts.extend(asked.choice.choices)
        case other:
            raise invalid(other, "it is not served; json_schema, json_object, regex, grammar and choice are")


# ---- replies

Reply: TypeAlias = vllm.GenerateResponse


class Replies:
    """Makes a request's replies from the gains of its answer."""

    def __init__(self, request: inference.GenerateRequest, *, streams: bool) -> None:
        self._streams = streams
        self._prompt_ids: Sequence[int] = ()
        self._has_top = request.sampling.logprobs > 0
        self._scored: list[PromptLogprobs] = []  # of the prompt, as far as they have come
        self._begun: set[int] = set()
        self._whole: dict[int, Gain] = {}  # by continuation, where nothing streams

    def take(self, prompt_ids: Sequence[int], gains: Sequence[Gain], outcome: Outcome | None) -> list[Reply]:
        """Return the replies to write now. Their number of cached tokens is 0 until the end, when it is known."""
        self._prompt_ids = prompt_ids
        cached_tokens = outcome.usage.cached_tokens if isinstance(outcome, Finished) else 0
        replies: list[Reply] = []
        for gain in gains:
            self._scored += gain.prompt_logprobs
            if self._streams:
                replies += self._stream(gain, cached_tokens)
            else:
                self._whole.setdefault(gain.index, Gain(gain.index)).add(gain)
        if isinstance(outcome, Finished):
            replies += [self._completed(gain, cached_tokens) for _, gain in sorted(self._whole.items())]
        return replies

    def _stream(self, gain: Gain, cached_tokens: int) -> list[Reply]:
        replies: list[Reply] = []
        if gain.token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=gain.token_ids,
                prompt_tokens=len(self._prompt_ids),
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
            prompt_tokens=len(self._prompt_ids),
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
        """Return the prompt's log probabilities, if they were asked for. The first token has none."""
        if not self._scored:
            return None
        entries = [entry for part in self._scored for entry in part.entries()]
        values = [vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=entry.chosen) for entry in entries)]
        has_top = any(entry.top for entry in entries)
        tops = [vllm.TopLogProbs(), *(_top(entry.top) for entry in entries)] if has_top else ()
        return vllm.InputLogProbs(token_logprobs=values, token_ids=self._prompt_ids, top_logprobs=tops)


def _top(pairs: Iterable[tuple[int, float]]) -> vllm.TopLogProbs:
    top = vllm.TopLogProbs()
    for token_id, logprob in pairs:
        top.token_ids.append(token_id)
        top.values.append(logprob)
    return top
