"""Rewrites JSON schemas into the part of JSON Schema that llguidance compiles.

Invariant: every value that matches the rewritten schema matches the one that was sent, apart from what is named as
ignored. Ignored are formats that llguidance does not know, because JSON Schema says that formats are annotations, and
with `lenient` also keywords and look-around in patterns that it cannot follow.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pdserve.base.errors import GrammarError, echo
from pdserve.grammar.disjoint import Prover
from pdserve.grammar.numbers import check_constants, with_bounds
from pdserve.grammar.parts import BY_NAME, LIST, WITHIN, Schema, listed, schemas_in
from pdserve.protocol.sampling import StructuredOutput

FORMATS = frozenset(  # that llguidance knows
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
    }
)
UNSUPPORTED = frozenset(
    {
        *("uniqueItems", "propertyNames", "not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    }
)
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}  # alone it has no effect
# An escape, a class of characters, or what begins a look-ahead or look-behind.
_PATTERN = re.compile(r"\\k<|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plain:
    """A specification as it is compiled."""

    structured: StructuredOutput
    ignored: tuple[str, ...] = ()  # such as "format=password" and "uniqueItems", each once


def plain(structured: StructuredOutput, *, lenient: bool) -> Plain:
    """Return a specification with its schemas rewritten; GrammarError names a keyword that is not supported.

    What is no JSON is left to the compiler, which says so.
    """
    if structured.format not in ("json_schema", "grammar"):
        return Plain(structured)
    (text,) = structured.texts
    ignored: dict[str, None] = {}
    with suppress(RecursionError):  # the compiler refuses what is nested too deeply
        if structured.format == "grammar":
            rewritten = _in_grammar(text, ignored, lenient=lenient)
        else:
            rewritten = _in_text(text, ignored, lenient=lenient)
        if rewritten != text:
            structured = replace(structured, texts=(rewritten,))
        return Plain(structured, tuple(ignored))
    return Plain(structured)


def _in_text(text: str, ignored: dict[str, None], *, lenient: bool) -> str:
    try:
        schema = json.loads(text)
    except ValueError:
        return text
    return _written(text, schema, ignored, lenient=lenient)


def _in_grammar(text: str, ignored: dict[str, None], *, lenient: bool) -> str:
    parts, end = [], 0
    for begin, stop, schema in schemas_in(text):
        if begin >= end:  # else it is text within the last one
            parts += [text[end:begin], _written(text[begin:stop], schema, ignored, lenient=lenient)]
            end = stop
    return "".join([*parts, text[end:]])


def _written(text: str, schema: object, ignored: dict[str, None], *, lenient: bool) -> str:
    if not isinstance(schema, dict):
        return text
    rewritten = _Rewriting(schema, ignored, lenient=lenient).of(schema, "")
    return text if rewritten == schema else json.dumps(rewritten)


class _Rewriting:
    """Rewrites the parts of one schema."""

    def __init__(self, root: Schema, ignored: dict[str, None], *, lenient: bool) -> None:
        self._prover = Prover(root)
        self._ignored = ignored
        self._lenient = lenient

    def of(self, part: object, place: str) -> object:
        """Return a part, rewritten. `place`: a JSON pointer to it, for messages."""
        if not isinstance(part, dict):
            return part
        made = self._with_patterns(self._without_unsupported(part, place), place)
        form = made.get("format")
        if isinstance(form, str) and form not in FORMATS:
            self._ignored[f"format={form}"] = None
            made = _without(made, "format")
        made = {key: self._within(key, value, f"{place}/{key}") for key, value in made.items()}
        check_constants(made)
        return self._without_one_of(with_bounds(made), place)

    def _within(self, key: str, value: object, place: str) -> object:
        if key == "$ref" and isinstance(value, str):
            return value.replace("/oneOf/", "/anyOf/")
        match WITHIN.get(key), value:
            case None, _:
                return value
            case kind, list() if kind == LIST or key == "items":
                return [self.of(each, f"{place}/{number}") for number, each in enumerate(value)]
            case kind, dict() if kind == BY_NAME:
                return {name: self.of(each, f"{place}/{name}") for name, each in value.items()}
            case _:
                return self.of(value, place)

    def _without_unsupported(self, part: Part, place: str) -> Part:
        found = sorted(UNSUPPORTED.intersection(part))
        for key in found:
            if not _is_idle(key, part):
                self._ignore(key, f"{key} is not supported", place)
        return {key: value for key, value in part.items() if key not in found}

    def _with_patterns(self, part: Part, place: str) -> Part:
        pattern = part.get("pattern")
        if isinstance(pattern, str) and (problem := _problem_of(pattern)):
            self._ignore("pattern", f"pattern {echo(pattern, repr)} has {problem}", place)
            part = _without(part, "pattern")
        by_name = part.get("patternProperties")
        if isinstance(by_name, dict):
            for pattern in [each for each in by_name if _problem_of(each)]:
                self._ignore("patternProperties", f"{echo(pattern, repr)} has {_problem_of(pattern)}", place)
                by_name = _without(by_name, pattern)
            part = {**part, "patternProperties": by_name}
        return part

    def _without_one_of(self, part: Part, place: str) -> Part:
        """Return a part with anyOf in place of oneOf, which is the same for alternatives without a common value."""
        branches = part.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return part
        if (found := self._prover.overlapping(branches)) is not None:
            first, second = found
            cure = "let them differ by type, constant or required property, or use anyOf"
            self._ignore("oneOf", f"alternatives {first} and {second} of oneOf may match the same value; {cure}", place)
        part = _without(part, "oneOf")
        if "anyOf" not in part:
            return {**part, "anyOf": branches}
        return {**part, "allOf": [*listed(part, "allOf"), {"anyOf": branches}]}

    def _ignore(self, name: str, problem: str, place: str) -> None:
        if not self._lenient:
            raise GrammarError(f"{problem} (at {echo(place or '/')})")
        self._ignored[name] = None


def _is_idle(key: str, part: Part) -> bool:
    """Return whether a keyword has no effect."""
    value = part[key]
    if key in _NEEDS:
        return _NEEDS[key] not in part
    if key == "if":
        return "then" not in part and "else" not in part
    if key in ("uniqueItems", "not"):
        return value is False
    return value is True or value == {}


def _problem_of(pattern: str) -> str:
    """Return what llguidance's regular expressions do not have of a pattern; empty if they have everything."""
    for found in _PATTERN.finditer(pattern):
        if found[0].startswith("(?"):
            return "look-ahead or look-behind, which is not supported"
        if found[0] == "\\k<" or (found[0][0] == "\\" and found[0][1] in "123456789"):
            return "a reference back to a group, which is not supported"
    return ""


def _without(part: Mapping[str, Any], key: str) -> Part:
    return {name: value for name, value in part.items() if name != key}
