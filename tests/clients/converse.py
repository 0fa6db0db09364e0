"""Hold a conversation with a tool through a client: `converse.py CLIENT URL MODEL`. Runs where the client is installed.

A conversation is a question that has to be answered with a call, the tool's answer, the model's answer to that, and
another question. Each is held twice: with whole answers and with streams.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

QUESTION, SUNNY, AGAIN = "How is the weather in Rome?", "It is sunny.", "Is that good for a walk?"
CITIES = ("Bern", "Rome")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
LIMITS: Any = {"temperature": 0, "max_tokens": 40, "extra_body": {"min_tokens": 2}}  # so small a model may say nothing


def check_call(name: str, arguments: str) -> None:
    assert name == "weather", name
    assert json.loads(arguments)["city"] in CITIES, arguments


def with_openai(url: str, model: str, *, streams: bool) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = []

    def answer(**fields: Any) -> Any:
        asked = {"model": model, "messages": messages, "tools": [WEATHER], **LIMITS, **fields}
        if not streams:
            return client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0]

    for choice in ("required", NAMED):
        messages[:] = [{"role": "user", "content": QUESTION}]
        called = answer(tool_choice=choice, parallel_tool_calls=False)
        (call,) = called.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        assert called.message.content is None, called
        assert called.finish_reason == ("tool_calls" if choice == "required" else "stop"), called
        messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": SUNNY}]
        said = answer()
        assert said.message.content, said
        messages += [said.message, {"role": "user", "content": AGAIN}]
        assert answer().message.content


def with_langchain(url: str, model: str, *, streams: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, **LIMITS)
    messages: list[Any] = []

    def answer(bound: Any) -> Any:
        if not streams:
            return bound.invoke(messages)
        whole = None
        for chunk in bound.stream(messages):
            whole = chunk if whole is None else whole + chunk
        return whole

    for choice in ("any", "weather"):
        messages[:] = [HumanMessage(QUESTION)]
        called = answer(chat.bind_tools([WEATHER], tool_choice=choice, parallel_tool_calls=False))
        (call,) = called.tool_calls
        check_call(call["name"], json.dumps(call["args"]))
        messages += [called, ToolMessage(SUNNY, tool_call_id=call["id"])]
        said = answer(chat.bind_tools([WEATHER]))
        assert said.content, said
        messages += [said, HumanMessage(AGAIN)]
        assert answer(chat.bind_tools([WEATHER])).content


def with_litellm(url: str, model: str, *, streams: bool) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for one on the web
    import litellm

    messages: list[Any] = []

    def answer(**fields: Any) -> Any:
        asked = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": messages}
        made = litellm.completion(**asked, tools=[WEATHER], stream=streams, num_retries=0, **LIMITS, **fields)
        whole = litellm.stream_chunk_builder(list(made), messages=messages) if streams else made
        assert whole is not None
        return whole.choices[0]

    for choice in ("required", NAMED):
        messages[:] = [{"role": "user", "content": QUESTION}]
        called = answer(tool_choice=choice, parallel_tool_calls=False)
        (call,) = called.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        messages += [called.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": SUNNY}]
        said = answer()
        assert said.message.content, said
        messages += [said.message.model_dump(), {"role": "user", "content": AGAIN}]
        assert answer().message.content


def with_openai_agents(url: str, model: str, *, streams: bool) -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    cities: list[str] = []

    def weather(city: Literal["Bern", "Rome"]) -> str:
        """Say how the weather is."""
        cities.append(city)
        return SUNNY

    async def converse() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            # The runner forces the first call of each run alone.
            forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, **LIMITS)
            served = OpenAIChatCompletionsModel(model, client)
            agent = Agent("forecaster", model=served, tools=[function_tool(weather)], model_settings=forced)
            asked: Any = QUESTION
            for number in (1, 2):
                if streams:
                    result: Any = Runner.run_streamed(agent, asked)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await Runner.run(agent, asked)
                assert result.final_output, result
                assert len(cities) == number, cities
                assert cities[-1] in CITIES
                asked = [*result.to_input_list(), {"role": "user", "content": AGAIN}]

    asyncio.run(converse())


def with_agents_over_responses(url: str, model: str, *, streams: bool) -> None:
    """The agents SDK as it is by default: two tools, and turns that continue what the server keeps."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    asked_of: list[tuple[str, str]] = []

    def weather(city: Literal["Bern", "Rome"]) -> str:
        """Say how the weather is."""
        asked_of.append(("weather", city))
        return SUNNY

    def sights(city: Literal["Bern", "Rome"]) -> str:
        """Say what can be seen."""
        asked_of.append(("sights", city))
        return "There is an old bridge."

    async def run(agent: Any, said: Any, **how: Any) -> Any:
        if not streams:
            return await Runner.run(agent, said, **how)
        result = Runner.run_streamed(agent, said, **how)
        async for _ in result.stream_events():
            pass
        return result

    async def converse() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            served, tools = OpenAIResponsesModel(model, client), [function_tool(weather), function_tool(sights)]
            forced = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 40}
            for name in ("required", "weather", "sights"):
                settings = ModelSettings(**{**forced, "tool_choice": name})  # of the first call of each run alone
                agent = Agent("guide", instructions="Be brief.", model=served, tools=tools, model_settings=settings)
                first = await run(agent, QUESTION)
                again = {"role": "user", "content": AGAIN}
                kept = await run(agent, AGAIN, previous_response_id=first.last_response_id)
                sent = await run(agent, [*first.to_input_list(), again])
                held = (await client.conversations.create()).id
                for said in (QUESTION, AGAIN):
                    await run(agent, said, conversation_id=held)
                assert len(asked_of) == 5, asked_of
                assert name == "required" or {called for called, _ in asked_of} == {name}, asked_of
                assert kept.final_output == sent.final_output, (kept, sent)
                assert len((await client.conversations.items.list(held)).data) == 8
                asked_of.clear()

    asyncio.run(converse())


def with_instructor(url: str, model: str, *, streams: bool) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, ConfigDict

    class Weather(BaseModel):
        """Ask how the weather is."""

        model_config = ConfigDict(extra="forbid")
        city: Literal["Bern", "Rome"]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        asked: Any = {"model": model, "messages": messages, "max_retries": 0, **LIMITS}
        for _ in range(2):
            if streams:
                parts = list(client.create_partial(response_model=Weather, **asked))
                assert parts[-1].city in CITIES, parts
            parsed, raw = client.create_with_completion(response_model=Weather, **asked)
            assert parsed.city in CITIES
            said = raw.choices[0].message
            answers: list[Any] = [
                {"role": "tool", "tool_call_id": call.id, "content": SUNNY} for call in said.tool_calls or ()
            ]
            assert bool(answers) == (mode is instructor.Mode.TOOLS), said
            messages += [said.model_dump(), *(answers or [{"role": "user", "content": SUNNY}])]
            final = client.create(response_model=None, **asked).choices[0].message
            assert final.content, final
            messages += [final.model_dump(), {"role": "user", "content": AGAIN}]


CLIENTS: dict[str, Callable[..., None]] = {
    "openai": with_openai,
    "langchain-openai": with_langchain,
    "litellm": with_litellm,
    "openai-agents": with_openai_agents,
    "openai-agents over responses": with_agents_over_responses,
    "instructor": with_instructor,
}

if __name__ == "__main__":
    name, address, served_model = sys.argv[1:]
    for is_streamed in (False, True):
        CLIENTS[name](f"{address}/v1", served_model, streams=is_streamed)
