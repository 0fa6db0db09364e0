"""Structured output to a matcher of llguidance, for one model's vocabulary.

llguidance bounds its own work by fuel, but for two things: it compiles long chains of rules by recursion, which ends a
process where its stack is too small, and large schemas take it a second. So what a client sends is compiled in a child
process first (`child.py`).
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import llguidance

from pdserve.errors import GrammarError
from pdserve.grammar.finite import describes_something_finite
from pdserve.sampling import StructuredOutput

# Indented JSON has a line end and some spaces between its parts. Without a limit a model may write spaces for ever.
WHITESPACE = r"\n? {0,20}"
# Of one token: what the engine's step waits for. The twenty schemas of the tests take a tenth of it.
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

        With `tries`, also where an answer of random tokens is stuck, or too complex, within its first ones.
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
    draw = Random(0)
    for _ in range(NUM_TRIED):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        places = [place for place, byte in enumerate(mask) if byte]
        if not places:
            return
        place = draw.choice(places)
        matcher.consume_token(8 * place + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1]))


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
    """Yield the JSON schemas within a grammar; what is none is left to llguidance."""
    for begin in _SCHEMA.finditer(grammar):
        with suppress(ValueError, RecursionError):
            schema, _ = json.JSONDecoder().raw_decode(grammar, begin.end())
            yield schema
