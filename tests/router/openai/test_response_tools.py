"""Functions of a namespace: the model knows them by both names, and clients get both back."""

from typing import Any

import pytest
from http_door import StartHttp
from router_fakes import MODEL

from pdserve.protocol.refusal import RefusedError
from pdserve.router.frontend.openai.tools import tool_use
from pdserve.router.frontend.responses.events import Output
from pdserve.router.frontend.responses.fields import ResponseRequest
from pdserve.router.frontend.responses.items import stored
from pdserve.router.frontend.responses.tools import MAX_OF_NAMESPACE, functions_of, namespaces_of

GET: dict[str, Any] = {"type": "function", "name": "get", "description": "Finds one.", "parameters": {"type": "object"}}
CRM: dict[str, Any] = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [GET]}


def test_a_namespaces_function_has_both_names_in_a_chat() -> None:
    plain, grouped = functions_of([GET, CRM])
    assert plain["function"] == {name: GET[name] for name in ("name", "description", "parameters")}
    assert grouped["function"] == plain["function"] | {"name": "crm__get"}


def test_a_call_comes_back_with_namespace_and_name() -> None:
    output = Output(namespaces_of([GET, CRM]))
    output.begin({})
    for place, name in enumerate(("crm__get", "get")):
        output.add({"tool_calls": [{"index": place, "id": f"c{place}", "function": {"name": name, "arguments": "{}"}}]})
    events = output.close(is_cut=False)
    assert [(item.get("namespace"), item["name"]) for item in output.items] == [("crm", "get"), (None, "get")]
    assert events[-1]["item"] == output.items[-1]


def test_a_call_that_is_sent_back_is_the_models_own() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "crm", "name": "get", "arguments": "{}"}
    answer = {"type": "function_call_output", "call_id": "c", "output": "Ann"}
    asked = ResponseRequest.model_validate({"input": [{"role": "user", "content": "?"}, call, answer], "tools": [CRM]})
    chat = asked.chat([], stored(asked.input)).model_dump(exclude_none=True)
    (message,) = (message for message in chat["messages"] if message["role"] == "assistant")
    assert message["tool_calls"][0]["function"]["name"] == chat["tools"][0]["function"]["name"] == "crm__get"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (CRM | {"name": ""}, "tools[0]: a namespace has a name"),
        (CRM | {"tools": None}, "tools[0]: a namespace has a name, and up to 1024 tools"),
        (CRM | {"tools": [GET] * (MAX_OF_NAMESPACE + 1)}, "tools[0]: a namespace has a name, and up to 1024 tools"),
        (CRM | {"tools": ["get"]}, "tools[0].tools[0]: 'get' is no tool"),
        (CRM | {"tools": [GET, {"type": "web_search"}]}, "tools[0].tools[1].type: 'web_search' is not served"),
        (CRM | {"tools": [{"type": "custom", "name": "a"}]}, "tools[0].tools[0].type: 'custom' is not served"),
        (CRM | {"tools": [CRM]}, "tools[0].tools[0].type: 'namespace' is not served: one has functions alone"),
        (CRM | {"tools": [GET, GET]}, "tools[0].tools[1].name: 'crm__get', with the namespace, is another function's"),
    ],
)
def test_bad_namespaces_are_refused_by_their_place(tool: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError, match="tools") as refused:
        functions_of([tool])
    assert refused.value.refused.message.startswith(text)


def test_no_other_function_has_a_joined_name() -> None:
    plain = GET | {"name": "crm__get"}
    other = {"type": "namespace", "name": "crm__get", "tools": [GET | {"name": "all"}]}
    same = {"type": "namespace", "name": "crm", "tools": [GET | {"name": "get__all"}]}
    for tools in ([plain, CRM], [CRM, plain], [other, same]):
        with pytest.raises(RefusedError, match="is another function's name"):
            namespaces_of(tools)
    assert len(functions_of([GET, CRM, other])) == 3


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "namespace": "crm", "name": "get"}, "crm__get"),
        ({"type": "function", "name": "get"}, "get"),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "namespace": "crm", "name": "get"}],
            },
            "crm__get",
        ),
    ],
)
def test_a_choice_names_a_namespaces_function_in_two_parts(choice: dict[str, Any], name: str) -> None:
    asked = ResponseRequest.model_validate({"input": "?", "tools": [GET, CRM], "tool_choice": choice})
    use = tool_use(asked.chat([], stored("?")))
    assert use is not None
    assert [tool.name for tool in use.tools] == [name]


async def test_errors_of_a_chat_name_the_tools_own_place(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    bad = [CRM | {"tools": [GET, GET | {"name": "d e"}]}, {"type": "function", "name": "f g"}]
    for tools, param in ((bad, "tools[0].tools[1].name"), (bad[1:], "tools[0].name")):
        refused = await door.post("/v1/responses", model=MODEL, input="hello", tools=tools)
        assert refused.json()["error"]["param"] == param


async def test_names_that_are_too_long_together_are_refused(start_http: StartHttp) -> None:
    door = await start_http()
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 2}
    fitting = await door.post("/v1/responses", **asked, tools=[CRM | {"name": "c" * 59}])
    assert fitting.json()["tools"][0]["type"] == "namespace"
    refused = await door.post("/v1/responses", **asked, tools=[CRM | {"name": "c" * 60}])
    assert "1 to 64 letters" in refused.json()["error"]["message"]
