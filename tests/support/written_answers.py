"""What models write when tools are offered, well formed and not: for doors that make messages of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tool_templates
from hypothesis import strategies as st
from router_fakes import MODEL, TOKENIZER

from pdserve.checkpoint.checkpoint import NO_DEFAULTS
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.filters import MessageFilter
from pdserve.router.frontend.served import ServedModel
from pdserve.text.chat import ChatTemplate
from pdserve.text.tool_calls import FORMATS, FormatName

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FUNCTION = '{{"name": "{name}", "{key}": {arguments}}}'
Json = dict[str, Any]


def served(template: str, name: FormatName = "hermes") -> ServedModel:
    chat = ChatTemplate(template, SPECIAL)
    return ServedModel(MODEL, 100_000, TOKENIZER.vocab_size, NO_DEFAULTS, TOKENIZER, chat, tool_format=FORMATS[name])


@dataclass(frozen=True)
class Written:
    """What a model wrote."""

    format: FormatName
    text: str
    finish_reason: int
    cuts: tuple[int, ...]  # pieces in which it came


class PlainText(MessageFilter):
    """Finds nothing in a text but text."""

    def __init__(self) -> None:
        super().__init__(None, FORMATS["hermes"], (), None, shows_reasoning=False)


def plain_gains(texts: Sequence[str]) -> list[Gain]:
    """Return what an answer of text alone gains, with its end."""
    gains = [Gain(0, [1], text) for text in texts]
    return [*gains, Gain(0, [1], "", finish_reason=inference.FINISH_REASON_STOP)]


ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=8), st.none()), max_size=3).map(
        json.dumps
    ),
    st.sampled_from(
        ["null", '"null"', '""', '"plain"', "[1, 2]", "17", "{not: json}", '{"a": "\\ud800"}', "", '"{\\"a\\": 1}"']
    ),
)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "unknown"]), ARGUMENTS), max_size=3)


def in_format(name: FormatName, content: str, calls: list[tuple[str, str]]) -> str:
    form = FORMATS[name]
    texts = [FUNCTION.format(name=called, key=form.arguments_key, arguments=each) for called, each in calls]
    if name == "mistral":
        return content + (f"[TOOL_CALLS][{', '.join(texts)}]" if texts else "")
    if name == "llama3_json":
        return "; ".join(texts) or content
    return content + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


@st.composite
def answers(draw: st.DrawFn) -> Written:
    name = draw(st.sampled_from(list(FORMATS)))
    text = in_format(name, draw(st.sampled_from(["", "I look.\n", "\n", "é {"])), draw(CALLS))
    reason = inference.FINISH_REASON_STOP
    if draw(st.booleans()):  # cut by length or a stop string
        text = text[: draw(st.integers(0, len(text)))]
        reason = draw(st.sampled_from([inference.FINISH_REASON_STOP, inference.FINISH_REASON_LENGTH]))
    return Written(name, text, reason, tuple(draw(st.lists(st.integers(0, len(text)), max_size=4))))


MODELS = {name: served(template) for name, template in tool_templates.ALL.items()}
