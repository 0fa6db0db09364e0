"""The fields of POST /v1/responses, and the chat that they ask for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdserve.base.errors import echo
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.agents import NvExt
from pdserve.router.frontend.openai.body import Body, Object
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.responses.items import Item, messages_of
from pdserve.router.frontend.responses.tools import chosen, functions_of

MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT = (  # of `include`: what tools bring that are not run here, and what answers never have
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    "reasoning.encrypted_content",
)
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]


class ConversationName(Body):
    id: str


class ReasoningConfig(Body):
    effort: str | None = Field(
        None, description="An argument of the chat template, `reasoning_effort`; none turns `enable_thinking` off."
    )
    summary: str | None = Field(None, description="Not heeded: reasoning is shown as it is.")
    generate_summary: str | None = Field(None, description="As summary.")


class TextConfig(Body):
    format: Object | None = Field(None, description="text, json_object, or json_schema with a schema.")
    verbosity: str | None = Field(None, description="Not heeded.")


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="Not heeded: events are not padded.")


class CountInputRequest(Body):
    """POST /v1/responses/input_tokens."""

    model: str | None = Field(None, description="By default the model that is served.")
    input: str | list[Item] | None = None
    instructions: str | None = None
    conversation: str | ConversationName | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: an answer calls one tool at most.")
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: str | Object | None = None
    tools: list[Object] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    REFUSED: ClassVar[Mapping[str, str]] = {
        "prompt": "no templates of prompts are kept here; send instructions and input",
        "context_management": "conversations are not shortened",
        "moderation": "nothing is moderated here",
    }
    PARTS: ClassVar[tuple[str, ...]] = ("reasoning", "text")

    @property
    def conversation_id(self) -> str:
        """The conversation's name, empty if none is given."""
        given = self.conversation
        return given.id if isinstance(given, ConversationName) else given or ""

    def check(self) -> None:
        """Raise RefusedError for what is not served, whatever else a request has."""
        self.check_refused()
        if self.truncation == "auto":
            raise invalid("truncation", "'auto' is not served: nothing is left out of a conversation; 'disabled' is")
        if self.previous_response_id and self.conversation_id:
            raise invalid("conversation", "goes against previous_response_id: an answer continues one of them")

    def chat(self, context: Sequence[Item], given: Sequence[Item]) -> ChatRequest:
        """Return the same conversation as a chat; RefusedError names what is not served.

        `context`: the items before this request's own, which are `given`.
        """
        if not (context or given):
            raise invalid("input", "it is empty, at least 1 item is needed")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*system, *messages_of(context, given)],
                "tools": functions_of(self.tools) or None,
                "tool_choice": chosen(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": effort,
                "chat_template_kwargs": None if effort is None else {"enable_thinking": effort != "none"},
                "response_format": None if self.text is None else _format(self.text.format),
            }
        )


class ResponseRequest(CountInputRequest):
    """POST /v1/responses."""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="By default true: the response can be retrieved and continued.")
    background: bool | None = Field(None, description="Answer at once; the response is to be retrieved later.")
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31, description="Reasoning counts.")
    max_tool_calls: int | None = Field(None, description="Not heeded: no tools are run here.")
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="The conversation that this is a turn of.")
    nvext: NvExt | None = None
    service_tier: str | None = None

    PARTS: ClassVar[tuple[str, ...]] = (*CountInputRequest.PARTS, "stream_options", "nvext")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        super().check()
        for place, name in enumerate(self.include or ()):
            if name != LOGPROBS and name not in WITHOUT_EFFECT:
                raise invalid(f"include[{place}]", f"{echo(name, repr)} is not known; {LOGPROBS!r} is")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "they go with stream true")
        if self.background and not self.is_stored:
            raise invalid("background", "goes with store true: the response could not be retrieved")
        if self.conversation_id and not self.is_stored:
            raise invalid("conversation", "goes with store true: the answer is added to the conversation")
        if self.shows_logprobs and self.tools and self.tool_choice != "none":
            field = "top_logprobs" if self.top_logprobs else "include"
            raise invalid(field, "log probabilities go without tools: a call has no place for them")

    def chat(self, context: Sequence[Item], given: Sequence[Item]) -> ChatRequest:
        names = ("stream", "temperature", "top_p", "prompt_cache_key", "nvext")
        own = {name: getattr(self, name) for name in names} | {"max_completion_tokens": self.max_output_tokens}
        if self.shows_logprobs:
            own |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return super().chat(context, given).model_copy(update=own)


def _format(wanted: Object | None) -> Object | None:
    """Return the format in the form of chats."""
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: each for name, each in wanted.items() if name != "type"}}
