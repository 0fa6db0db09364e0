"""Conversations of requests, as the template of the model takes them. Errors name the field."""

import json
from typing import Any

from pdserve.base.errors import echo
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import invalid
from pdserve.text.chat import ChatMessage, ChatOptions


def options_of(chat: inference.Chat) -> ChatOptions:
    """Return what a conversation's template is given beside messages; RefusedError for what is no JSON."""
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    return ChatOptions(
        tools=_objects("tools", chat.tools_json) if chat.tools_json else None,
        documents=_objects("documents", chat.documents_json) if chat.documents_json else None,
        template_kwargs=json_object("chat_template_kwargs", chat.template_kwargs_json or "{}"),
        add_generation_prompt=begins,
        continue_final_message=chat.continue_final_message,
    )


def message_of(message: inference.ChatMessage) -> ChatMessage:
    """Return a message as templates take it; RefusedError for calls that are no JSON."""
    calls = _objects("tool_calls", message.tool_calls_json) if message.tool_calls_json else []
    return ChatMessage(
        role=message.role,
        content=message.content if message.HasField("content") or not calls else None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content,
    )


def json_object(field: str, text: str) -> dict[str, Any]:
    """Parse a field's text as a JSON object; RefusedError(INVALID_ARGUMENT) if it is none."""
    value = _decoded(field, text)
    if not isinstance(value, dict):
        raise invalid(field, f"{echo(text, repr)} is no JSON object")
    return value


def _objects(field: str, text: str) -> list[dict[str, Any]]:
    values = _decoded(field, text)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise invalid(field, f"{echo(text, repr)} is no JSON array of objects")
    return values


def _decoded(field: str, text: str) -> object:
    """Parse as Python's json does: endpoints that have parsed a body write its parts with the same module."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{echo(text, repr)} is no JSON: {error}") from error
