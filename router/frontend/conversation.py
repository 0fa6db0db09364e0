"""A conversation as inference.proto has it, for a model's chat template."""

import json
from typing import cast

from pdserve.errors import echo, invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.text.chat import ChatMessage, ChatOptions, JsonObject


def options_of(chat: inference.Chat) -> ChatOptions:
    """Return what the template is given besides the messages; RequestError(INVALID_ARGUMENT) names the wrong field."""
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    return ChatOptions(
        tools=_objects("tools", chat.tools_json) if chat.tools_json else None,
        documents=_objects("documents", chat.documents_json) if chat.documents_json else None,
        template_kwargs=_object("chat_template_kwargs", chat.template_kwargs_json),
        add_generation_prompt=begins,
        continue_final_message=chat.continue_final_message,
    )


def message_of(message: inference.ChatMessage) -> ChatMessage:
    """Return a message for the template; RequestError(INVALID_ARGUMENT) names the wrong field."""
    calls = _objects("tool_calls", message.tool_calls_json) if message.tool_calls_json else []
    return ChatMessage(
        role=message.role,
        content=message.content if message.HasField("content") or not calls else None,
        tool_calls=[_with_arguments(call) for call in calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content,
    )


def _with_arguments(call: JsonObject) -> JsonObject:
    """Return a call with its arguments as the object that templates expect; OpenAI's API has them as a text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _object("tool_calls.function.arguments", function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _object(field: str, text: str) -> JsonObject:
    value = _parse(field, text or "{}")
    if not isinstance(value, dict):
        raise invalid(field, f"{echo(text, repr)} is no JSON object")
    return value


def _objects(field: str, text: str) -> list[JsonObject]:
    value = _parse(field, text)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(field, f"{echo(text, repr)} is no JSON array of objects")
    return cast("list[JsonObject]", value)


def _parse(field: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{echo(text, repr)} is no JSON: {error}") from error
