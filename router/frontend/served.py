"""Reads the model that a router serves, but for its weights."""

import logging
import os
from functools import partial

from pdserve.checkpoint.checkpoint import NO_DEFAULTS, naming, tokenizer_archive
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.prompts import ServedModel
from pdserve.text.parsers.reasoning import reasoning_of
from pdserve.text.parsers.tool_calls import FORMATS, format_of

logger = logging.getLogger(__name__)


def load_model(config: RouterConfig) -> ServedModel:
    """Read the model's config, tokenizer and chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads are woken for the few new words of a prompt
    checkpoint = open_checkpoint(resolve_model(config.model))
    tokenizer = checkpoint.tokenizer()
    vocab_size = min(tokenizer.vocab_size, checkpoint.config.vocab_size)
    defaults = NO_DEFAULTS
    if config.generation_config == "auto":
        with naming(checkpoint.path):
            defaults = checkpoint.generation.within(vocab_size)
        if defaults != NO_DEFAULTS:
            logger.info("sampling defaults of the model's generation_config.json: %s", defaults.sampling())
    source, chat = checkpoint.chat_template or "", checkpoint.chat()
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
        tool_format=format_of(source) if parser == "auto" else FORMATS[parser],
        reasoning=None if chat is None else reasoning_of(config.reasoning_parser, source, chat),
        model_type=str(checkpoint.raw_config.get("model_type", "")),
        aliases=config.served_model_aliases,
        architectures=(checkpoint.config.architecture,),
        archived=partial(tokenizer_archive, checkpoint),
    )
