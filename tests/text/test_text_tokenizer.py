"""The tokenizer's edges: ids out of range, text that is none, decoders of other kinds."""

import pytest
import tokenizers
from tokenizers import decoders, models

from pdserve.errors import ConfigError, RequestError, Status
from pdserve.text.tokenizer import Tokenizer


def test_half_a_surrogate_pair_is_the_requests_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"chat: .*surrogate") as refused:
        byte_level.encode("a\ud800", add_special=True, field="chat")
    assert refused.value.status is Status.INVALID_ARGUMENT


def test_bytes_of_each_token_are_known_even_within_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é<think>", add_special=False)
    assert [byte_level.token_bytes(token_id) for token_id in ids] == [b"\xc3", b"\xa9", b"<think>"]
    assert byte_level.token_bytes(byte_level.vocab_size) == b""


def test_special_ids_are_those_left_out_of_texts(byte_level: Tokenizer) -> None:
    assert byte_level.special_ids == {byte_level.token_id("<s>")}
    assert byte_level.token_text(0) == "<s>"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_decoders_of_other_kinds_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"tokenizer decoder: .* is not supported"):
        Tokenizer(backend)
