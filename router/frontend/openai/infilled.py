"""Completions before a suffix: the model fills in what is missing between two texts.

Prompt and suffix are written as a chat is, by a template of their own. So what they spell makes no special token.
"""

from dataclasses import replace

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import invalid
from pdserve.protocol.sampling import MAX_STOP_TOKEN_IDS
from pdserve.router.frontend.openai.fields import CompletionRequest
from pdserve.router.frontend.openai.filters import Plan
from pdserve.router.frontend.served import ServedModel


def infilling(body: CompletionRequest, template: inference.GenerateRequest, plan: Plan, model: ServedModel) -> Plan:
    """Write what ends a middle into `template`, and return the plan; RefusedError names a wrong field."""
    if model.infilling is None:
        raise invalid("suffix", "the model has no tokens to fill in the middle")
    if not (isinstance(body.prompt, str) or isinstance(body.prompt[0], str)):
        raise invalid("suffix", "goes with prompts that are texts, not token ids")
    if body.echo or body.prompt_logprobs is not None or body.add_special_tokens is False:
        raise invalid("suffix", "goes neither with echo or prompt_logprobs, nor with add_special_tokens false")
    given, own = len(template.sampling.stop_token_ids), model.infilling.end_ids
    if given + len(own) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"{given} and the {len(own)} of a suffix are over {MAX_STOP_TOKEN_IDS}")
    template.sampling.stop_token_ids.extend(own)
    template.prepare_next = False  # the next turn does not begin with this one
    return replace(plan, template=model.infilling.template)
