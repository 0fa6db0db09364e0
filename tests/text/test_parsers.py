"""Tool calls and reasoning are read the same whatever the pieces in which an answer comes."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.reasoning import ReasoningParser
from pdserve.text.tool_calls import FORMATS, Arguments, CallBegun, Content, FormatName, ToolCallParser, format_of

Found = tuple[str, list[tuple[str, str]]]  # content; calls with their arguments
WEATHER, TIME = '{"city": "Bern", "deep": {"a": [1, "}]"]}}', '{"zone": "\\"{x"}'


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def read(name: FormatName, parts: list[str]) -> Found:
    parser, content, calls = ToolCallParser(FORMATS[name]), "", []
    events = [event for part in parts for event in parser.push(part)] + parser.finish()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallBegun(called):
                calls.append((called, ""))
            case Arguments(text):
                called, before = calls.pop()
                calls.append((called, before + text))
    return content, calls


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


ANSWERS: list[tuple[FormatName, str, Found]] = [
    ("hermes", "Just <text> and {json: 1}.", ("Just <text> and {json: 1}.", [])),
    (
        "hermes",
        f"See.\n<tool_call>\n{call('weather', WEATHER)}\n</tool_call>\n<tool_call>{call('time', TIME)}</tool_call>",
        ("See.\n", [("weather", WEATHER), ("time", TIME)]),
    ),
    ("hermes", f"\n <tool_call>{call('weather', WEATHER)}", ("", [("weather", WEATHER)])),
    ("hermes", '<tool_call>{"arguments": {"b": 2}, "name": "late"}</tool_call>', ("", [("late", '{"b": 2}')])),
    ("hermes", '<tool_call>{"name": "bare"}</tool_call> so', (" so", [("bare", "{}")])),
    (
        "hermes",
        f'<tool_call>{{"name": "text", "arguments": {json.dumps(WEATHER)}}}</tool_call>',
        ("", [("text", WEATHER)]),
    ),
    ("hermes", '<tool_call>{"nom": 1}</tool_call>', ('{"nom": 1}', [])),
    ("hermes", f"<tool_call>\n{call('weather', WEATHER)}\n</tool_call>\n", ("", [("weather", WEATHER)])),
    ("hermes", f"<tool_call>{call('f', '{}')}</tool_call>\n so \n", ("\n so \n", [("f", "{}")])),
    ("hermes", " \n", (" \n", [])),
    ("hermes", f"<tool_call>{call('none', ' null ')}</tool_call>", ("", [("none", "{}")])),
    ("hermes", f"<tool_call>{call('text', json.dumps('null'))}</tool_call>", ("", [("text", "{}")])),
    ("hermes", f"<tool_call>{call('empty', json.dumps(''))}</tool_call>", ("", [("empty", "{}")])),
    ("hermes", f"<tool_call>{call('number', '17')}</tool_call>", ("", [("number", "17")])),
    ("hermes", '<tool_call>{"name": "cut", "arguments": nu', ("", [("cut", "nu")])),
    ("hermes", r'<tool_call>{"name": "cut", "arguments": "{\"a', ("", [("cut", r'"{\"a')])),
    ("llama3_json", '{"name": "cut", "parameters": null', ("", [("cut", "null")])),
    ("hermes", '<tool_call>{"name": "cut", "arguments": {"a": "b', ("", [("cut", '{"a": "b')])),
    ("hermes", '<tool_call>{"na', ('{"na', [])),
    ("hermes", "almost <tool_cal", ("almost <tool_cal", [])),
    ("hermes", r'<tool_call>{"name": "\ud800"}</tool_call>', (r'{"name": "\ud800"}', [])),
    (
        "hermes",
        r'<tool_call>{"name": "half", "arguments": "\udc00"}</tool_call>',
        ("", [("half", r'"\udc00"')]),
    ),
    ("llama3_json", call("weather", WEATHER, "parameters"), ("", [("weather", WEATHER)])),
    ("llama3_json", "<|python_tag|>" + call("weather", WEATHER, "parameters"), ("", [("weather", WEATHER)])),
    (
        "llama3_json",
        f"{call('weather', WEATHER, 'parameters')}; {call('time', TIME, 'parameters')}",
        ("", [("weather", WEATHER), ("time", TIME)]),
    ),
    ("llama3_json", '{"answer": 42} it is', ('{"answer": 42} it is', [])),
    ("llama3_json", 'Say {"name": "x"}', ('Say {"name": "x"}', [])),
    (
        "mistral",
        f"[TOOL_CALLS][{call('weather', WEATHER)}, {call('time', TIME)}]</s>",
        ("", [("weather", WEATHER), ("time", TIME)]),
    ),
    (
        "mistral",
        f"Well[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{TIME}",
        ("Well", [("weather", WEATHER), ("time", TIME)]),
    ),
]


@pytest.mark.parametrize(("name", "answer", "found"), ANSWERS)
def test_answers_are_read_whole(name: FormatName, answer: str, found: Found) -> None:
    assert read(name, [answer]) == found


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 200), max_size=40))
def test_borders_of_pieces_change_nothing(case: tuple[FormatName, str, Found], cuts: list[int]) -> None:
    name, answer, found = case
    assert read(name, pieces(answer, cuts)) == found
    assert read(name, list(answer)) == found


@given(st.text(alphabet='<tool_cal>/{}[]",:\\ TOOLCALLS|python_tag', max_size=60))
def test_no_answer_is_too_strange_to_read(answer: str) -> None:
    for name in FORMATS:
        assert read(name, list(answer)) == read(name, [answer])


def test_a_name_that_is_nested_deeply_is_content() -> None:
    nested = '{"name": ' + "[" * 30_000 + "]" * 30_000 + "}"
    assert read("hermes", [f"<tool_call>{nested}</tool_call>"]) == (nested, [])


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"other": "' + "x" * 500_000 + '", "arguments": "' + "y" * 500_000 + '", "name": "late"}',
        " " * 500_000 + "<tool_call>" + " " * 500_000 + call("weather", WEATHER),
    ],
)
def test_the_time_to_read_a_long_call_is_in_proportion_to_its_length(answer: str) -> None:
    begin_s = time.thread_time()
    parser = ToolCallParser(FORMATS["hermes"])
    events = [event for start in range(0, len(answer), 4) for event in parser.push(answer[start : start + 4])]
    assert time.thread_time() - begin_s < 8  # mostly 0.5; 20 and more where each piece is added to a text
    assert [event.name for event in events if isinstance(event, CallBegun)] != []


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(FORMATS["hermes"])
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a"') == [CallBegun("f"), Arguments('{"a"')]
    assert parser.push(": 1") == [Arguments(": 1")]
    assert parser.push("}}") == [Arguments("}")]


def parts_of(answer: list[str], *, begins_inside: bool) -> tuple[str, str]:
    parser, texts = ReasoningParser(begins_inside=begins_inside), {True: "", False: ""}
    for part in [part for piece in answer for part in parser.push(piece)] + parser.finish():
        texts[part.is_reasoning] += part.text
    return texts[True], texts[False]


REASONED = [
    ("<think>\nHm, <b>.\n</think>\n\nYes.", False, ("Hm, <b>.\n", "Yes.")),
    ("Hm.</think>Yes.", True, ("Hm.", "Yes.")),
    ("  <think></think>\nYes </think>", False, ("", "Yes </think>")),
    ("No <think> here", False, ("", "No <think> here")),
    ("<think>It never ends </thin", False, ("It never ends </thin", "")),
    ("<th", False, ("", "<th")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize(("answer", "begins_inside", "parts"), REASONED)
def test_reasoning_is_parted_from_the_answer(answer: str, begins_inside: bool, parts: tuple[str, str]) -> None:
    assert parts_of([answer], begins_inside=begins_inside) == parts
    assert parts_of(list(answer), begins_inside=begins_inside) == parts


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{...", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('Respond as {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|im_start|>", "hermes"),
    ],
)
def test_a_template_says_how_its_model_writes_calls(template: str, name: str) -> None:
    assert format_of(template).name == name
