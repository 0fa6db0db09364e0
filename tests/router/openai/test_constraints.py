"""What answers are to match, and which tools they call, as HTTP's fields ask for it."""

import json
from typing import Any

import openai
import pytest
from http_door import StartHttp
from router_fakes import MODEL
from small_vocabulary import small_tokenizer

from pdserve.base.errors import GrammarError
from pdserve.checkpoint.checkpoint import NO_DEFAULTS
from pdserve.grammar import checker
from pdserve.grammar.compiler import Compiler
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import structured_from_proto
from pdserve.protocol.refusal import RefusedError
from pdserve.router.frontend.openai.dialect import merged
from pdserve.router.frontend.openai.fields import ChatRequest, CompletionRequest
from pdserve.router.frontend.openai.filters import constraint_of, plan
from pdserve.router.frontend.openai.translate import chat_of
from pdserve.router.frontend.served import ServedModel
from pdserve.text.chat import ChatTemplate
from pdserve.text.reasoning import Reasoning
from pdserve.text.tool_calls import FORMATS, FormatName

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOKENIZER = small_tokenizer()
HELLO: Any = [{"role": "user", "content": "hello"}]


def function(name: str, **parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or None}}


def allowed(*names: str, mode: str = "auto", flat: bool = False) -> dict[str, Any]:
    """Return a choice that allows some of the tools, as chats have it or, flat, as responses have it."""
    if flat:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
TOOLS = [function("weather", **WEATHER), function("now")]


def model(tool_format: FormatName = "hermes", reasoning: Reasoning | None = None) -> ServedModel:
    return ServedModel(
        "m", 100, TOKENIZER.vocab_size, NO_DEFAULTS, TOKENIZER, None,
        eos_token_ids=(0,), tool_format=FORMATS[tool_format], reasoning=reasoning,
    )  # fmt: skip


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **fields})


def of_schema(schema: object = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


Wanted = inference.StructuredOutput


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Wanted(json_object=True)),
        ({"response_format": of_schema()}, Wanted(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Wanted(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": "{}", "disable_any_whitespace": True}}, Wanted(json_schema="{}")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Wanted(choice=inference.Choices(texts=["a", "b"]))),
        ({"guided_regex": "a+"}, Wanted(regex="a+")),
        ({"guided_grammar": "start: X"}, Wanted(grammar="start: X")),
        ({"guided_json_object": True}, Wanted(json_object=True)),
    ],
)
def test_fields_say_what_answers_match(fields: dict[str, Any], wanted: Wanted | None) -> None:
    found = constraint_of(CompletionRequest.model_validate({"prompt": "x", **fields}))
    assert (found and found[1]) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: null is no JSON object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: it is not supported"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex: 5 is of the wrong type"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice: [1] is of the wrong type"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar: goes against guided_regex"),
        ({"tools": [{"type": "function"}]}, "tools[0]: it is no function"),
        ({"tools": [function("a b")]}, "tools[0].function.name: 'a b'"),
        ({"tool_choice": "required"}, "tool_choice: 'required' goes with tools"),
        ({"tools": TOOLS, "tool_choice": function("x")}, "tool_choice: 'x' is not one of the tools"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice: 'perhaps' is not one of"),
        ({"tools": TOOLS * 65}, "tools: 130 are over the limit of 128"),
        ({"tools": TOOLS, "tool_choice": allowed("x")}, "tool_choice: 'x' is not one of the tools"),
        ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice.allowed_tools.tools: a list of functions"),
        ({"tools": TOOLS, "tool_choice": allowed("now", mode="all")}, "tool_choice.allowed_tools.mode: 'all' is not"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools: a list of"),
    ],
)
def test_what_cannot_be_served_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        plan(chat(**fields), inference.GenerateRequest(), model())
    assert refused.value.refused.message.startswith(message)


CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
}


