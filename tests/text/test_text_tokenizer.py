"""The tokenizer's edges: ids out of range, text that is none, decoders of other kinds."""

import pytest
import tokenizers
from tokenizers import decoders, models

from pdserve.base.errors import ConfigError
from pdserve.protocol.refusal import RefusedError, Status
from pdserve.text.tokenizer import Tokenizer


def test_half_a_surrogate_pair_is_the_requests_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RefusedError, match=r"prompt: .*surrogate") as refused:
        byte_level.encode("a\ud800", add_special=True)
    assert refused.value.refused.status is Status.INVALID_ARGUMENT


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_decoders_of_other_kinds_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"tokenizer decoder: .* is not supported"):
        Tokenizer(backend)
