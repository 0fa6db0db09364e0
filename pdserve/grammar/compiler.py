"""Structured output to a matcher of llguidance, for one model's vocabulary.

llguidance bounds its own work by fuel, with two exceptions. It compiles long chains of rules by recursion, which ends a
process whose stack is too small; and large schemas take it a second. So what a client sends is compiled in a child
process first (`child.py`).
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from random import Random

import llguidance

from pdserve.base.errors import GrammarError
from pdserve.grammar.finite import is_matched
from pdserve.grammar.parts import Schema, schemas_in
from pdserve.protocol.sampling import StructuredOutput


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
            for _, _, schema in schemas_in(texts[0]):
                _check(schema)
            return llguidance.LLMatcher.grammar_from_lark(texts[0])


def _of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"it is a JSON {type(schema).__name__}; an object is needed")
    _check(schema)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GrammarError(str(error)) from error


def _check(schema: Schema) -> None:
    if not is_matched(schema):
        raise GrammarError("it is recursive without end, or requires what is false: no finite JSON value matches it")
