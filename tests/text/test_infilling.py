"""A model fills in the middle if its vocabulary has the three tokens for that; what the texts spell stays text."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from pdserve.text.chat import ChatMessage, ChatOptions
from pdserve.text.infilling import ROLES, infilling_of
from pdserve.text.tokenizer import Tokenizer

STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001


def tokenizer_with(*special: str, starts: str = "", ends: str = "") -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    added = [(word, backend.token_to_id(word)) for word in (starts, ends) if word]
    if added:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{starts} $A {ends}".strip(), special_tokens=added
        )
    return Tokenizer(backend)


def prompt_of(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    infilling = infilling_of(tokenizer)
    assert infilling is not None
    messages = [ChatMessage(role, text) for role, text in zip(ROLES, (prefix, suffix), strict=True)]
    return infilling.template.prompt(messages, ChatOptions(), tokenizer.special_texts).encoded(tokenizer)


@pytest.mark.parametrize("marks", [STAR, QWEN, DEEPSEEK])
@pytest.mark.parametrize(("starts", "ends"), [("", ""), ("<s>", ""), ("<s>", "</s>"), ("", "</s>")])
def test_the_prefix_comes_first_and_the_suffix_before_the_middle(
    marks: tuple[str, str, str], starts: str, ends: str
) -> None:
    tokenizer = tokenizer_with(*marks, "<s>", "</s>", starts=starts, ends=ends)
    prefix, suffix = "def f(x):\n    return ", "\n\n\nprint(f(1))\n"
    before, between, behind = (tokenizer.token_id(mark) for mark in marks)
    head = [tokenizer.token_id(starts)] if starts else []
    texts = [tokenizer.encode(text, add_special=False) for text in (prefix, suffix)]
    assert prompt_of(tokenizer, prefix, suffix) == [*head, before, *texts[0], between, *texts[1], behind]


def test_a_vocabulary_without_one_of_the_tokens_fills_nothing_in() -> None:
    for missing in STAR:
        assert infilling_of(tokenizer_with(*(mark for mark in STAR if mark != missing), *QWEN[:2])) is None


def test_a_middle_ends_where_another_file_or_part_would_begin() -> None:
    tokenizer = tokenizer_with(*QWEN, "<|file_sep|>", "<|endoftext|>", "<|im_end|>")
    infilling = infilling_of(tokenizer)
    assert infilling is not None
    ends = {tokenizer.token_id(word) for word in (*QWEN, "<|file_sep|>", "<|endoftext|>")}
    assert set(infilling.end_ids) == ends


def test_code_that_spells_the_tokens_stays_text() -> None:
    tokenizer = tokenizer_with(*STAR)
    code = f"MARKS = {STAR}"
    ids = prompt_of(tokenizer, code, code)
    assert [ids.count(tokenizer.token_id(mark) or 0) for mark in STAR] == [1, 1, 1]
    assert tokenizer.decode(ids) == code + code
