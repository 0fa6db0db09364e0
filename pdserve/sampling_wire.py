"""Sampling parameters, and log probabilities of a sampled token, as inference.proto has them, and back."""

from pdserve.errors import ProtocolError
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.sampling import MAX_LOGPROBS, SamplingParams, TokenLogprobs

_FIELDS = tuple(SamplingParams.__annotations__)


def params_to_proto(params: SamplingParams) -> inference.SamplingParams:
    """Write sampling with every field set; only `logprobs` and `prompt_logprobs` may be missing, which means none."""
    fields = {name: getattr(params, name) for name in _FIELDS}
    fields["logit_bias"] = dict(params.logit_bias)
    fields["bad_word_ids"] = [inference.TokenIds(ids=word) for word in params.bad_word_ids]
    return inference.SamplingParams(**fields)


def params_from_proto(message: inference.SamplingParams) -> SamplingParams:
    """Return sampling as `params_to_proto` writes it."""
    fields = {name: getattr(message, name) for name in _FIELDS}
    fields["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    fields["logprobs"] = message.logprobs if message.HasField("logprobs") else None
    fields["prompt_logprobs"] = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    fields["stop_token_ids"] = tuple(message.stop_token_ids)
    fields["allowed_token_ids"] = tuple(message.allowed_token_ids)
    fields["bad_word_ids"] = tuple([tuple(word.ids) for word in message.bad_word_ids])
    return SamplingParams(**fields)


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    message = inference.TokenLogprobs(chosen=logprobs.chosen)
    for token_id, logprob in logprobs.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def logprobs_from_proto(message: inference.TokenLogprobs) -> TokenLogprobs:
    """Return what a peer reports of one position; ProtocolError for more than a request can ask for."""
    if len(message.top) > MAX_LOGPROBS:
        raise ProtocolError(f"logprobs.top: {len(message.top)} are over {MAX_LOGPROBS}")
    return TokenLogprobs(message.chosen, tuple((each.token_id, each.logprob) for each in message.top))
