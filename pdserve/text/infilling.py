"""Prompts whose answer goes between two texts: fill in the middle.

Models that were trained for it have a token before each of the three parts, and read the prefix first, then the suffix
(Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022).
"""

from dataclasses import dataclass

from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

ROLES = ("prefix", "suffix")
_MARKS = (  # before prefix, suffix and middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek-Coder's own letters
)
_ENDS = (  # what models write behind a middle, besides the end of a text: the beginning of another file
    *("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "<|endoftext|>",
)


@dataclass(frozen=True, slots=True)
class Infilling:
    """How a model's prompts for a middle are written."""

    template: ChatTemplate  # of two messages, in the order of ROLES
    end_ids: tuple[int, ...]  # tokens that end a middle


def infilling_of(tokenizer: Tokenizer) -> Infilling | None:
    """Return how a model with this tokenizer fills in the middle; None if it has no tokens for that."""
    for marks in _MARKS:
        known = [token_id for mark in marks if (token_id := tokenizer.token_id(mark)) is not None]
        if len(known) == len(marks):
            others = (tokenizer.token_id(end) for end in _ENDS)
            start = b"".join(map(tokenizer.piece, _start_of(tokenizer))).decode()
            before, between, behind = marks
            source = f"{start}{before}{{{{ messages[0].content }}}}{between}{{{{ messages[1].content }}}}{behind}"
            return Infilling(ChatTemplate(source, {}), (*known, *(each for each in others if each is not None)))
    return None


def _start_of(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds in front of a text."""
    whole, bare = (tokenizer.encode("a", add_special=special) for special in (True, False))
    places = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return whole[: next(places, 0)]
