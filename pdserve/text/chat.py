"""Chat messages to a prompt, by the template that came with the model.

Templates are programs by whoever published the model. They run in jinja2's immutable sandbox, as
transformers runs them: no attribute of Python's internals, no change to what they are given, `range` of at
most 100,000. The sizes of messages and output are limited here. Time and memory are not: a template may
loop or multiply strings as it likes, so whoever serves strangers' templates renders in a thread and stops
waiting for it.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.base.errors import ConfigError, echo
from pdserve.protocol.refusal import invalid
from pdserve.text.history import TOOLS, form_of
from pdserve.text.special_texts import SpecialTexts, StandIns, shown
from pdserve.text.tokenizer import Tokenizer

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


OWN_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
SYSTEM, DEVELOPER = "system", "developer"

JsonObject = Mapping[str, object]
Written = Mapping[str, Any]  # the arguments of a template that clients wrote


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str | None
    tool_calls: Sequence[JsonObject] = ()  # as in OpenAI's API; arguments may be any text, or an object
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    def plain(self) -> dict[str, object]:
        """Return the message as templates expect it, without keys for what is absent."""
        given: dict[str, object] = {"role": self.role}
        if self.content is not None:
            given["content"] = self.content
        if self.tool_calls:
            given["tool_calls"] = [dict(each) for each in self.tool_calls]
        if self.reasoning_content:
            given["thinking"] = given["reasoning_content"] = self.reasoning_content
        for key in ("tool_call_id", "name"):
            if value := getattr(self, key):
                given[key] = value
        return given


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template is given besides the messages."""

    tools: Sequence[JsonObject] | None = None
    documents: Sequence[JsonObject] | None = None
    template_kwargs: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        """Raise RefusedError(INVALID_ARGUMENT) for options that contradict each other."""
        if taken := OWN_ARGUMENTS & self.template_kwargs.keys():
            raise invalid("chat_template_kwargs", f"{min(taken)} is a field of its own")
        if self.add_generation_prompt and self.continue_final_message:
            raise invalid("continue_final_message", "goes with add_generation_prompt false alone")


DEFAULT_OPTIONS = ChatOptions()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    rendered: str
    stand_ins: StandIns | None = None  # in it, where clients wrote special tokens

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.rendered if self.stand_ins is None else shown(self.rendered, self.stand_ins)

    def encoded(self, tokenizer: Tokenizer) -> list[int]:
        """Return its ids, by the tokenizer whose special texts it was made with."""
        if self.stand_ins is None:
            return tokenizer.encode(self.rendered, add_special=False)
        return tokenizer.special_texts.encode(self.rendered, self.stand_ins)


class ChatTemplate:
    """A model's chat template, ready to render. Immutable; threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; ConfigError if it is no template.

        special_tokens: what the template may name, such as bos_token and eos_token.
        """
        environment = _environment()
        try:
            parsed = environment.parse(source)
            # A template that knows the role compares with its name. To write the word in a sentence is not to know it.
            self._knows_developer = any(constant.value == DEVELOPER for constant in parsed.find_all(nodes.Const))
            self._template = environment.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError, ValueError) as error:
            raise ConfigError(f"chat_template: no program can be made of it ({error})") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._form = form_of(
            lambda messages: self._run({"messages": messages, "tools": TOOLS, "documents": None}, DEFAULT_OPTIONS)
        )

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions = DEFAULT_OPTIONS) -> str:
        """Return the prompt. It already has the special tokens it needs: encode it with `add_special=False`.

        Raises RefusedError(INVALID_ARGUMENT) naming `chat` for messages over a limit or refused.
        """
        return self._fill(self._written(messages, options), options)

    def prompt(self, messages: Sequence[ChatMessage], options: ChatOptions, special: SpecialTexts | None) -> Prompt:
        """Return the prompt, of which no text that clients wrote makes a special token. None: such texts may.

        Raises RefusedError as `render` does.
        """
        written = self._written(messages, options)
        if special is None or not special.are_in(written):
            return Prompt(self._fill(written, options))
        stand_ins = special.stand_ins(written, self.source)
        hidden: Written = special.hidden(written, stand_ins)  # type: ignore[assignment]  # of the same shape
        return Prompt(self._fill(hidden, options), stand_ins)

    def _written(self, messages: Sequence[ChatMessage], options: ChatOptions) -> Written:
        """Return what clients wrote, as the template is given it; RefusedError for messages over a limit.

        A developer's message is a system message of a template that does not name the role.
        """
        _check_sizes(messages)
        if not self._knows_developer:
            messages = list(_by_system(messages))
        return {
            **options.template_kwargs,
            "messages": self._form.shaped([message.plain() for message in messages]),
            "tools": options.tools,
            "documents": options.documents,
        }

    def _fill(self, written: Written, options: ChatOptions) -> str:
        """Return the prompt of what clients wrote; RefusedError if the template refuses it."""
        if not options.continue_final_message:
            return self._run(written, options)
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        *before, last = written["messages"]
        if not last.get("content"):
            raise invalid("continue_final_message", "the last message has no text to go on with")
        marked = {**last, "content": f"{last['content']}{mark} "}
        return _cut(self._run({**written, "messages": [*before, marked]}, options), mark)

    def _run(self, written: Written, options: ChatOptions) -> str:
        given = {**self._special_tokens, **written, "add_generation_prompt": options.add_generation_prompt}
        return _joined(self._template.generate(given))


def _by_system(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield messages with each developer's as one of the system.

    It is joined with the system messages beside it: many templates take one, and only as the first message.
    """
    for is_instruction, turns in groupby(messages, key=lambda message: message.role in (SYSTEM, DEVELOPER)):
        group = list(turns)
        if is_instruction and any(message.role == DEVELOPER for message in group):
            content = "\n\n".join(message.content for message in group if message.content)
            yield replace(group[0], role=SYSTEM, content=content)
        else:
            yield from group


def _joined(pieces: Iterator[str]) -> str:
    """Run a template; RefusedError if it fails or writes too much."""
    rendered, num_chars = [], 0
    try:
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise invalid("chat", f"the rendered prompt is over the limit of {MAX_OUTPUT_CHARS} characters")
            rendered.append(piece)
    except TEMPLATE_ERRORS as error:
        raise invalid("chat", f"the model's template refuses the messages: {echo(str(error))}") from error
    return "".join(rendered)


def _cut(rendered: str, mark: str) -> str:
    """Return a prompt up to the mark at the end of its last message, without spaces there if the template trims it."""
    before, found, after = rendered.rpartition(mark)
    if not found:
        raise invalid("continue_final_message", "the model's template does not show the last message as it is")
    return before if after.startswith(" ") else before.rstrip()


def _check_sizes(messages: Sequence[ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("chat", f"{len(messages)} messages are outside [1, {MAX_MESSAGES}]")
    num_chars = sum(len(message.role) + len(message.content or "") for message in messages)
    if num_chars > MAX_INPUT_CHARS:
        raise invalid("chat", f"{num_chars} characters are over the limit of {MAX_INPUT_CHARS}")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's messages for training; here it adds nothing to its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2 reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = time.strftime
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
    """Write plain JSON; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
