"""Schemas are rewritten so that llguidance compiles them, and what matches the rewritten one matches the one sent."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_vocabulary import END, small_tokenizer

from pdserve.base.errors import GrammarError
from pdserve.engine.masks import allowed
from pdserve.grammar.compiler import Compiler
from pdserve.grammar.disjoint import Prover
from pdserve.grammar.matching import Grammars
from pdserve.grammar.plain import FORMATS, UNSUPPORTED, plain
from pdserve.protocol.sampling import StructuredOutput

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.vocab_size
COMPILER = Compiler(TOKENIZER.to_json(), (END,))
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: COMPILER, lambda: None)
    yield made
    made.close()


def specification(schema: Schema) -> StructuredOutput:
    return StructuredOutput("json_schema", (json.dumps(schema),))


def compiled(schema: Schema, *, lenient: bool = False) -> tuple[str, ...]:
    """Compile a schema as it is rewritten; return what is ignored."""
    found = plain(specification(schema), lenient=lenient)
    COMPILER.compile(found.structured, tries=True)
    return found.ignored


def answers(grammars: Grammars, schema: Schema, draw: random.Random, *, lenient: bool = False) -> Iterator[Any]:
    """Yield values that a model without knowledge writes; long ones are left out."""
    new_matcher = grammars.compile(plain(specification(schema), lenient=lenient).structured)
    closing = {END, *TOKENIZER.encode('"]}', add_special=False)}
    for _ in range(4):
        matcher, output, bits = new_matcher(), list[int](), np.zeros(-(-VOCAB // 32), np.int32)
        while len(output) < 300 and output[-1:] != [END]:
            matcher.fill(output, bits)
            found = set(np.flatnonzero(allowed(bits, VOCAB)).tolist())
            preferred = found & closing if draw.random() < 0.4 else set()
            output.append(draw.choice(sorted(preferred or found)))
        if output[-1] == END:
            yield json.loads(TOKENIZER.decode(output))


def takes(schema: Schema, value: object) -> bool:
    matcher = COMPILER.compile(plain(specification(schema), lenient=False).structured).deep_copy()
    ids = TOKENIZER.encode(json.dumps(value), add_special=False)
    return all(matcher.try_consume_tokens([each]) == 1 for each in ids) and matcher.is_accepting()


# ---- formats


FORMATS_OF_JSON_SCHEMA = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer"),
    *("regex", "password", "binary", "byte", "unknown", "phone", "color"),
)


def test_every_format_is_followed_or_ignored() -> None:
    for name in FORMATS_OF_JSON_SCHEMA:
        text = {"type": "string", "format": name}
        try:
            COMPILER.compile(specification(text))
            is_known = True
        except GrammarError:
            is_known = False
        assert is_known == (name in FORMATS), name
        assert compiled(text) == (() if is_known else (f"format={name}",))


def test_each_ignored_format_is_named_once_wherever_it_is() -> None:
    secret = {"type": "string", "format": "password"}
    schema = {
        "type": "object",
        "properties": {"a": secret, "b": {"anyOf": [secret, {"type": "array", "items": {"format": "binary"}}]}},
        "$defs": {"c": secret},
    }
    assert compiled(schema) == ("format=password", "format=binary")


def test_what_only_looks_like_a_keyword_is_left_alone() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"const": "password"}, "not": {"enum": [{"uniqueItems": True, "oneOf": 1}]}},
        "required": ["format", "not"],
        "default": {"format": "password"},
        "examples": [{"not": {}}],
    }
    found = plain(specification(schema), lenient=False)
    assert (found.structured, found.ignored) == (specification(schema), ())


def test_schemas_within_a_grammar_are_rewritten_too() -> None:
    grammar = (
        'start: "x" %json {"type": "string", "format": "password"} y\ny: %json {"oneOf": [{"const": 1}, {"const": 2}]}'
    )
    found = plain(StructuredOutput("grammar", (grammar,)), lenient=False)
    assert found.ignored == ("format=password",)
    COMPILER.compile(found.structured, tries=True)
    with pytest.raises(GrammarError, match="not is not supported"):
        plain(StructuredOutput("grammar", ('start: %json {"not": {"type": "null"}}',)), lenient=False)


# ---- oneOf


FEW = st.integers(0, 3)
CONSTANTS = st.sampled_from([0, 1, 2, 1.0, 1.5, True, False, None, "", "a", "ab", [], [1]])
LEAVES: list[st.SearchStrategy[Schema]] = [
    st.builds(lambda value: {"const": value}, CONSTANTS),
    st.builds(lambda values: {"enum": values}, st.lists(CONSTANTS, min_size=1, max_size=3)),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "boolean", "integer", "string"])),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-3, 3), FEW),
    st.builds(lambda low: {"type": "integer", "exclusiveMinimum": low, "maximum": low + 2}, st.integers(-3, 3)),
    st.builds(lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size}, FEW, FEW),
    st.builds(
        lambda low, size: {"type": "array", "items": {"type": "null"}, "minItems": low, "maxItems": low + size},
        FEW,
        FEW,
    ),
]


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda parts, some: {
            "type": "object",
            "properties": parts,
            "required": sorted(parts)[:some],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["kind", "a", "b"]), inner, max_size=2),
        st.integers(0, 2),
    )


branches = st.recursive(
    st.one_of(LEAVES),
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda first: {"type": "array", "prefixItems": [first], "minItems": 1, "maxItems": 1}, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(branches, min_size=2, max_size=3), st.integers(0, 2**32))
def test_answers_of_a_one_of_that_is_accepted_match_exactly_one_alternative(
    grammars: Grammars, alternatives: list[Schema], seed: int
) -> None:
    schema = {"oneOf": alternatives}
    assume(Prover(schema).overlapping(alternatives) is None)
    for value in answers(grammars, schema, random.Random(seed)):
        jsonschema.validate(value, schema)


VALUES: list[Any] = [
    *(0, 1, 2, 3, -1, -3, 1.5, True, False, None, "", "a", "ab", "abc", [], [1], [None], [None, None], ["a"]),
    *({}, {"kind": 1}, {"kind": "a"}, {"a": None, "kind": True}, {"a": 1}, {"b": "a"}, {"a": {}}),
]


@settings(max_examples=4 * settings.default.max_examples)
@given(branches, branches)
def test_no_value_matches_both_of_two_schemas_that_are_proven_disjoint(first: Schema, second: Schema) -> None:
    if not Prover({}).are_disjoint(first, second):
        return
    valid = [jsonschema.Draft202012Validator(each).is_valid for each in (first, second)]
    for value in VALUES:
        assert not all(is_valid(value) for is_valid in valid), value


def tagged(name: str, **more: Any) -> Schema:  # noqa: ANN401
    properties = {"kind": {"const": name}, **more}
    return {"type": "object", "properties": properties, "required": ["kind"]}


DISJOINT: list[list[Any]] = [
    [{"const": 1}, {"const": 2}],
    [{"const": 1}, {"const": True}, {"const": "1"}, {"const": None}],
    [{"const": "auto"}, {"type": "object"}],
    [{"enum": ["a", "b"]}, {"enum": ["c"]}],
    [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
    [tagged("circle", radius={"type": "integer"}), tagged("square", side={"type": "integer"})],
    [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}, {"type": "null"}],
    [{"allOf": [{"$ref": "#/$defs/circle"}]}, {"anyOf": [{"$ref": "#/$defs/square"}, {"type": "string"}]}],
    [
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
    ],
    [{"const": 5}],
]
DEFS = {"circle": tagged("circle"), "square": tagged("square")}


@pytest.mark.parametrize("alternatives", DISJOINT)
def test_alternatives_without_a_common_value_are_accepted(grammars: Grammars, alternatives: list[Any]) -> None:
    schema = {"oneOf": alternatives, "$defs": DEFS}
    assert compiled(schema) == ()
    compiled({"type": "object", "properties": {"x": {"oneOf": alternatives}}, "$defs": DEFS})
    compiled({"oneOf": alternatives, "anyOf": [True], "$defs": DEFS})
    for value in answers(grammars, schema, random.Random(1)):
        jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],  # disjoint, but that is not seen
        [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}],  # likewise
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
        [{"$ref": "#"}, {"type": "null"}],
    ],
)
def test_others_are_refused_with_what_the_client_can_change(alternatives: list[Any]) -> None:
    with pytest.raises(GrammarError, match=r"alternatives 0 and 1 of oneOf may match the same value") as refused:
        compiled({"oneOf": alternatives})
    assert "coerce" not in str(refused.value)
    assert "or use anyOf" in str(refused.value)


def test_a_reference_into_alternatives_still_leads_there() -> None:
    schema = {"oneOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/oneOf/0"}, "minItems": 1, "maxItems": 1}]}
    assert compiled(schema) == ()
    assert takes(schema, [1])
    assert not takes(schema, [2])


def test_many_alternatives_are_bounded() -> None:
    many = [tagged(f"kind {number}", value={"type": "integer"}) for number in range(60)]
    assert Prover({}).overlapping(many) is None
    deep: Schema = {"const": 1}
    for _ in range(40):
        deep = {"anyOf": [deep, deep, deep]}
    assert Prover({}).overlapping([deep, deep]) == (0, 1)  # in time, though there are 3**80 pairs


# ---- numbers


EDGES = st.builds(
    lambda edge, near, sign: sign * edge + near,
    st.sampled_from([2**53, 2**62, 2**63, 2**64]),
    st.integers(-3, 3),
    st.sampled_from([-1, 1]),
)


@settings(max_examples=2 * settings.default.max_examples)
@given(EDGES, EDGES, st.sampled_from(["both", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]))
def test_large_bounds_compile_and_let_nothing_beyond_through(a: int, b: int, which: str) -> None:
    low, high = sorted((a, b))
    schema = {"type": "integer", **({"minimum": low, "maximum": high} if which == "both" else {which: a})}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    may_be_far = which == "both" and (high - low < 2048 or low > 2**62 or high < -(2**62))
    if may_be_far or (a > 2**62 and which.endswith("inimum")) or (a < -(2**62) and which.endswith("aximum")):
        try:
            compiled(schema)
        except GrammarError as error:
            assert "leave no whole number that a grammar can follow" in str(error)  # noqa: PT017
            return
    assert compiled(schema) == ()
    for number in {edge + near for edge in (0, a, b, 2**63, -(2**63), 2**64) for near in (-1, 0, 1)}:
        assert not takes(schema, number) or valid(number), number
    inner = [number for number in (-(2**62), -(2**53), -1, 0, 1, 2**53, 2**62) if valid(number) and not number % 1024]
    assert all(takes(schema, number) for number in inner)


@pytest.mark.parametrize(
    ("bounds", "taken", "refused"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, (0, -5, 2**62), (2**63, -(2**63) - 1)),
        ({"minimum": 0, "maximum": 2**64 - 1}, (0, 2**62), (-1, 2**64)),
        ({"minimum": -(2**63)}, (0, -(2**62)), (-(2**63) - 1,)),
        ({"maximum": 2**63 - 1}, (0, 2**62), (2**63,)),
        ({"minimum": 2**62}, (2**62, 2**62 + 1), (2**62 - 1, 0)),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 9}, (2**53 + 2, 2**53 + 3, 2**53 + 8), (2**53, 2**53 + 10)),
        ({"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, (0,), (2**63, -(2**63) - 1)),
        ({"minimum": -1e19, "maximum": 1e19}, (0,), (10**20,)),
    ],
)
def test_bounds_of_64_bits(bounds: Schema, taken: tuple[int, ...], refused: tuple[int, ...]) -> None:
    schema = {"type": "integer", **bounds}
    assert compiled(schema) == ()
    assert [takes(schema, number) for number in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    "bounds", [{"minimum": 2**63 - 1}, {"maximum": -(2**63)}, {"minimum": 2**64, "maximum": 2**65}]
)
def test_bounds_that_leave_nothing_to_follow_are_named(bounds: Schema) -> None:
    with pytest.raises(GrammarError, match=f"^{next(iter(bounds))} -?[0-9]+ .*leave no whole number"):
        compiled({"type": "integer", **bounds})


def test_large_constants_are_exact_or_refused() -> None:
    for number in (2**53, 2**53 + 2, 2**60, -(2**60), 2**62 + 1024):
        for schema in (
            {"const": number},
            {"enum": [1, number, "a"]},
            {"type": "integer", "enum": [number], "anyOf": [{}]},
        ):
            assert compiled(schema) == ()
            assert takes(schema, number)
            assert not takes(schema, number + 1)
    for number in (2**53 + 1, 2**63, -(2**63), 2**64 - 1, 10**30):
        for schema in ({"const": number}, {"enum": [1, number]}, {"const": {"x": [number]}}):
            with pytest.raises(GrammarError, match=r"^(const|enum) has a whole number beyond 9007199254740992"):
                compiled(schema)


def test_large_bounds_of_numbers_that_need_not_be_whole() -> None:
    schema = {"type": "number", "minimum": 0, "maximum": 2**63}
    assert compiled(schema) == ()
    assert takes(schema, 1.5)
    assert not takes(schema, -1)
    assert not takes(schema, 10**19)


# ---- what no grammar can follow


EXAMPLES: dict[str, Any] = {
    "uniqueItems": True, "propertyNames": {"pattern": "a"}, "not": {"type": "null"}, "contains": {"type": "null"},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["b"]}}, "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False, "unevaluatedItems": False,
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_no_grammar_can_follow_is_refused_by_name_and_ignored_on_demand(name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": ["object", "array", "string"], name: EXAMPLES[name]}}}
    with pytest.raises(GrammarError, match=rf"^{name} is not supported \(at /properties/x\)$"):
        compiled(schema)
    assert compiled(schema, lenient=True) == (name,)


def test_conditions_are_refused_and_ignored_together() -> None:
    schema = {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "null"}}
    with pytest.raises(GrammarError, match=r"^else is not supported"):
        compiled(schema)
    assert set(compiled(schema, lenient=True)) == {"if", "then", "else"}


@pytest.mark.parametrize(
    "idle",
    [{"uniqueItems": False}, {"propertyNames": True}, {"not": False}, {"if": {}}, {"then": False}, {"minContains": 2},
     {"unevaluatedProperties": {}}, {"dependentRequired": {}}],
)  # fmt: skip
def test_keywords_without_effect_need_no_leniency(idle: Schema) -> None:
    assert compiled({"type": ["object", "array"], **idle}) == ()


def test_every_keyword_that_llguidance_refuses_is_known_here() -> None:
    for name in UNSUPPORTED:
        with pytest.raises(GrammarError, match="Unimplemented keys"):
            COMPILER.compile(specification({name: EXAMPLES.get(name, {})}))


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [("^(?!a)b", "look"), (r"a(?=b)", "look"), (r"(?<=a)b", "look"), (r"(?<!\\)b", "look"), (r"^(a)\1$", "reference"),
     (r"(?:[)](?!a))", "look"), (r"(?<n>a)\k<n>", "reference")],
)  # fmt: skip
def test_patterns_beyond_regular_languages(pattern: str, problem: str) -> None:
    for schema in ({"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: True}}):
        with pytest.raises(GrammarError, match=problem):
            compiled(schema)
    assert compiled({"type": "string", "pattern": pattern}, lenient=True) == ("pattern",)
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}, "^x": {"type": "null"}}}
    assert compiled(named, lenient=True) == ("patternProperties",)


@pytest.mark.parametrize("pattern", [r"\(\?=a", r"[(?=]+", r"[^](?!]x", r"\\\(\?!", r"(?:a|b)", r"[\](?=]", r"(?i:a)"])
def test_patterns_that_only_look_so(pattern: str) -> None:
    assert plain(specification({"type": "string", "pattern": pattern}), lenient=False).ignored == ()


def test_alternatives_that_overlap_are_taken_as_any_of_on_demand() -> None:
    assert compiled({"oneOf": [{"type": "number"}, {"type": "integer"}]}, lenient=True) == ("oneOf",)


def test_what_is_no_schema_is_left_to_the_compiler() -> None:
    for text in ("", "{", "[]", "5", "[" * 5000, '{"a":' * 5000, '{"minimum": 1e999, "type": "integer"}'):
        made = StructuredOutput("json_schema", (text,))
        assert plain(made, lenient=False).structured == made
