"""How well a document answers a query, by a model that says "yes" or "no".

Prompt and score are those of Qwen3-Reranker's model card: the score is the softmax over the logits of the two words,
behind the last token of the prompt.
"""

from dataclasses import dataclass
from math import exp

from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES, NO = "yes", "no"
WORDS = (YES, NO, "<|im_start|>", "<|im_end|>", "<think>", "</think>")  # each has to be a token
ROLES = ("instruct", "query", "document")
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ messages[0].content }}\n<Query>: {{ messages[1].content }}\n"
    "<Document>: {{ messages[2].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n"
    "{{ '\n' }}"  # a template's last line end is dropped
)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a model's scores are made of."""

    template: ChatTemplate  # of three messages, in the order of ROLES
    token_ids: tuple[int, int]  # of "yes" and "no"


def scoring_of(tokenizer: Tokenizer) -> Scoring | None:
    """Return how a model with this tokenizer scores documents; None if it lacks a token of the template."""
    yes, no, *others = [tokenizer.token_id(word) for word in WORDS]
    if yes is None or no is None or None in others:
        return None
    return Scoring(ChatTemplate(TEMPLATE, {}), (yes, no))


def score_of(yes: float, no: float) -> float:
    """Return the probability of "yes" beside "no", by their logits."""
    margin = yes - no
    return 1 / (1 + exp(-margin)) if margin > 0 else exp(margin) / (1 + exp(margin))
