"""What agents say of their requests: which conversation a request belongs to, and hints of what comes.

The names are those of Dynamo (`nvext`), of vLLM's router (headers), of Claude Code and of OpenAI, besides our own.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.body import Body
from pdserve.router.frontend.terms import MAX_SESSION_BYTES

if TYPE_CHECKING:
    from pdserve.router.frontend.openai.fields import Generation

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id")  # of one conversation; the first that is sent counts
USER_HEADER = "x-user-id"  # of all conversations of somebody: better than nothing


class AgentHints(Body):
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="As priority, which takes precedence.")
    osl: int | None = Field(None, ge=1, lt=2**31, description="Tokens that the answer will probably have.")
    speculative_prefill: bool | None = Field(
        None, description="Compute what is known of the next turn's prompt once the answer has ended."
    )


class SessionControl(Body):
    session_id: str = Field(description="The conversation's name.")


class NvExt(Body):
    """Dynamo's additions to OpenAI's API."""

    agent_hints: AgentHints | None = None
    session_control: SessionControl | None = None

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
            "the router decides which workers serve",
        ),
        "token_data": "send token ids as the prompt of /v1/completions",
        "use_raw_prompt": "send the prompt to /v1/completions",
        "greed_sampling": "set temperature to 0",
    }
    PARTS: ClassVar[tuple[str, ...]] = ("agent_hints", "session_control")


def session_of(body: "Generation", headers: Mapping[str, str]) -> str:
    """Return the conversation's name, empty if none is given; RefusedError names the first one if it is too long."""
    field, name = next(((field, name) for field, name in _names(body, headers) if name), ("", ""))
    return usable_session(field, name)


def usable_session(field: str, name: str) -> str:
    """Return a conversation's name; RefusedError with the field if it is too long."""
    num_bytes = len(name.encode())
    if num_bytes > MAX_SESSION_BYTES:
        raise invalid(field, f"{num_bytes} bytes are over the limit of {MAX_SESSION_BYTES}")
    return name


def hints_of(body: "Generation") -> AgentHints:
    """Return a request's hints, by whichever names they were given; our own names take precedence."""
    of = (body.nvext.agent_hints if body.nvext is not None else None) or AgentHints.model_validate({})
    own = {
        "priority": body.priority,
        "osl": body.expected_output_tokens,
        "speculative_prefill": body.prepare_next_turn,
    }
    return of.model_copy(update={name: value for name, value in own.items() if value is not None})


def _names(body: "Generation", headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the fields and headers that may name the conversation, that of the closest meaning first."""
    yield "session_id", body.session_id or ""
    if body.nvext is not None and body.nvext.session_control is not None:
        yield "nvext.session_control.session_id", body.nvext.session_control.session_id
    for header in SESSION_HEADERS:
        yield header, headers.get(header, "")
    yield "prompt_cache_key", body.prompt_cache_key or ""
    yield USER_HEADER, headers.get(USER_HEADER, "")
