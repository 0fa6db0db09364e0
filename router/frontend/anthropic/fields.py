"""The fields of POST /v1/messages, and the chat that they ask for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from pdserve.base.errors import echo
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.agents import NvExt, usable_session
from pdserve.router.frontend.openai.body import Body, Object
from pdserve.router.frontend.openai.fields import ChatRequest

# Of the API. The later one has no temperature, top_p and top_k any more; they are heeded all the same.
VERSIONS = ("2023-06-01", "2026-10-21")


class Block(Body):
    """A part of a message's content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Body):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Object | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, description="Not heeded: max_tokens limits thinking and answer together.")


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = Field(None, description="An argument of the chat template, `reasoning_effort`.")


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "no tools are run here; give those that the client runs in tools",
        "container": "no code is run here",
    }

    def chat(self) -> ChatRequest:
        """Return the same conversation as a chat; RefusedError names what is not served."""
        self.check_refused()
        if not self.messages:
            raise invalid("messages", "it is empty, at least 1 message is needed")
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        goes_on = self.messages[-1].role == "assistant"
        choice, config = self.tool_choice, self.output_config
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*_system(self.system), *_messages(self.messages)],
                "tools": [_function(tool, place) for place, tool in enumerate(self.tools or ())] or None,
                "tool_choice": None if choice is None else _choice(choice),
                "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
                "chat_template_kwargs": {"enable_thinking": thinks},
                "include_reasoning": thinks,
                "reasoning_effort": None if config is None else config.effort,
                "response_format": None if config is None else _format(config.format),
                "add_generation_prompt": False if goes_on else None,
                "continue_final_message": goes_on,
            }
        )


class Metadata(Body):
    user_id: str | None = Field(None, description="Names a user or, as Claude Code writes it, a conversation.")


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**31, description="Less where the model's length leaves less room.")
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    nvext: NvExt | None = None

    PARTS: ClassVar[tuple[str, ...]] = ("nvext",)

    def chat(self) -> ChatRequest:
        chat = super().chat()
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "nvext")
        user = "" if self.metadata is None else self.metadata.user_id or ""
        own = {"stop": self.stop_sequences, "prompt_cache_key": usable_session("metadata.user_id", user)}
        return chat.model_copy(update={name: getattr(self, name) for name in names} | own)


def check_version(version: str | None) -> None:
    """Raise RefusedError for a version of the API that is not served; a call need not name one."""
    if version is not None and version not in VERSIONS:
        raise invalid("anthropic-version", f"{echo(version, repr)} is not one of {', '.join(VERSIONS)}")


def _system(system: str | Sequence[Block] | None) -> Iterator[Object]:
    if system:
        yield {"role": "system", "content": _text(system, "system")}


def _messages(turns: Sequence[Turn]) -> Iterator[Object]:
    for place, turn in enumerate(turns):
        where = f"messages[{place}].content"
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, where)
        elif turn.role == "system":
            yield {"role": turn.role, "content": _text(turn.content, where)}
        else:
            yield from _user(turn.content, where)


def _assistant(blocks: Sequence[Block], where: str) -> Object:
    texts, thoughts, calls = list[str](), list[str](), list[Object]()
    for place, block in enumerate(blocks):
        match block:
            case Block(type="text", text=str(text)):
                texts.append(text)
            case Block(type="thinking", thinking=str(text)):
                thoughts.append(text)
            case Block(type="redacted_thinking"):
                pass  # another server's, which none but that can read
            case Block(type="tool_use", id=str(call_id), name=str(name)):
                function = {"name": name, "arguments": json.dumps(block.input or {})}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _unsupported(block, f"{where}[{place}]", "text, thinking and tool_use")
    return {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _user(blocks: Sequence[Block], where: str) -> Iterator[Object]:
    """Yield a message for each tool's result, and one for each run of texts."""
    texts: list[str] = []
    for place, block in enumerate(blocks):
        match block:
            case Block(type="text", text=str(text)):
                texts.append(text)
            case Block(type="tool_result", tool_use_id=str(call_id)):
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                result = _text(block.content or "", f"{where}[{place}].content")
                shown = f"Error: {result}" if block.is_error else result
                yield {"role": "tool", "tool_call_id": call_id, "content": shown}
            case _:
                raise _unsupported(block, f"{where}[{place}]", "text and tool_result")
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _unsupported(block, f"{where}[{place}]", "text")
        texts.append(block.text)
    return "\n".join(texts)


def _unsupported(block: Block, where: str, served: str) -> Exception:
    return invalid(where, f"a block of type {echo(block.type, repr)} is not served, or lacks a member; {served} are")


def _function(tool: ClientTool, place: int) -> Object:
    if tool.type not in (None, "custom"):
        raise invalid(
            f"tools[{place}].type", f"{echo(tool.type or '', repr)} is not run here; 'custom' tools are served"
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _format(wanted: OutputFormat | None) -> Object | None:
    return None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _choice(choice: ToolChoice) -> str | Object:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name or ""}}
        case kind:
            return kind
