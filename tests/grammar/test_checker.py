"""What a client sends is checked in a process of its own: what is hostile is refused in time, and harms nobody."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from small_vocabulary import END, small_tokenizer

from pdserve.grammar import checker as module
from pdserve.grammar.checker import Checker
from pdserve.protocol.refusal import RefusedError, Status
from pdserve.protocol.sampling import Format, StructuredOutput

TOKENIZER = small_tokenizer()
GOOD = StructuredOutput("regex", ("a+",))
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'

REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)} | {"d1500": {"type": "string"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[Checker]:
    made = Checker(TOKENIZER.to_json, (END,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "COMPILE_S", 30.0)  # on a busy machine
        await made.check(GOOD, "")  # the child has started
        yield made
    await made.close()


def schema(value: object) -> tuple[Format, str]:
    return "json_schema", json.dumps(value)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("structured", "problem"),
    [
        (("json_schema", "{"), "it is not JSON"),
        (("json_schema", "3"), "a JSON int; an object is needed"),
        (("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "it is not JSON"),
        (schema({"type": "text"}), "Invalid type: text"),
        (schema({"not": {"type": "integer"}}), "Unimplemented keys"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
        (schema({"$ref": "#"}), "recursive without end"),
        (schema({"$ref": "https://example.org/schema"}), "json_schema"),
        (("regex", "\ud800"), "it cannot be compiled"),  # an exception where nobody expects one
        (schema({"type": "string", "pattern": "(a"}), "regex"),
        (("regex", "(a"), "unclosed group"),
        (("regex", "(?=a)b"), "look-around"),
        (("regex", "(" * 30000 + "a" + ")" * 30000), "regex"),
        (("regex", "[^\\x00-\\U0010FFFF]"), "nothing matches it"),
        (("grammar", "start: start"), "nothing matches it"),
        (("grammar", "hello"), "grammar"),
        (("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000), "too deeply nested"),
        (("grammar", 'start: "a" args\nargs: %json {"$ref": "#"}'), "recursive without end"),
        (("grammar", CHAIN), "nested too deeply to compile"),  # ends the process that compiles it
        (schema({"$ref": "#/$defs/d0", "$defs": REFERENCES}), "nested too deeply to compile"),
        (schema({"patternProperties": {"^a.*": {}, "^.*b": {}}, "type": "object"}), "not disjoint"),
        (schema({"type": "object", "properties": {f"property{i}": {} for i in range(1500)}}), "Too many items"),
        (("grammar", "start: A\nA: /(a|b)*a(a|b){12}/ & /(a|b)*b(a|b){13}/ & ~/.*abab.*/"), "too many expressions"),
    ],
)
async def test_what_cannot_be_is_refused_and_names_its_field(
    checker: Checker, structured: tuple[Format, str], problem: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        await checker.check(StructuredOutput(structured[0], (structured[1],)), "")
    assert caught.value.refused.status is Status.INVALID_ARGUMENT
    assert caught.value.refused.message.startswith(f"structured_output.{structured[0]}: ")
    assert problem in caught.value.refused.message
    await checker.check(StructuredOutput("choice", ("yes",)), "")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "structured",
    [
        schema({"type": "string", "maxLength": 1_000_000}),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        schema({"enum": [f"value number {i}" for i in range(2500)]}),
        ("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000})"),
        ("regex", "(a|b)*a(a|b){30}"),
    ],
)
async def test_what_is_large_and_can_be_done_is_let_through(checker: Checker, structured: tuple[Format, str]) -> None:
    await checker.check(StructuredOutput(structured[0], (structured[1],)), "")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_child_that_takes_too_long_is_killed_and_others_are_served(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    structured = StructuredOutput("regex", ("b+",))
    with monkeypatch.context() as stalled:
        stalled.setattr(module, "COMPILE_S", 1e-6)
        with pytest.raises(RefusedError, match=r"regex: it takes longer than 1e-06 s"):
            await checker.check(structured, "")
    await checker.check(StructuredOutput("regex", ("c+",)), "")
    with pytest.raises(RefusedError, match="longer"):
        await checker.check(structured, "")  # remembered


@pytest.mark.asyncio(loop_scope="module")
async def test_a_good_expression_is_served_again_after_a_stall(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    structured = StructuredOutput("regex", ("stalled+",))
    with monkeypatch.context() as stalled:
        stalled.setattr(module, "COMPILE_S", 1e-6)
        stalled.setattr(module, "FORGET_S", 0.0)
        with pytest.raises(RefusedError, match="longer"):
            await checker.check(structured, "")
    await checker.check(structured, "")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_takes_nobody_s_check_along(checker: Checker) -> None:
    structured = StructuredOutput("regex", ("left{3}",))
    leaving, staying = (asyncio.create_task(checker.check(structured, "")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await staying


async def test_a_check_that_nobody_waits_for_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 30.0)
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    may_start = threading.Event()

    def tokenizer_json() -> str:
        may_start.wait()
        return TOKENIZER.to_json()

    checker = Checker(tokenizer_json, (END,))
    begun, gone, again = [StructuredOutput("choice", (name,)) for name in ("begun", "gone", "again")]
    first, leaving = [asyncio.create_task(checker.check(each, "")) for each in (begun, gone)]
    for _ in range(2):
        await asyncio.sleep(0)  # both wait for the process to start
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    for _ in range(2):
        await asyncio.sleep(0)  # its task ends
    last = asyncio.create_task(checker.check(again, ""))
    await asyncio.sleep(0)
    may_start.set()
    results = await asyncio.gather(first, last, return_exceptions=True)
    await checker.close()
    assert results == [None, None]


def slow(number: int) -> StructuredOutput:
    """Return a short schema that takes seconds to compile."""
    return StructuredOutput("json_schema", (json.dumps({"type": "integer", "multipleOf": 999_983, "minimum": number}),))


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_tenant_s_slow_schemas_hold_is_not_the_places_of_others(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 1.0)
    monkeypatch.setattr(module, "PLACE_S", 0.1)
    monkeypatch.setattr(checker, "_places", asyncio.Semaphore(8))
    monkeypatch.setattr(module, "MAX_AT_ONCE_OF_TENANT", 4)
    honest = StructuredOutput("regex", ("honest+",))
    attack = [asyncio.create_task(checker.check(each, "attacker")) for each in map(slow, range(12))]
    await asyncio.sleep(0)
    while not checker._places_of["attacker"].locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await checker.check(honest, "honest")
    assert not all(task.done() for task in attack)
    results = await asyncio.gather(*attack, return_exceptions=True)
    statuses = Counter(result.refused.status for result in results if isinstance(result, RefusedError))
    assert set(statuses) == {Status.INVALID_ARGUMENT, Status.RESOURCE_EXHAUSTED}
    assert statuses[Status.INVALID_ARGUMENT] >= 4, (
        "so many are compiled at once: one after another, the others had no place"
    )
    assert statuses.total() == 12
    messages = [result.refused.message for result in results if isinstance(result, RefusedError)]
    assert any(
        "json_schema: it takes longer than 1 s" in message or "0.5 s of a processor" in message for message in messages
    )


async def test_a_process_that_was_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 30.0)
    monkeypatch.setattr(module, "COMPILE_CPU_S", 30.0)
    monkeypatch.setattr(module, "MAX_AT_ONCE", 1)
    before = psutil.Process().children()
    checker = Checker(TOKENIZER.to_json, (END,))
    compiled, waiting = [asyncio.create_task(checker.check(each, "")) for each in (slow(99), GOOD)]
    while not checker._places.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    (child,) = set(psutil.Process().children()) - set(before)
    child.kill()
    with pytest.raises(RefusedError):  # of the fork, which may have been done, or of its parent's end
        await compiled
    await waiting
    (child,) = set(psutil.Process().children()) - set(before)
    child.kill()
    results: list[RefusedError | None] = []
    while None not in results:  # what comes until its end is known here is refused, and may be tried again
        check = checker.check(StructuredOutput("choice", (f"after {len(results)}",)), "")
        results += await asyncio.gather(check, return_exceptions=True)
    assert {result.refused.status for result in results if result is not None} <= {Status.UNAVAILABLE}
    await checker.close()
    assert psutil.Process().children() == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("limit", "tenants"), [("MAX_WAITING", "abc"), ("MAX_WAITING_OF_TENANT", "aaab")])
async def test_checks_that_wait_are_bounded(
    checker: Checker, monkeypatch: pytest.MonkeyPatch, limit: str, tenants: str
) -> None:
    monkeypatch.setattr(module, limit, 2)
    outputs = [StructuredOutput("choice", (f"{limit}{i}",)) for i in range(len(tenants))]
    checks = [checker.check(output, tenant) for output, tenant in zip(outputs, tenants, strict=True)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    refused = [result.refused.status if isinstance(result, RefusedError) else result for result in results]
    assert refused == [None, None, Status.RESOURCE_EXHAUSTED, None][: len(tenants)]


async def test_a_model_without_an_end_has_no_structured_output() -> None:
    checker = Checker(TOKENIZER.to_json, ())
    with pytest.raises(RefusedError, match="no end-of-sequence token"):
        await checker.check(GOOD, "")
    await checker.close()
