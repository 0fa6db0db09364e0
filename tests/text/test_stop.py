"""Stop strings, across any borders between pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.protocol.refusal import RefusedError, Status
from pdserve.text.stop import MAX_STOP_BYTES, MAX_STOP_STRINGS, OutputText, StopMatcher, TextDelta, check_stops
from pdserve.text.tokenizer import Tokenizer

LETTERS = st.text(alphabet="ab", max_size=12)  # few letters, so that much almost matches
STOPS = st.lists(st.text(alphabet="ab", min_size=2, max_size=6), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Look at every beginning of the text, shortest first, as a reader would who stops at once."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(matching, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_become_a_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of the text that begins a stop string."""
    ends = [text[start:] for start in range(len(text))]
    return max((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), default=0)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
@example(pieces=["ab", "ca", "b"], stops=("bc", "abcab"))
@example(pieces=["aa", "ab"], stops=("aab",))
@example(pieces=["abc"], stops=("abc", "c"))
def test_output_ends_where_the_first_stop_string_begins_whatever_the_pieces(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    text, stop = first_stop("".join(pieces), stops)
    matcher = StopMatcher(stops)
    given_out = "".join([matcher.push(piece) for piece in pieces] + [matcher.flush()])
    assert (given_out, matcher.matched) == (text, stop)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_exactly_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    given_out = seen = ""
    for piece in pieces:
        seen += piece
        given_out += matcher.push(piece)
        if matcher.matched is not None:
            return
        assert len(seen) - len(given_out) == may_become_a_stop(seen, stops)


@given(early=st.lists(LETTERS, max_size=5), late=st.lists(LETTERS, max_size=5), stops=STOPS)
@example(early=["ab"], late=["c"], stops=("ab", "abc"))
@example(early=["aab"], late=["b"], stops=("aab", "bb"))
def test_a_stop_string_counts_where_it_ends_in_a_piece_that_may_end_the_text(
    early: list[str], late: list[str], stops: tuple[str, ...]
) -> None:
    before, text = "".join(early), "".join(early + late)
    ends = [end for end in range(len(before) + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len) if ends else None
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(piece, may_end=False) for piece in early)
    held = len(before) - len(given_out)
    proper = {"", *(stop[:length] for stop in stops for length in range(len(stop)))}
    assert held == max(length for length in range(len(before) + 1) if before[len(before) - length :] in proper)
    given_out += "".join(matcher.push(piece) for piece in late) + matcher.flush()
    assert matcher.matched == stop
    if stop is None:
        assert given_out == text
    else:
        assert given_out == text[: max(ends[0] - len(stop), len(before) - held)]


def test_nothing_is_held_back_without_stop_strings() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


def test_nothing_is_given_out_after_a_match() -> None:
    matcher = StopMatcher(("b",))
    assert [matcher.push(piece) for piece in ("ab", "cd", "b")] == ["a", "", ""]
    assert matcher.flush() == ""
    assert matcher.matched == "b"


def test_stop_strings_at_the_limits_are_accepted() -> None:
    check_stops([])
    check_stops(["é" * (MAX_STOP_BYTES // 2)] * MAX_STOP_STRINGS)


@pytest.mark.parametrize(
    ("stops", "complaint"),
    [
        (["x"] * 17, "stop: 17 stop strings are over the limit of 16"),
        (["ok", "é" * 65], "stop: 130 bytes at position 1 are outside [1, 128]"),
        ([""], "stop: 0 bytes at position 0 are outside [1, 128]"),
    ],
)
def test_stop_strings_over_a_limit_are_refused_with_both_numbers(stops: list[str], complaint: str) -> None:
    with pytest.raises(RefusedError) as refused:
        check_stops(stops)
    assert (refused.value.refused.status, refused.value.refused.message) == (Status.INVALID_ARGUMENT, complaint)


def test_tokens_count_up_to_the_one_that_completes_the_stop_string(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one END two", add_special=False)
    output = OutputText(byte_level.detokenizer(at_start=True), ("END",))
    assert output.push(ids) == TextDelta("one ", len("one END"), "END")
    assert output.finish() == TextDelta("", 0, "END")


def test_a_stop_string_may_begin_in_one_step_and_end_in_another(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level.detokenizer(at_start=True), ("END",))
    deltas = [output.push(byte_level.encode(text, add_special=False)) for text in ("a", "E", "ND")]
    assert deltas == [TextDelta("a", 1, None), TextDelta("", 1, None), TextDelta("", 2, "END")]


def test_what_is_held_back_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level.detokenizer(at_start=True), ("END",))
    unfinished = byte_level.encode("aENé", add_special=False)[:-1]
    assert output.push(unfinished) == TextDelta("a", 4, None)
    assert output.finish() == TextDelta("EN\ufffd", 0, None)


def test_no_stop_string_ends_the_text_within_its_first_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("END a END b", add_special=False)
    for steps in ([ids], [ids[place : place + 1] for place in range(len(ids))]):
        output = OutputText(byte_level.detokenizer(at_start=True), ("END",), min_tokens=3)
        deltas = [output.push(step) for step in steps]
        assert "".join(delta.text for delta in deltas) == "END a "
        assert output.finish().stop == "END"


def test_a_stop_string_ends_the_text_in_the_first_token_past_the_fewest(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("END", add_special=False)
    for min_tokens, stop in ((2, "END"), (3, None)):
        output = OutputText(byte_level.detokenizer(at_start=True), ("END",), min_tokens)
        assert (output.push(ids).text + output.finish().text, output.finish().stop) == ("" if stop else "END", stop)


def test_what_comes_out_at_the_end_does_not_stop_a_text_that_may_not(byte_level: Tokenizer) -> None:
    unfinished = byte_level.encode("é", add_special=False)[:1]
    output = OutputText(byte_level.detokenizer(at_start=True), ("\ufffd",), min_tokens=1)
    assert output.push(unfinished) == TextDelta("", 1, None)
    assert output.finish() == TextDelta("\ufffd", 0, None)


@pytest.mark.parametrize("stops", [(), ("END",)])
def test_the_token_that_ended_a_sequence_counts_and_is_left_out_of_its_text(
    byte_level: Tokenizer, stops: tuple[str, ...]
) -> None:
    ids = byte_level.encode("one!", add_special=False)
    for includes_stop, text in ((False, "one"), (True, "one!")):
        output = OutputText(byte_level.detokenizer(at_start=True), stops, includes_stop=includes_stop)
        assert output.push(ids, ends_in_stop_token=True) == TextDelta(text, len(ids), None)
        assert output.finish() == TextDelta("", 0, None)
