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
PREFIX = f"model.layers.{NUM_LAYERS}."

_LARGE = 10  # beside what layers add: nine of ten guesses are right
_EXPERTS = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2}
SMALL = {  # shapes of models that Triton's interpreter computes in seconds
    "deepseek-v3": {**_EXPERTS, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1},
    "glm4-moe": {**_EXPERTS, "num_key_value_heads": 1, "n_group": 2, "topk_group": 1},
    "glm4-lite": {**_EXPERTS, "num_key_value_heads": 2},
}
SMALL_WITH_STATES = {"qwen3.5": {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 2}}


@dataclass(frozen=True)
class Naming:
    """What a family calls a module's tensors."""

    prefix: str = PREFIX
    layer: str = PREFIX
    source: int = NUM_LAYERS - 1  # the model's layer that the module's is like
    norms: tuple[str, str, str] = ("enorm", "hnorm", "shared_head.norm")  # of embedding, hidden state and output
    joining: str = "eh_proj"
    has_copies: bool = True
    plus: float = 0.0  # added to the weights of norms
    passes_normed: bool = False

    @classmethod
    def of(cls, family: str, num_layers: int = NUM_LAYERS) -> "Naming":
        if family not in FULL_LAYERS:
            prefix = f"model.layers.{num_layers}."
            return cls(prefix, prefix, num_layers - 1)
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        source = FULL_LAYERS[family]
        return cls("mtp.", "mtp.layers.0.", source, norms, "fc", has_copies=False, plus=1.0, passes_normed=True)

    @property
    def source_prefix(self) -> str:
        return f"model.layers.{self.source}."


FULL_LAYERS = {"qwen3-next": 3, "qwen3.5": 1, "qwen3.5-moe": 1}  # the last layer with attention


def write_model_with_module(family: str, folder: Path, **shape: int) -> Path:
    """Write a random model of a family, whose module is its last layer with other weights. shape: of the model."""
    path, naming = (
        write_model(family, folder, **shape) / FILE,
        Naming.of(family, shape.get("num_hidden_layers", NUM_LAYERS)),
    )
    prefix, source = naming.prefix, naming.source_prefix
    drawn, tensors = torch.Generator().manual_seed(3), load_file(path)
    size = tensors["model.norm.weight"].shape[0]

    def other(tensor: Tensor) -> Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=drawn)].view(tensor.shape).contiguous()

    module = {
        name.replace(source, naming.layer): other(each) for name, each in tensors.items() if name.startswith(source)
    }
    module |= {
        f"{prefix}{name}.weight": 1 - naming.plus + 0.2 * torch.randn(size, generator=drawn) for name in naming.norms
    }
    module[f"{prefix}{naming.joining}.weight"] = torch.randn(size, 2 * size, generator=drawn) * 2 * (2 * size) ** -0.5
    if naming.has_copies:
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        module |= {f"{prefix}{name}.weight": tensors[f"{of}.weight"].clone() for name, of in copies.items()}
    save_file({**tensors, **module}, path, FORMAT)
    return folder


def write_model_with_a_module_that_is_often_right(family: str, folder: Path, **shape: int) -> Path:
    """Write a model that mostly samples what its last token says, as its module guesses; layers change the rest."""
    path, naming = write_model_with_module(family, folder, **shape) / FILE, Naming.of(family)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        elif name.endswith("embed_tokens.weight"):
            tensor.mul_(_LARGE)
    norm = tensors["model.norm.weight"]
    size = len(norm)
    joining = _LARGE * torch.eye(size, 2 * size)  # takes the token, and leaves out what the model has computed
    of_embedding, _, of_output = naming.norms
    own = {naming.joining: joining, of_embedding: torch.full((size,), 1 - naming.plus), of_output: norm.clone()}
    save_file({**tensors, **{f"{naming.prefix}{name}.weight": each for name, each in own.items()}}, path, FORMAT)
    return folder


@dataclass
class MtpOracle:
    """The model, and its module as the one layer of another."""

    model: PreTrainedModel
    module: PreTrainedModel
    tensors: dict[str, Tensor]
    naming: Naming

    @classmethod
    def of(cls, folder: Path, naming: Naming = Naming()) -> "MtpOracle":
        prefix, source = naming.prefix, naming.source_prefix
        tensors = load_file(folder / FILE)
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        behind = naming.layer.removeprefix(prefix)
        layer = {
            source + name.removeprefix(behind): each
            for name, each in own.items()
            if name.startswith(behind) and source + name.removeprefix(behind) in tensors
        }
        rest = {name: each for name, each in tensors.items() if not name.startswith(prefix)}
        if naming.passes_normed:
            rest["model.norm.weight"] = own[f"{naming.norms[2]}.weight"]
        (folder / "module").mkdir()
        save_file({**rest, **layer}, folder / "module" / FILE, FORMAT)
        (folder / "module" / "config.json").write_text((folder / "config.json").read_text())
        model, module = load_oracle(folder), load_oracle(folder / "module")
        module.model.layers = nn.ModuleList([module.model.layers[naming.source]])
        module.config.num_hidden_layers = 1
        if not naming.passes_normed:
            module.model.norm = nn.Identity()
        else:
            module.config.layer_types = ["full_attention"]
        return cls(model, module, own, naming)

    @torch.inference_mode()
    def guesses_of(self, tokens: Seq[int], count: int) -> list[int]:
        """Return the likeliest guesses of what follows tokens."""
        of_embedding, of_feature, of_output = self.naming.norms
        embedding = self.model.get_input_embeddings().weight
        feature = self.model.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0]
        following, guesses = list(tokens[1:]), list[int]()
        while len(guesses) < count:
            parts = self._normed(embedding[following], of_embedding), self._normed(feature, of_feature)
            joined = linear(torch.cat(parts, -1), self.tensors[f"{self.naming.joining}.weight"])
            output = self.module.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
            logits = self.model.lm_head(output if self.naming.passes_normed else self._normed(output, of_output))
            guesses.append(int(logits[0].argmax()))
            feature, following = torch.cat((feature, output)), [*following, guesses[-1]]
        return guesses

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.naming.plus + self.tensors[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.module.config.rms_norm_eps) * weight
