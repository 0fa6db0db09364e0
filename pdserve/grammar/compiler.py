"""Structured output to a matcher of llguidance, for one model's vocabulary.

llguidance bounds its own work by fuel, with two exceptions. It compiles long chains of rules by recursion, which ends a
process whose stack is too small; and large schemas take it a second. So what a client sends is compiled in a child
process first (`child.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from random import Random
from typing import Any

import llguidance

from pdserve.errors import GrammarError
from pdserve.sampling import StructuredOutput

Schema = Mapping[str, Any]

_ALTERNATIVES = ("anyOf", "oneOf")


def describes_something_finite(schema: Schema) -> bool:
    """Return whether some finite value may match a schema, which may refer to itself.

    Whether a part of a schema describes something finite depends on its own parts. If parts depend on each other in a
    circle, they do only if that follows without assuming it: the least fixed point. References that lead nowhere, and
    keywords not looked at here, are left to llguidance.
    """
    parts = {id(part): part for part in _reachable(schema, schema)}
    in_order = list(reversed(parts.values()))  # inner parts mostly come before outer ones
    finite: set[int] = set()
    num_before = -1
    while num_before < len(finite):
        num_before = len(finite)
        for part in in_order:
            if id(part) not in finite and _is_finite(part, schema, finite):
                finite.add(id(part))
    return id(schema) in finite


def _is_finite(part: Schema, root: Schema, finite: set[int]) -> bool:
    """Return whether a part describes something finite, given the ids of parts that are known to."""

    def holds(inner: object) -> bool:
        return inner is not False and (not isinstance(inner, dict) or id(inner) in finite)

    target = _target(part, root)
    if not holds(target) or not all(map(holds, _listed(part, "allOf"))):
        return False
    if any(_listed(part, key) and not any(map(holds, _listed(part, key))) for key in _ALTERNATIVES):
        return False
    if "enum" in part or "const" in part:
        return True
    kinds = part.get("type", "string")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(
        all(map(holds, _needed_properties(part)))
        if kind == "object"
        else all(map(holds, _needed_items(part)))
        if kind == "array"
        else True
        for kind in kinds
    )


def _reachable(schema: Schema, root: Schema) -> Iterator[Schema]:
    seen: set[int] = set()
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [_target(part, root), *_needed_properties(part), *_needed_items(part)]
        for key in ("allOf", *_ALTERNATIVES):
            waiting += _listed(part, key)


def _needed_properties(part: Schema) -> list[object]:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(required, list):
        return []
    properties = properties if isinstance(properties, dict) else {}
    others = part.get("additionalProperties", True)
    return [properties.get(name, others) for name in required if isinstance(name, str)]


def _needed_items(part: Schema) -> list[object]:
    least = part.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return []
    first = _listed(part, "prefixItems")
    return first[:least] + ([part.get("items", True)] if least > len(first) else [])


def _listed(part: Schema, key: str) -> list[object]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _target(part: Schema, root: Schema) -> object:
    """Return what a reference within the schema leads to, or True if there is no reference."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: object = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found


class Outcome(StrEnum):
    """How compiling ended, as `child.py` writes it."""

    COMPILED = "compiled"
    REFUSED = "refused"  # the specification is wrong
    OVER_LIMIT = "over limit"  # perhaps only because the machine is busy
    ENDED = "ended"  # the process was ended, for example because memory ran out


# Indented JSON has a line end and some spaces between its parts. Without a limit a model may write spaces for ever.
WHITESPACE = r"\n? {0,20}"
# For one token, because the engine's step waits for its mask. The twenty schemas of the tests take a tenth of this.
_LIMITS = llguidance.LLParserLimits(
    verbose_errors=False, step_max_items=10_000, step_lexer_fuel=100_000, max_lexer_states=50_000
)
NUM_TRIED = 24  # tokens
_QUIET = 0
_SCHEMA = re.compile(r"%json\s*(?=\{)")  # begins one within a grammar
_ENDLESS = "it is recursive without end: no finite JSON value matches it"


class Compiler:
    """Compiles for one model. Threads may share it."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: as the tokenizers library writes it; eos_token_ids: in its vocabulary.

        Takes some tenths of a second. GrammarError where answers have no end, or llguidance cannot read the tokenizer.
        """
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token")
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer is not supported: {error}") from error

    def compile(self, structured: StructuredOutput, *, tries: bool = False) -> llguidance.LLMatcher:
        """Return a matcher before its first token; GrammarError says why there is none.

        With `tries`, also if an answer of random tokens gets stuck, or too complex, within its first NUM_TRIED tokens.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(structured), log_level=_QUIET, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(reason(matcher))
        first = matcher.deep_copy()
        first.compute_bitmask()  # warms what copies share, too
        if tries and not first.is_error():
            _walk(first)
        if first.is_error():
            raise GrammarError(reason(first))
        return matcher


def _walk(matcher: llguidance.LLMatcher) -> None:
    """Let random tokens follow, always the same ones."""
    random = Random(0)
    for _ in range(NUM_TRIED):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        places = [place for place, byte in enumerate(mask) if byte]
        if not places:
            return
        place = random.choice(places)
        matcher.consume_token(8 * place + random.choice([bit for bit in range(8) if mask[place] >> bit & 1]))


def reason(matcher: llguidance.LLMatcher) -> str:
    """Return what is wrong with a matcher, in one line."""
    text = matcher.get_error().partition("\n<")[0].strip()
    return "nothing matches it" if not text or text.startswith("NoExtension") else text


def _grammar(structured: StructuredOutput) -> str:
    texts = structured.texts
    match structured.format:
        case "json_schema":
            return _of_schema(texts[0])
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(texts[0])
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, texts))}")
        case "grammar":
            if not all(map(describes_something_finite, _schemas_in(texts[0]))):
                raise GrammarError(_ENDLESS)
            return llguidance.LLMatcher.grammar_from_lark(texts[0])


def _of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"it is a JSON {type(schema).__name__}; an object is needed")
    if not describes_something_finite(schema):
        raise GrammarError(_ENDLESS)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GrammarError(str(error)) from error


def _schemas_in(grammar: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas within a grammar; broken ones are left to llguidance."""
    for begin in _SCHEMA.finditer(grammar):
        with suppress(ValueError, RecursionError):
            schema, _ = json.JSONDecoder().raw_decode(grammar, begin.end())
            yield schema