def takes(wanted: Wanted, text: str) -> bool:
    """Return whether an answer may be this text, and may end with it."""
    try:
        matcher = Compiler(TOKENIZER.to_json(), (0,)).compile(structured_from_proto(wanted))
    except GrammarError as error:
        raise AssertionError(wanted.grammar) from error
    return matcher.consume_tokens(TOKENIZER.encode(text, add_special=False)) and matcher.is_accepting()


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_has_to_call_tools_is_calls_that_are_read_again(name: FormatName) -> None:
    request = inference.GenerateRequest()
    planned = plan(chat(tools=TOOLS, tool_choice="required"), request, model(name))
    wanted, text = request.sampling.structured_output, CALLS[name]
    assert takes(wanted, text)
    assert takes(wanted, text.replace("weather", "now").replace('{"city": "Rome"}', "{}"))
    invented = text.replace("weather", "now").replace('{"city": "Rome"}', '{"x": []}')
    for wrong in ("hello", text[:-1], text.replace("Rome", "Oslo"), text.replace("weather", "other"), invented):
        assert not takes(wanted, wrong)
    assert planned.new_filter is not None
    reader = planned.new_filter()
    deltas = [delta for char in text for delta in reader.push(char)]
    last, finish_reason = reader.finish("stop")
    (first, *others) = [call for delta in deltas + last for call in delta["tool_calls"]]
    assert (first["index"], first["type"], first["function"]) == (0, "function", {"name": "weather", "arguments": ""})
    assert len(first["id"]) == 9
    assert "".join(each["function"]["arguments"] for each in others) == '{"city": "Rome"}'
    assert finish_reason == "tool_calls"


def test_a_named_tool_is_called_once_and_several_only_where_they_may_be() -> None:
    two = f"{CALLS['hermes']}\n{CALLS['hermes']}"
    for fields, may_be_two in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": function("weather")}, False),
    ):
        request = inference.GenerateRequest()
        plan(chat(tools=TOOLS, **fields), request, model())
        assert takes(request.sampling.structured_output, two) == may_be_two
    assert not takes(request.sampling.structured_output, CALLS["hermes"].replace("weather", "now"))


@pytest.mark.parametrize("name", CALLS)
def test_references_within_a_tools_parameters_keep_their_root(name: FormatName) -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": 7}}}
    request = inference.GenerateRequest()
    plan(chat(tools=[function("weather", **parameters)], tool_choice="required"), request, model(name))
    for value in (7, 8):
        text = CALLS[name].replace('{"city": "Rome"}', f'{{"x": {value}}}')
        assert takes(request.sampling.structured_output, text) == (value == 7)


