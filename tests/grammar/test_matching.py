"""Masks allow exactly the tokens that can go on to a match; where a matcher came from changes nothing."""

import itertools
import json
import random
import re
import tracemalloc
from array import array
from collections.abc import Collection, Iterator
from contextlib import suppress

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_vocabulary import END, small_tokenizer

from pdserve.base.errors import GrammarError
from pdserve.engine.masks import allowed
from pdserve.grammar.compiler import Compiler
from pdserve.grammar.matching import MAX_KEPT, Grammars, Matching
from pdserve.protocol.sampling import StructuredOutput

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.vocab_size
ALPHABET = "ab1"


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: Compiler(TOKENIZER.to_json(), (END,)), lambda: None)
    yield made
    made.close()


def following(matching: Matching, output: list[int]) -> set[int]:
    bits = np.zeros(-(-VOCAB // 32), np.int32)
    matching.fill(output, bits)
    return set(np.flatnonzero(allowed(bits, VOCAB)).tolist())


def texts_up_to(length: int) -> list[str]:
    return ["".join(chars) for n in range(length + 1) for chars in itertools.product(ALPHABET, repeat=n)]


def check_following(matching: Matching, language: Collection[str], prefix: str) -> None:
    """Compare a mask with the tokens after which some text of the language can still come.

    Where only one text can, llguidance allows the token that the tokenizer would write it with, and no other.
    """
    tokens = {END} if prefix in language else set()
    for token_id in range(2, VOCAB):
        text = prefix + TOKENIZER.decode([token_id])
        if any(each.startswith(text) for each in language) and text != prefix:
            tokens.add(token_id)
    found = following(matching, TOKENIZER.encode(prefix, add_special=False))
    if sum(text.startswith(prefix) for text in language) == 1:
        (text,) = [text for text in language if text.startswith(prefix)]
        assert found == {[*TOKENIZER.encode(text[len(prefix) :], add_special=False), END][0]}
    else:
        assert found == tokens


REGEXES = ["a*b", "(ab|ba)*1?", "a{2,4}|b1+", "[a1]b?a", "(a|b)(1|aab)"]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_allows_what_enumeration_allows(grammars: Grammars, pattern: str) -> None:
    matcher = grammars.compile(StructuredOutput("regex", (pattern,)))()
    compiled = re.compile(pattern)
    language = {text for text in texts_up_to(7) if compiled.fullmatch(text)}
    for prefix in texts_up_to(3):
        if any(text.startswith(prefix) for text in language):
            check_following(matcher, language, prefix)


def test_a_choice_allows_what_some_choice_goes_on_with(grammars: Grammars) -> None:
    choices = ("ab", "aab", "b1", "a", 'say "a"\n')
    matcher = grammars.compile(StructuredOutput("choice", choices))()
    for choice in choices:
        for length in range(len(choice) + 1):
            check_following(matcher, choices, choice[:length])


def test_characters_of_several_tokens_are_allowed_byte_by_byte(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("choice", ("é", "ê")))()
    first, second = TOKENIZER.encode("é", add_special=False)
    assert following(matcher, []) == {first}
    assert following(matcher, [first]) == {second, TOKENIZER.encode("ê", add_special=False)[1]}


SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}, st.integers(-9, 9)),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["a", "ab", 1, None, True]), min_size=1)),
        st.builds(lambda pattern: {"type": "string", "pattern": f"^{pattern}$"}, st.sampled_from(["a+b", "[ab]{2}"])),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda parts, some: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts)[:some],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name", "é"]), inner, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=6,
)


def walk(matching: Matching, draw: random.Random, longest: int = 400) -> list[int] | None:
    """Return an answer drawn at random, end included, with ends and closing brackets preferred; None if it is long."""
    output: list[int] = []
    closing = {END, *TOKENIZER.encode('"]}', add_special=False)}
    while len(output) < longest:
        found = following(matching, output)
        output.append(draw.choice(sorted(found & closing if found & closing and draw.random() < 0.4 else found)))
        if output[-1] == END:
            return output
    return None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_drawn_parses_validates_and_is_the_same_for_a_matcher_that_starts_anywhere(
    grammars: Grammars, schema: dict[str, object], seed: int
) -> None:
    new_matcher, draw = grammars.compile(StructuredOutput("json_schema", (json.dumps(schema),))), random.Random(seed)
    output = walk(new_matcher(), draw)
    if output is None:
        return
    jsonschema.validate(json.loads(TOKENIZER.decode(output)), schema)
    steady, jumping = new_matcher(), new_matcher()
    for length in range(0, len(output), 1 + len(output) // 8):
        expected = following(steady, output[:length])
        assert following(new_matcher(), output[:length]) == expected
        place = draw.randrange(len(output))
        following(jumping, output[:place])
        assert following(jumping, output[:length]) == expected
        assert output[length] in expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCHEMAS, st.integers(0, 2**32))
