"""Models loaded from Hugging Face directories."""

from pathlib import Path

import torch

from pdserve.checkpoint.hf_directory import open_directory
from pdserve.model.family import Model
from pdserve.model.loading import load_model


def loaded_model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = open_directory(folder)
    return load_model(checkpoint.config, checkpoint.weights(), dtype)