@pytest.mark.parametrize(
    ("parameters", "takes_others"),
    [
        (None, False),
        ({}, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}, "required": [], "title": "Now"}, False),
        ({"type": "object", "properties": {}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object", "additionalProperties": {"type": "array"}}, True),
        ({"type": "object", "properties": {"x": {"type": "array"}}}, True),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_a_function_without_parameters_is_called_without_arguments(
    name: FormatName, parameters: object, takes_others: bool
) -> None:
    request = inference.GenerateRequest()
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    plan(chat(tools=[tool], tool_choice="required"), request, model(name))
    for arguments, is_taken in (("{}", True), ('{"x": []}', takes_others), ("5", False)):
        text = CALLS[name].replace('{"city": "Rome"}', arguments)
        assert takes(request.sampling.structured_output, text) == is_taken


OTHERWISE: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": of_schema()}, '{"a": 5}', '{"a": "5"}'),
    ({"response_format": {"type": "json_object"}}, '{"name": "Bob", "x": 1}', "Bob"),
    ({"structured_outputs": {"regex": r"(a|b)+/\\/?"}}, "ab/\\/", "c"),
    ({"structured_outputs": {"choice": ["yes", "<tool"]}}, "<tool", "no"),
    ({"structured_outputs": {"grammar": 'start: call "z"\ncall: /x+/'}}, "xxz", "xx"),
]


@pytest.mark.parametrize(("fields", "final", "wrong"), OTHERWISE)
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_may_call_tools_is_a_call_or_matches(
    name: FormatName, fields: dict[str, Any], final: str, wrong: str
) -> None:
    request = inference.GenerateRequest()
    planned = plan(chat(tools=TOOLS, **fields), request, model(name))
    wanted = request.sampling.structured_output
    assert takes(wanted, CALLS[name])
    assert takes(wanted, final)
    assert not takes(wanted, wrong)
    assert not takes(wanted, final + CALLS[name])
    if "response_format" not in fields or fields["response_format"]["type"] != "json_object":
        assert not takes(wanted, CALLS[name].replace("Rome", "Oslo"))
    assert planned.constrained_by.split(".")[0] == next(iter(fields))
    texts, names, why = message(chat(tools=TOOLS, **fields), model(name), final)
    assert (texts["content"], names, why) == (final, [], "stop")
    texts, names, why = message(chat(tools=TOOLS, **fields), model(name), CALLS[name])
    assert (texts["content"], names, why) == ("", ["weather"], "tool_calls")


@pytest.mark.parametrize("choice", ["required", function("weather"), allowed("weather", mode="required")])
def test_a_call_that_has_to_be_wins_over_a_format(choice: object) -> None:
    with_format, without = inference.GenerateRequest(), inference.GenerateRequest()
    asked = {"tools": TOOLS, "tool_choice": choice}
    plan(chat(response_format=of_schema(), **asked), with_format, model())
    plan(chat(**asked), without, model())
    assert with_format == without


@pytest.mark.parametrize("flat", [True, False])
def test_allowed_tools_are_the_only_ones(*, flat: bool) -> None:
    asked = chat(tools=TOOLS, tool_choice=allowed("now", mode="required", flat=flat))
    request = inference.GenerateRequest()
    plan(asked, request, model())
    text = CALLS["hermes"].replace('{"city": "Rome"}', "{}")
    assert takes(request.sampling.structured_output, text.replace("weather", "now"))
    assert not takes(request.sampling.structured_output, CALLS["hermes"])
    assert json.loads(chat_of(asked).tools_json) == TOOLS[1:]
    may = chat(tools=TOOLS, tool_choice=allowed("now", flat=flat))
    free = inference.GenerateRequest()
    assert plan(may, free, model()).new_filter is not None
    assert free == inference.GenerateRequest()
    assert json.loads(chat_of(may).tools_json) == TOOLS[1:]


def message(planned_for: ChatRequest, served: ServedModel, text: str) -> tuple[dict[str, str], list[str], str]:
    """Return the texts of a message, the names of its calls, and why it ended."""
    planned = plan(planned_for, inference.GenerateRequest(), served)
    assert planned.new_filter is not None
    reader, texts, names = planned.new_filter(), {"content": "", "reasoning_content": ""}, []
    deltas = [delta for char in text for delta in reader.push(char)]
    last, finish_reason = reader.finish("stop")
    for delta in deltas + last:
        for key in texts:
            texts[key] += delta.get(key, "")
        names += [call["function"]["name"] for call in delta.get("tool_calls", []) if "id" in call]
    return texts, names, finish_reason


THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"


def test_reasoning_comes_before_calls_and_can_be_left_out() -> None:
    served = model(reasoning=Reasoning(ChatTemplate(THINKS, {})))
    text = f"Hm.</think>Wait. {CALLS['hermes']}"
    texts, names, why = message(chat(tools=TOOLS), served, text)
    assert (texts, names, why) == ({"content": "Wait. ", "reasoning_content": "Hm."}, ["weather"], "tool_calls")
    assert message(chat(tools=TOOLS, include_reasoning=False), served, text)[0]["reasoning_content"] == ""
    unthinking = chat(chat_template_kwargs={"enable_thinking": False})
    assert message(unthinking, served, "Yes.")[0] == {"content": "Yes.", "reasoning_content": ""}
    for no_prompt in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        assert message(chat(**no_prompt), served, "Yes.")[0] == {"content": "Yes.", "reasoning_content": ""}
    assert plan(chat(response_format=of_schema()), inference.GenerateRequest(), served).new_filter is None


def test_one_call_at_most_is_reported_where_that_is_asked_for() -> None:
    _, names, _ = message(chat(tools=TOOLS, parallel_tool_calls=False), model(), CALLS["hermes"] * 2)
    assert names == ["weather"]
    _, names, _ = message(chat(tools=TOOLS), model(), CALLS["hermes"] * 2)
    assert names == ["weather", "weather"]


def ends(asked: ChatRequest, text: str, finish_reason: str = "stop") -> tuple[list[dict[str, Any]], str]:
    """Return the deltas of an answer that ends so, and the finish reason that its client sees."""
    planned = plan(asked, inference.GenerateRequest(), model())
    assert planned.new_filter is not None
    reader = planned.new_filter()
    deltas = [delta for char in text for delta in reader.push(char)]
    last, shown = reader.finish(finish_reason)
    return deltas + last, shown


@pytest.mark.parametrize("length", range(len(CALLS["hermes"]) + 1))
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_call_that_is_cut_is_never_the_reason_of_an_end(length: int, finish_reason: str) -> None:
    """Its text is content, or it is a call whose answer has not ended with tool_calls."""
    text = CALLS["hermes"][:length]
    deltas, shown = ends(chat(tools=TOOLS), text, finish_reason)
    is_whole = "}}" in text
    assert shown == ("tool_calls" if is_whole and finish_reason == "stop" else finish_reason)
    for before in (CALLS["hermes"] + "\n", "Well. "):
        deltas, shown = ends(chat(tools=TOOLS), before + text, finish_reason)
        num_calls = sum("id" in call for delta in deltas for call in delta.get("tool_calls", []))
        has_cut = num_calls > ("tool_call" in before) and not is_whole
        assert shown != "tool_calls" or not has_cut
        if finish_reason == "length":
            assert shown == "length"


def test_an_answer_of_calls_alone_has_no_content() -> None:
    for text in (CALLS["hermes"], f"\n{CALLS['hermes']}\n{CALLS['hermes']}\n"):
        deltas, shown = ends(chat(tools=TOOLS), text)
        assert not any("content" in delta for delta in deltas)
        assert merged(deltas)["content"] is None
        assert shown == "tool_calls"


def test_tools_that_may_not_be_called_change_nothing() -> None:
    request = inference.GenerateRequest()
    assert plan(chat(tools=TOOLS, tool_choice="none"), request, model()).new_filter is None
    assert request == inference.GenerateRequest()


async def test_a_schema_reaches_the_worker_and_a_wrong_one_its_client(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "COMPILE_S", 30.0)  # on a busy machine
    door = await start_http()
    create = door.client.chat.completions.create
    await create(model=MODEL, messages=HELLO, max_tokens=2, response_format=of_schema())  # type: ignore[call-overload]
    (placed,) = door.router.workers["p0"].prefills
    assert json.loads(placed.spec.sampling.structured_output.json_schema) == SCHEMA
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model=MODEL, messages=HELLO, response_format=of_schema({"$ref": "#"}))  # type: ignore[call-overload]
    assert refused.value.param == "response_format.json_schema.schema"
    assert "recursive without end" in refused.value.message


