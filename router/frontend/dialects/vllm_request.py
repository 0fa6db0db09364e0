"""vLLM's GenerateRequest as ours."""

from typing import TypeAlias

from smg_grpc_proto import vllm_engine_pb2 as vllm

from pdserve.errors import invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.prompts import usable_label

Params: TypeAlias = vllm.SamplingParams

_PLAIN = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "ignore_eos",
)  # 0: off, there and here
_OPTIONAL = ("logprobs", "prompt_logprobs")
_NOT_SERVED = {  # fields of a request, and what a client may do instead
    "mm_inputs": "the models served here read text alone",
    "extra_mm_inputs": "the models served here read text alone",
    "media_refs": "the models served here read text alone",
    "kv_transfer_params": "a router hands prompts over by itself: send the request once, without them",
    "kv_transfer_params_json": "a router hands prompts over by itself: send the request once, without them",
}


def native(asked: vllm.GenerateRequest, max_model_len: int) -> inference.GenerateRequest:
    """Return what is asked for; RequestError for what is not served, or cannot be meant."""
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
    """Return the prompt's last tokens, as many as it may keep."""
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
        case "json_schema":
            params.structured_output.json_schema = asked.json_schema
        case "json_object":
            params.structured_output.json_object = asked.json_object
        case "regex":
            params.structured_output.regex = asked.regex
        case "grammar":
            params.structured_output.grammar = asked.grammar
        case "choice":
            params.structured_output.choice.texts.extend(asked.choice.choices)
        case other:
            raise invalid(other, "it is not served; json_schema, json_object, regex, grammar and choice are")
