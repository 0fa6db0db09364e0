"""Settings of workers, and engines that are built by them."""

import json
from pathlib import Path

from pdserve.settings.config import WorkerConfig, load_config
from pdserve.worker.boot import Engine, build_engine, open_model


def needed(folder: Path) -> dict[str, object]:
    """Return those that a worker must have. folder: of its model."""
    names = {"worker_id": "w", "role": "decode", "routers": ("127.0.0.1:1",)}
    return {**names, "model": str(folder), "secret_file": folder / "secret"}


def settings_of(folder: Path, **settings: object) -> WorkerConfig:
    return load_config(WorkerConfig, flags={**needed(folder), **settings})


def settings_of_tiny(folder: Path, **settings: object) -> WorkerConfig:
    """Write the config.json of a tiny model into the folder; return settings of a worker with any weights of it."""
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "max_position_embeddings": 64, **shape}
    (folder / "config.json").write_text(json.dumps(model))
    return settings_of(folder, load_format="dummy", **settings)


def built(config: WorkerConfig) -> Engine:
    return build_engine(config, open_model(config), b"secret", lambda _: None)