async def test_a_tool_whose_parameters_cannot_be_compiled_is_refused_where_it_is_named_alone(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "COMPILE_S", 30.0)  # on a busy machine
    door = await start_http()
    broken = function("f", type="object", properties={"a": {"type": "tree"}})
    endless = function("g", **{"$ref": "#"})
    body: Any = {"messages": HELLO, "max_tokens": 2, "tools": [TOOLS[0], broken, endless]}
    for name, field, problem in (("f", "tools[1]", "tree"), ("g", "tools[2]", "recursive without end")):
        refused = await door.post("/v1/chat/completions", **body, tool_choice=function(name))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"{field}.function.parameters"
        assert problem in refused.json()["error"]["message"]
    ignored = "tools[1].function.parameters, tools[2].function.parameters"
    for asked in (
        {"tool_choice": "required"},
        {"response_format": of_schema()},
        {"tool_choice": "required", "stream": True},
    ):
        answer = await door.post("/v1/chat/completions", **body, **asked, unknown=1)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == f"unknown, {ignored}"
        placed = door.router.workers["p0"].prefills[-1]
        wanted = placed.spec.sampling.structured_output
        for called, arguments in (("f", '{"x": []}'), ("g", "{}"), ("weather", '{"city": "Rome"}')):
            text = CALLS["hermes"].replace("weather", called).replace('{"city": "Rome"}', arguments)
            assert takes(wanted, text)
            assert not takes(wanted, text.replace(arguments, "5"))
        assert not takes(wanted, CALLS["hermes"].replace("Rome", "Oslo"))
    named = await door.post("/v1/chat/completions", **body, tool_choice=function("weather"))
    assert named.status_code == 200
    assert "x-ignored-fields" not in named.headers
    wrong = await door.post("/v1/chat/completions", **body, response_format=of_schema({"$ref": "#"}))
    assert wrong.json()["error"]["param"] == "response_format.json_schema.schema"
