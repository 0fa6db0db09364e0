"""Chat messages to a prompt, by the template that came with the model.

Templates are programs by whoever published the model. They run in jinja2's immutable sandbox, as
transformers runs them: no attribute of Python's internals, no change to what they are given, `range` of at
most 100,000. The sizes of messages and output are limited here. Time and memory are not: a template may
loop or multiply strings as it likes, so whoever serves strangers' templates renders in a thread and stops
waiting for it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError, RequestError, echo, invalid

MAX_MESSAGES = 4096
MAX_INPUT_CHARS = 4 * 2**20
MAX_OUTPUT_CHARS = 16 * 2**20

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A model's chat template, ready to render. Immutable; threads may share it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        strftime_now: Callable[[str], str] = time.strftime,
    ) -> None:
        """Compile `source`; ConfigError if it is no template.

        special_tokens: what the template may name, such as bos_token and eos_token.
        """
        try:
            self._template = _environment(strftime_now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt. It already has the special tokens it needs: encode it with `add_special=False`.

        Raises RequestError(INVALID_ARGUMENT) naming `chat` for messages over a limit or refused.
        """
        _check_sizes(messages)
        pieces = self._template.generate(
            self._special_tokens,
            messages=[{"role": message.role, "content": message.content} for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        rendered, num_chars = [], 0
        try:
            for piece in pieces:
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise _too_long()
                rendered.append(piece)
        except TEMPLATE_ERRORS as error:
            raise invalid("chat", f"the model's template refuses the messages: {echo(str(error))}") from error
        return "".join(rendered)


def _too_long() -> RequestError:
    return invalid("chat", f"the rendered prompt is over the limit of {MAX_OUTPUT_CHARS} characters")


def _check_sizes(messages: Sequence[ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("chat", f"{len(messages)} messages are outside [1, {MAX_MESSAGES}]")
    num_chars = sum(len(message.role) + len(message.content) for message in messages)
    if num_chars > MAX_INPUT_CHARS:
        raise invalid("chat", f"{num_chars} characters are over the limit of {MAX_INPUT_CHARS}")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's messages for training; here it adds nothing to its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2 reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment(strftime_now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