def test_guesses_that_turn_out_wrong_leave_nothing_behind(
    grammars: Grammars, schema: dict[str, object], seed: int
) -> None:
    """Asked what follows each of some guesses, which a grammar may refuse, it goes on as if it had not been."""
    new_matcher, draw = grammars.compile(StructuredOutput("json_schema", (json.dumps(schema),))), random.Random(seed)
    output = walk(new_matcher(), draw)
    if output is None:
        return
    steady, guessing = new_matcher(), new_matcher()
    for length in range(0, len(output), 1 + len(output) // 8):
        guesses = [*output[length : length + draw.randrange(4)], *(draw.randrange(2, VOCAB) for _ in range(3)), END, 7]
        for count in range(1, len(guesses) + 1):
            with suppress(GrammarError):
                following(guessing, [*output[:length], *guesses[:count]])
        assert following(guessing, output[:length]) == following(steady, output[:length])


def test_continuations_of_one_request_do_not_disturb_each_other(grammars: Grammars) -> None:
    new_matcher = grammars.compile(StructuredOutput("json_object"))
    first, second, draw = new_matcher(), new_matcher(), random.Random(5)
    outputs: tuple[list[int], list[int]] = ([], [])
    for _ in range(60):
        for matcher, output in ((first, outputs[0]), (second, outputs[1])):
            found = following(matcher, output) - {END}
            if found:
                output.append(draw.choice(sorted(found)))
    for output in outputs:
        assert following(new_matcher(), output) == following(first, output) == following(second, output)


def test_a_long_answer_is_not_unpacked_at_every_token(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("regex", ("(ba)*",)))()
    length = 5000
    token_id = next(token_id for token_id in range(VOCAB) if TOKENIZER.decode([token_id]) == "ba")
    assert token_id > 256  # of smaller ones Python keeps one object each
    output = array("q", [token_id] * length)
    bits = np.zeros(-(-VOCAB // 32), np.int32)
    matcher.fill(output[:-1], bits)
    tracemalloc.start()
    try:
        matcher.fill(output, bits)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * 8 * length  # packed and copied twice; a list of ints takes five times as much as one copy


def test_spaces_have_an_end(grammars: Grammars) -> None:
    matcher, output = grammars.compile(StructuredOutput("json_object"))(), TOKENIZER.encode("{", add_special=False)
    (space,) = TOKENIZER.encode(" ", add_special=False)
    while space in following(matcher, output):
        output.append(space)
    assert len(output) == 21


def test_tokens_that_no_text_of_the_grammar_has_are_an_error(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("choice", ("ab",)))()
    with pytest.raises(GrammarError):
        following(matcher, TOKENIZER.encode("b", add_special=False))


def test_a_grammar_that_leads_nowhere_is_an_error_where_it_does(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("grammar", ('start: "a" x | "b"\nx: x "b"',)))()
    output = TOKENIZER.encode("a", add_special=False)
    assert set(output) < following(matcher, [])
    with pytest.raises(GrammarError):
        following(matcher, output)


def test_what_does_not_compile_is_an_error_of_its_own_sequences(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("regex", ("(a",)))()
    with pytest.raises(GrammarError, match="unclosed group"):
        following(matcher, [])


def test_grammars_in_use_outlive_those_kept() -> None:
    grammars = Grammars(lambda: Compiler(TOKENIZER.to_json(), (END,)), lambda: None)
    new_matcher = grammars.compile(StructuredOutput("choice", ("ab",)))
    for number in range(MAX_KEPT + 1):
        grammars.compile(StructuredOutput("choice", (str(number),)))
    assert TOKENIZER.encode("ab", add_special=False)[0] in following(new_matcher(), [])
    grammars.close()


def test_a_grammar_is_compiled_once() -> None:
    done: list[None] = []
    grammars = Grammars(lambda: Compiler(TOKENIZER.to_json(), (END,)), lambda: done.append(None))
    for _ in range(3):
        following(grammars.compile(StructuredOutput("choice", ("ab",)))(), [])
    assert len(done) == 1
    grammars.close()
