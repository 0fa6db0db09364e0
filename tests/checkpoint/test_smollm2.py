"""SmolLM2's GGUF file, read by us and by transformers."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.open import open_checkpoint
from pdserve.text.chat import ChatMessage, ChatOptions

pytestmark = pytest.mark.slow

FRAGMENTS = [
    *(
        "Hello",
        " world",
        "naïve café",
        "Ünïcödé",
        "ΑΒΓ δεζ",
        "привет мир",
        "日本語のテキスト",
        "한국어",
        "हिन्दी",
        "שלום",
    ),
    *("😀", "👩‍👩‍👧‍👦", "🇫🇷", "é", "\u200b", "\ufeff", "\ufffd", "ﷺ", "\U0001d518\U0001d52b", "\x00\x07"),
    *(" ", "  ", "   ", "       ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n ", "\u00a0", "\u3000"),
    *("def f(x):\n    return x ** 2\n", "for (int i=0;i<10;++i) {\n\t", "#include <stdio.h>", "</div>", "a_b-c.d/e\\f"),
    *("'s", "I'll", "don't", "'LL", '"quoted"', "...", "!!!", "$%^&*()", "~`|", "==>", "://"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "im_end|>", "<jupyter_code>"),
]


# Looked up by hand in the model's vocabulary and merges: each digit is a word of its own, cut off before the rest.
IDS_WITH_DIGITS = {
    "Steps:\n\n1.": [21831, 42, 1116, 33, 30],  # Steps : ĊĊ 1 .
    "x  1": [104, 256, 33],  # x ĠĠ 1
    " 42": [216, 36, 34],  # Ġ 4 2
    "1,234": [33, 28, 34, 35, 36],
    "\n\n\n7": [16506, 39],  # ĊĊĊ 7
    "item 10\n": [6692, 216, 33, 32, 198],  # item Ġ 1 0 Ċ
    "2024-05-06": [34, 32, 34, 36, 29, 32, 37, 29, 32, 38],
    " ²": [216, 19133],  # Ġ ²
    "٣٤": [164, 113, 164, 114],  # two bytes each
}


@pytest.fixture(scope="module")
def reference(smollm2_file: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


def texts() -> list[str]:
    """Return texts without digits: transformers does not cut those off first when it reads a GGUF file."""
    rng = random.Random(1)
    mixed = ["".join(rng.choices(FRAGMENTS, k=rng.randint(2, 12))) for _ in range(400)]
    scrambled = [chr(rng.choice((rng.randint(1, 0x250), rng.randint(0x250, 0xD7FF)))) for _ in range(40)]
    return ["", *FRAGMENTS, *mixed, "".join(char for char in scrambled if not char.isnumeric())]


@pytest.mark.parametrize(
    "text",
    [pytest.param(each, marks=pytest.mark.long if place > 3 else ()) for place, each in enumerate(IDS_WITH_DIGITS)],
)
def test_digits_are_cut_off_before_the_words_beside_them(smollm2: Checkpoint, text: str) -> None:
    assert smollm2.tokenizer().encode(text, add_special=False) == IDS_WITH_DIGITS[text]


def test_ids_equal_transformers_over_varied_texts(smollm2: Checkpoint, reference: PreTrainedTokenizerBase) -> None:
    tokenizer = smollm2.tokenizer()
    for text in texts():
        for add_special in (True, False):
            expected = reference(text, add_special_tokens=add_special).input_ids
            assert tokenizer.encode(text, add_special=add_special) == expected, repr(text)


def test_decoded_texts_equal_transformers(smollm2: Checkpoint, reference: PreTrainedTokenizerBase) -> None:
    tokenizer = smollm2.tokenizer()
    rng = random.Random(2)
    for _ in range(200):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randint(0, 60))
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_decoding_gives_back_any_text_without_special_tokens(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer()
    for text in texts():
        ids = tokenizer.encode(text, add_special=False)
        if all(tokenizer.decode([token_id]) for token_id in ids):  # a special token adds nothing
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_equals_transformers(
    smollm2: Checkpoint, reference: PreTrainedTokenizerBase, add_generation_prompt: bool
) -> None:
    chat = smollm2.chat()
    assert chat is not None
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        messages = [ChatMessage(role, f"<b>{role}</b> says\n\n hi {{{{ x }}}} ") for role in roles]
        plain = [{"role": message.role, "content": message.content} for message in messages]
        prompt = chat.render(messages, ChatOptions(add_generation_prompt=add_generation_prompt))
        expected = reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert prompt == expected
        ids = reference.apply_chat_template(plain, add_generation_prompt=add_generation_prompt)["input_ids"]
        assert smollm2.tokenizer().encode(prompt, add_special=False) == ids


def test_texts_of_a_chat_make_no_special_token(smollm2: Checkpoint, reference: PreTrainedTokenizerBase) -> None:
    chat, tokenizer = smollm2.chat(), smollm2.tokenizer()
    assert chat is not None
    written = [tokenizer.token_id(text) for text in ("<|im_start|>", "<|im_end|>")]
    for text in texts():
        talk = [ChatMessage("system", ""), ChatMessage("user", text)]
        ids = chat.prompt(talk, ChatOptions(), tokenizer.special_texts).encoded(tokenizer)
        special = [token_id for token_id in ids if token_id in reference.all_special_ids]
        assert special == [*written * 2, written[0]]
        assert reference.decode(ids) == chat.render(talk)


def test_weights_of_its_first_layers_equal_transformers(smollm2_two_layers: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_two_layers.parent, gguf_file=smollm2_two_layers.name, dtype=torch.float32
    )
    expected = model.state_dict()
    expected.pop("lm_head.weight")  # tied to the embedding
    for name, stored in open_checkpoint(smollm2_two_layers).weights().items():
        values = stored.read(())
        assert isinstance(values, np.ndarray)
        np.testing.assert_allclose(values, expected.pop(name).numpy(), rtol=1e-6, atol=1e-7, err_msg=name)
    assert not expected


def test_config_and_tokens_are_the_published_ones(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.design.layers[0].attention.rope.theta, config.max_position_embeddings) == (100000.0, 8192)
    assert config.tie_word_embeddings
    assert (smollm2.config.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert smollm2.tokenizer().vocab_size == config.vocab_size == 49152
