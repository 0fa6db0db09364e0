"""The fields of requests over HTTP: OpenAI's, and vLLM's additions. A null means the same as a missing field."""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator

from pdserve.protocol.sampling import MAX_LOGPROBS, MAX_SEQUENCES
from pdserve.router.frontend.openai.agents import NvExt
from pdserve.router.frontend.openai.body import Body, Object

MAX_PROMPTS = 128
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Prompt = str | list[int] | list[str] | list[list[int]]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="End the stream with a chunk that has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Let every chunk have the usage so far.")


class Slo(Body):
    """The client's objectives."""

    ttft_ms: float | None = Field(None, description="Time to the first token, milliseconds.")
    tpot_ms: float | None = Field(None, description="Mean time per later token, milliseconds.")


class Served(Body):
    """The fields that all requests to workers share."""

    model: str | None = Field(None, description="By default the model that is served.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Higher is served first; 0 is normal.")
    slo: Slo | None = None
    tenant: str | None = Field(None, description="Whose prefix cache is used, where no API key says that.")
    deadline_ms: int | None = Field(None, ge=0, lt=2**32, description="Time the whole request may take.")
    request_id: str | None = Field(None, description="As the header x-request-id.")

    REFUSED: ClassVar[Mapping[str, str]] = {
        "cache_salt": "set tenant instead: prefix caches are not shared between tenants",
        "prompt_embeds": "prompts are text or token ids",
        "kv_transfer_params": "the router decides where KV pages go",
        "truncate_prompt_tokens": "prompts are not truncated",
    }
    PARTS: ClassVar[tuple[str, ...]] = ("slo",)


class Generation(Served):
    """The fields that requests for generation share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="-1 or 0: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, lt=2**31)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[str] | None = None
    return_token_ids: bool | None = Field(None, description="Show token ids beside the text.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens as token_id:123 in log probabilities, instead of their texts."
    )
    response_format: Object | None = None
    structured_outputs: Object | None = Field(
        None, description="One of json, json_object, regex, choice and grammar, which the answer is to match."
    )
    guided_json: Object | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    session_id: str | None = Field(None, description="The conversation that this is a turn of.")
    prompt_cache_key: str | None = Field(None, description="As session_id, which takes precedence.")
    expected_output_tokens: int | None = Field(None, ge=1, lt=2**31, description="As nvext.agent_hints.osl.")
    prepare_next_turn: bool | None = Field(None, description="As nvext.agent_hints.speculative_prefill.")
    nvext: NvExt | None = None

    REFUSED: ClassVar[Mapping[str, str]] = {**Served.REFUSED, "use_beam_search": "beam search is not supported"}
    PARTS: ClassVar[tuple[str, ...]] = ("stream_options", "slo", "nvext")


class TextPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = Field(None, description="Of a part of type refusal, which assistants' messages may have.")


class Message(Body):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    refusal: str | None = Field(None, description="What an assistant answered in place of content.")
    name: str | None = None
    tool_calls: list[Object] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31, description="Takes precedence over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: an answer calls one tool at most.")
    documents: list[Object] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = Field(None, description="An argument of the chat template.")
    include_reasoning: bool | None = None
    echo: bool | None = Field(None, description="Let the answer begin with an assistant's last message.")

    REFUSED: ClassVar[Mapping[str, str]] = {
        **Generation.REFUSED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "answers are text",
        "chat_template": "the model's own template is used",
        "web_search_options": "the web is not searched",
    }


def _checked_prompt(value: Any) -> Prompt:  # noqa: ANN401 - whatever was sent
    """Return a valid prompt. Lists of token ids may be long: no object is made of each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value) or _are_ids(value):
            return value
        if all(isinstance(each, list) and _are_ids(each) for each in value):
            return value
    raise ValueError("a text, token ids (integers below 2**32), or a list of either is needed")


def _are_ids(values: list[Any]) -> bool:
    if set(map(type, values)) - {int}:  # a bool is an int, too
        return False
    try:
        return len(array("I", values)) == len(values)
    except OverflowError:
        return False


def _none_if_false(value: Any) -> Any:  # noqa: ANN401 - whatever was sent
    """Return None for false, which chats send where they want no log probabilities: pydantic would make it 0."""
    return None if value is False else value


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Annotated[Prompt, PlainValidator(_checked_prompt, Prompt)]
    echo: bool | None = Field(None, description="Let the answer begin with the prompt.")
    logprobs: Annotated[int | None, BeforeValidator(_none_if_false)] = Field(None, ge=0, lt=2**31)
    best_of: int | None = None
    add_special_tokens: bool | None = Field(None, description="Whether the tokenizer adds its own; by default it does.")
    suffix: str | None = Field(None, description="The text behind the answer, for models that fill in the middle.")


class Text(Body):
    """A document, as Cohere's and Jina's clients may write it."""

    text: str


_RANKING = {
    "max_chunks_per_doc": "documents are not cut",
    "max_tokens_per_doc": "documents are not cut",
    "rank_fields": "documents are texts",
    "use_activation": "scores are probabilities",
    "activation": "scores are probabilities",
    "softmax": "scores are probabilities",
}


class EmbeddingsRequest(Served):
    """POST /v1/embeddings."""

    input: Annotated[Prompt, PlainValidator(_checked_prompt, Prompt)]
    dimensions: int | None = Field(
        None, description="Leading numbers of each vector, which is then made as long again."
    )
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = Field(None, description="Whether the tokenizer adds its own; by default it does.")

    REFUSED: ClassVar[Mapping[str, str]] = {
        **Served.REFUSED,
        "messages": "inputs are texts or token ids",
        "embed_dtype": "vectors are float32",
        "endianness": "vectors are little-endian",
        "normalize": "vectors are as the model's files say",
        "use_activation": "vectors are as the model's files say",
        "input_type": "write the model's instruction into the input",
    }


class PoolingRequest(EmbeddingsRequest):
    """POST /pooling."""

    task: Literal["embed"] | None = Field(None, description="Vectors of whole inputs are all that is made.")


class RerankRequest(Served):
    """POST /v1/rerank."""

    query: str
    documents: list[str | Text]
    top_n: int | None = Field(None, ge=0, description="Results that are returned, the best first; 0: all.")
    return_documents: bool | None = Field(None, description="False: results have no documents.")
    instruction: str | None = Field(None, description="The task; by default that of the model's card.")

    REFUSED: ClassVar[Mapping[str, str]] = {**Served.REFUSED, **_RANKING}


class ScoreRequest(Served):
    """POST /v1/score."""

    text_1: str | list[str] = Field(description="Queries: one, or as many as text_2 has.")
    text_2: str | list[str] = Field(description="Documents.")
    instruction: str | None = Field(None, description="The task; by default that of the model's card.")

    REFUSED: ClassVar[Mapping[str, str]] = {**Served.REFUSED, **_RANKING}


class TokenizeRequest(Body):
    """POST /tokenize, of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: list[Object] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]
