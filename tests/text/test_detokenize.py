"""Texts of a sequence's ids, given out as they come."""

from itertools import chain

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.tokenizer import Tokenizer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def steps_of_ids(draw: st.DrawFn, highest: int) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, highest), max_size=4), max_size=30))


def joined(tokenizer: Tokenizer, steps: list[list[int]], *, at_start: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(at_start=at_start)
    return "".join([detokenizer.push(ids) for ids in steps] + [detokenizer.flush()])


@given(data=st.data())
def test_byte_level_deltas_join_to_the_library_s_decoding_of_any_ids(
    byte_level: Tokenizer, byte_level_backend: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    steps = data.draw(steps_of_ids(byte_level.vocab_size - 1))
    assert joined(byte_level, steps) == byte_level_backend.decode([*chain.from_iterable(steps)])


@given(data=st.data())
def test_sentencepiece_deltas_join_to_the_library_s_decoding_of_ids_that_spell_text(
    sentencepiece: Tokenizer, sentencepiece_backend: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    spelled = data.draw(st.lists(st.one_of(TEXTS, st.sampled_from([" hello", "<s>", "<0xZZ>", "  "]))))
    ids = sentencepiece.encode("".join(spelled), add_special=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5).map(sorted))
    steps = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert joined(sentencepiece, steps) == sentencepiece_backend.decode(ids)


@given(data=st.data())
def test_sentencepiece_deltas_join_to_the_full_decoding_of_any_ids(
    sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    steps = data.draw(steps_of_ids(sentencepiece.vocab_size - 1))
    assert joined(sentencepiece, steps) == sentencepiece.decode([*chain.from_iterable(steps)])


@given(text=TEXTS, at_start=st.booleans())
def test_no_delta_holds_part_of_a_character(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, at_start: bool
) -> None:
    whole = text.replace("\ufffd", "?")
    for tokenizer in (byte_level, sentencepiece):
        detokenizer = tokenizer.detokenizer(at_start=at_start)
        for token_id in tokenizer.encode(whole, add_special=False):
            assert "\ufffd" not in detokenizer.push([token_id])
        assert detokenizer.flush() == ""


def test_a_character_is_given_out_with_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("😀", add_special=False)
    detokenizer = byte_level.detokenizer(at_start=True)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "😀"]


def test_an_unfinished_character_shows_once_the_sequence_ends(byte_level: Tokenizer) -> None:
    detokenizer = byte_level.detokenizer(at_start=True)
    assert detokenizer.push(byte_level.encode("é", add_special=False)[:1]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_sentencepiece_writes_each_broken_byte_and_keeps_its_neighbours(sentencepiece: Tokenizer) -> None:
    char = sentencepiece.encode("😀", add_special=False)[1:]
    assert sentencepiece.decode([*char, *char[:3], *char]) == "😀\ufffd\ufffd\ufffd😀"


def test_special_tokens_add_nothing_even_between_the_bytes_of_a_character(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("é", add_special=False)
    special = byte_level.token_id("<s>")
    assert special is not None
    assert byte_level.decode([special, first, special, second]) == "é"


def test_ids_that_no_token_has_add_nothing(byte_level: Tokenizer) -> None:
    assert byte_level.decode([byte_level.vocab_size, 10**9, -1]) == ""


def test_the_leading_space_of_sentencepiece_shows_only_where_a_text_goes_on(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("he", add_special=False)
    assert joined(sentencepiece, [ids], at_start=True) == "he"
    assert joined(sentencepiece, [ids], at_start=False) == " he"
    special = sentencepiece.token_id("<s>")
    assert special is not None
    space = sentencepiece.token_id("\u2581")
    assert space is not None
    assert joined(sentencepiece, [[special], [space], [space], ids], at_start=True) == "  he"


def test_special_tokens_are_written_where_they_are_not_to_be_skipped(byte_level: Tokenizer) -> None:
    special = byte_level.token_id("<s>")
    assert special is not None
    ids = [special, *byte_level.encode("é", add_special=False), special]
    assert byte_level.detokenizer(at_start=True, skip_special=False).push(ids) == "<s>é<s>"
    assert byte_level.detokenizer(at_start=True).push(ids) == "é"
