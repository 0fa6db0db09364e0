"""Log probabilities of a sampled token as inference.proto has them, and back."""

from pdserve.errors import ProtocolError
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.sampling import MAX_LOGPROBS, TokenLogprobs


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
