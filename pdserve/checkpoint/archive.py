"""A model's tokenizer as an archive of the files that other programs read, whatever format the model has here."""

import io
import json
import zipfile

from pdserve.checkpoint.checkpoint import Checkpoint


def tokenizer_archive(checkpoint: Checkpoint) -> bytes:
    kind = {name: checkpoint.raw_config.get(name) for name in ("architectures", "model_type")}
    config = {
        **{name: value for name, value in kind.items() if value is not None},
        "eos_token_id": list(checkpoint.eos_token_ids),
        "max_position_embeddings": checkpoint.config.max_position_embeddings,
        "vocab_size": checkpoint.config.vocab_size,
    }
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.special_tokens}
    if checkpoint.chat_template is not None:
        tokenizer_config["chat_template"] = checkpoint.chat_template
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokenizer.json", checkpoint.tokenizer().to_json())
        archive.writestr("tokenizer_config.json", json.dumps(tokenizer_config))
        archive.writestr("config.json", json.dumps(config))
    return file.getvalue()
