"""Models with a module that guesses (DeepSeek-V3's MTP), and what it guesses by transformers' own layer."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from model_zoo import load_oracle, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

FILE, FORMAT, NUM_LAYERS = "model.safetensors", {"format": "pt"}, 3
PREFIX, LAST = f"model.layers.{NUM_LAYERS}.", f"model.layers.{NUM_LAYERS - 1}."

_LARGE = 10  # beside what layers add: nine of ten guesses are right
_EXPERTS = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2}
SMALL = {  # shapes of models that Triton's interpreter computes in seconds
    "deepseek-v3": {**_EXPERTS, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1},
    "glm4-moe": {**_EXPERTS, "num_key_value_heads": 1, "n_group": 2, "topk_group": 1},
    "glm4-lite": {**_EXPERTS, "num_key_value_heads": 2},
}


def write_model_with_module(family: str, folder: Path, **shape: int) -> Path:
    """Write a random model of a family, whose module is its last layer with other weights. shape: of the model."""
    path, num_layers = write_model(family, folder, **shape) / FILE, shape.get("num_hidden_layers", NUM_LAYERS)
    prefix, last = f"model.layers.{num_layers}.", f"model.layers.{num_layers - 1}."
    drawn, tensors = torch.Generator().manual_seed(3), load_file(path)
    size = tensors["model.norm.weight"].shape[0]

    def other(tensor: Tensor) -> Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=drawn)].view(tensor.shape).contiguous()

    module = {name.replace(last, prefix): other(each) for name, each in tensors.items() if name.startswith(last)}
    module |= {
        f"{prefix}{name}.weight": 1 + 0.2 * torch.randn(size, generator=drawn)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    module[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size, generator=drawn) * 2 * (2 * size) ** -0.5
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    module |= {f"{prefix}{name}.weight": tensors[f"{of}.weight"].clone() for name, of in copies.items()}
    save_file({**tensors, **module}, path, FORMAT)
    return folder


def write_model_with_a_module_that_is_often_right(family: str, folder: Path, **shape: int) -> Path:
    """Write a model that mostly samples what its last token says, as its module guesses; layers change the rest."""
    path = write_model_with_module(family, folder, **shape) / FILE
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        elif name.endswith("embed_tokens.weight"):
            tensor.mul_(_LARGE)
    norm = tensors["model.norm.weight"]
    size = len(norm)
    joining = _LARGE * torch.eye(size, 2 * size)  # takes the token, and leaves out what the model has computed
    own = {"eh_proj": joining, "enorm": torch.ones(size), "shared_head.norm": norm.clone()}
    save_file({**tensors, **{f"{PREFIX}{name}.weight": each for name, each in own.items()}}, path, FORMAT)
    return folder


@dataclass
class MtpOracle:
    """The model, and its module as the one layer of another."""

    model: PreTrainedModel
    module: PreTrainedModel
    tensors: dict[str, Tensor]
    eps: float

    @classmethod
    def of(cls, folder: Path) -> "MtpOracle":
        tensors = load_file(folder / FILE)
        own = {name.removeprefix(PREFIX): each for name, each in tensors.items() if name.startswith(PREFIX)}
        layer = {LAST + name: each for name, each in own.items() if LAST + name in tensors}
        rest = {name: each for name, each in tensors.items() if not name.startswith(PREFIX)}
        (folder / "module").mkdir()
        save_file({**rest, **layer}, folder / "module" / FILE, FORMAT)
        (folder / "module" / "config.json").write_text((folder / "config.json").read_text())
        model, module = load_oracle(folder), load_oracle(folder / "module")
        module.model.layers = nn.ModuleList([module.model.layers[-1]])
        module.model.norm = nn.Identity()
        module.config.num_hidden_layers = 1
        return cls(model, module, own, module.config.rms_norm_eps)

    @torch.inference_mode()
    def guesses_of(self, tokens: Seq[int], count: int) -> list[int]:
        """Return the likeliest guesses of what follows tokens."""
        embedding = self.model.get_input_embeddings().weight
        feature = self.model.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0]
        following, guesses = list(tokens[1:]), list[int]()
        while len(guesses) < count:
            parts = self._normed(embedding[following], "enorm"), self._normed(feature, "hnorm")
            joined = linear(torch.cat(parts, -1), self.tensors["eh_proj.weight"])
            output = self.module.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
            logits = self.model.lm_head(self._normed(output, "shared_head.norm"))
            guesses.append(int(logits[0].argmax()))
            feature, following = torch.cat((feature, output)), [*following, guesses[-1]]
        return guesses

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[f"{name}.weight"]
