"""The model that a router serves: everything but its weights."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from pdserve.checkpoint.checkpoint import NO_DEFAULTS, GenerationDefaults, naming, tokenizer_archive
from pdserve.checkpoint.embedding import GENERATING, Embedding
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.router.config import EndpointConfig
from pdserve.text.chat import ChatTemplate
from pdserve.text.infilling import Infilling, infilling_of
from pdserve.text.reasoning import Reasoning, reasoning_of
from pdserve.text.scoring import Scoring, scoring_of
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls import FORMATS, ToolFormat, format_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a router needs from a model: everything but the weights."""

    name: str
    max_model_len: int  # the model's own limit
    vocab_size: int  # may be smaller than the tokenizer's
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # by name in templates, such as eos_token
    eos_token_ids: tuple[int, ...] = ()  # of the tokenizer's vocabulary
    tool_format: ToolFormat = FORMATS["hermes"]
    reasoning: Reasoning | None = None  # None: answers have none
    allow_special_tokens_in_text: bool = False  # of chats
    model_type: str = ""  # from its config
    architectures: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # other names in requests
    tool_chat: ChatTemplate | None = None  # for conversations with tools; None: `chat`
    embedding: Embedding = GENERATING
    hidden_size: int = 0  # numbers in its vectors
    scoring: Scoring | None = None  # how it scores documents; None: it does not
    archived: Callable[[], bytes] | None = None  # makes a ZIP archive of the tokenizer's files; takes a moment
    infilling: Infilling | None = None  # how it fills in the middle; None: it does not

    @property
    def names(self) -> tuple[str, ...]:
        """All names in requests; the first is the one in answers."""
        return (self.name, *self.aliases)

    def name_for(self, asked: str | None) -> str:
        """Return the name in an answer to a request that asked for a name: an adapter's own, or the model's."""
        return asked if asked and asked not in self.names else self.name


def served_name(config: EndpointConfig) -> str:
    return config.served_model_name or open_checkpoint(resolve_model(config.model)).name


def load_model(config: EndpointConfig) -> ServedModel:
    """Read the model's config, tokenizer and chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a prompt has few new words: waking threads costs more
    checkpoint = open_checkpoint(resolve_model(config.model))
    tokenizer = checkpoint.tokenizer()
    vocab_size = min(tokenizer.vocab_size, checkpoint.config.vocab_size)
    defaults = NO_DEFAULTS
    if config.generation_config == "auto":
        with naming(checkpoint.path):
            defaults = checkpoint.generation.within(vocab_size)
        if defaults != NO_DEFAULTS:
            logger.info("sampling defaults of the model's generation_config.json: %s", defaults.sampling())
    if checkpoint.embedding.refusal:
        logger.warning("/v1/embeddings is not served: %s", checkpoint.embedding.refusal)
    chat = checkpoint.chat()
    tool_chat = chat if checkpoint.tool_template is None else checkpoint.chat(with_tools=True)
    parser = config.tool_call_parser
    return ServedModel(
        name=config.served_model_name or checkpoint.name,
        max_model_len=checkpoint.config.max_position_embeddings,
        vocab_size=vocab_size,
        defaults=defaults,
        tokenizer=tokenizer,
        chat=chat,
        special_tokens=checkpoint.special_tokens,
        eos_token_ids=checkpoint.ends(tokenizer),
        tool_chat=tool_chat,
        tool_format=format_of(tool_chat.source if tool_chat is not None else "")
        if parser == "auto"
        else FORMATS[parser],
        reasoning=None if chat is None else reasoning_of(config.reasoning_parser, chat),
        allow_special_tokens_in_text=config.allow_special_tokens_in_text,
        model_type=str(checkpoint.raw_config.get("model_type", "")),
        aliases=config.served_model_aliases,
        architectures=(checkpoint.config.architecture,),
        embedding=checkpoint.embedding,
        hidden_size=checkpoint.config.hidden_size,
        scoring=scoring_of(tokenizer),
        archived=partial(tokenizer_archive, checkpoint),
        infilling=infilling_of(tokenizer),
    )
