"""What a model of a GGUF file makes of a prompt."""

from pathlib import Path

import torch
from greedy_runs import spec
from model_zoo import prompt
from torch import Tensor
from whole_attention import torch_attention

from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.loading import load_model

PAGE_SIZE, NUM_PAGES = 16, 10
PROMPT = prompt(150)
CLOSE = {"atol": 5e-4, "rtol": 5e-4}


@torch.inference_mode()
def logits_of(path: Path) -> Tensor:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    runner, pages = Runner(model, 2 * NUM_PAGES, PAGE_SIZE), tuple(range(NUM_PAGES))
    others = tuple(tuple(range(NUM_PAGES, 2 * NUM_PAGES)) for _ in runner.groups[1:])
    step = StepPlan((Chunk(PROMPT, 0, pages, (spec(),), other_pages=others),))
    attention = torch_attention(model, runner.kv, step, runner.groups)
    return model.forward(torch.tensor(PROMPT), attention, None)
