"""Random layers that keep a state, and what they compute: the formulas in float64, token by token."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from pdserve.kernels.cpu.states import Gating, Heads, Recurrence, StatePart

KINDS = ("conv", "delta", "delta of two widths", "delta of wide heads", "space", "space without norm", "norm first")
SIZES = {  # heads, groups of them, features of keys and of values
    "delta": (6, 2, 16, 24),
    "delta of two widths": (2, 1, 9, 70),
    "delta of wide heads": (2, 2, 128, 128),
    "delta of 64": (2, 1, 64, 64),
    "delta of 128": (1, 1, 128, 128),
    "space of 64": (2, 1, 128, 64),
    "space of 128": (1, 1, 256, 128),
}
GATES = ("strong", "weak", "both", "alike")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def layer(kind: str, dtype: torch.dtype) -> Recurrence:
    """Return a random layer, and the features of its inputs."""
    if kind == "conv":
        return Recurrence(weight=drawn(3, 21), bias=drawn(21), inputs_at=42, gates_at=21)
    is_space = not kind.startswith("delta")
    count, groups, key_dim, value_dim = SIZES.get(kind, (4, 2, 24, 20))
    keys, values = groups * key_dim, count * value_dim
    channels = 2 * keys + values
    gating = Gating(norm=(1 + 0.1 * drawn(value_dim)).to(dtype), part=value_dim, eps=1e-6, rounds=True)
    if is_space:
        norm = (1 + 0.1 * drawn(values)).to(dtype)
        gating = Gating(norm=norm, part=values // groups, eps=1e-5, gates_first=kind == "space", scale=0.5)
        gating = Gating(scale=0.5) if kind == "space without norm" else gating
    heads = Heads(
        count=count, groups=groups, key_dim=key_dim, value_dim=value_dim, order="vkq" if is_space else "qkv",
        rates_at=values + channels, betas_at=None if is_space else values + channels + count,
        rate=-drawn(count).abs(), rate_bias=drawn(count, seed=1), direct=drawn(count) if is_space else None,
        gating=gating,
    )  # fmt: skip
    bias = drawn(channels) if is_space else None
    return Recurrence(weight=drawn(4, channels) / 2, bias=bias, inputs_at=values, gates_at=0, heads=heads)


def halves(of: Recurrence) -> list[tuple[Recurrence, Tensor, slice]]:
    """Return what each of two ranks has of a layer: its part, and which inputs and results of all are the part's."""
    found, (channels, heads) = [], (of.weight.shape[1], of.heads)
    for place in range(2):
        if heads is None:
            run = slice(0, 10) if place == 0 else slice(10, channels)
            taken = torch.arange(3 * channels).view(3, -1)[:, run].flatten()
            width = run.stop - run.start
            own = replace(of, inputs_at=2 * width, gates_at=width)
            found.append((_narrowed(own, (run,), 0), taken, run))
            continue
        groups = slice(place * heads.groups // 2, (place + 1) * heads.groups // 2)
        first, last = (each * heads.count // heads.groups for each in (groups.start, groups.stop))
        values = slice(first * heads.value_dim, last * heads.value_dim)
        spans = {name: values if name == "v" else _scaled(groups, heads.key_dim) for name in heads.order}
        runs = tuple(
            [slice(heads.places[each] + run.start, heads.places[each] + run.stop) for each, run in spans.items()]
        )
        of_heads = [of.inputs_at + channels + n * heads.count for n in range(1 if heads.betas_at is None else 2)]
        taken = torch.cat(
            [
                torch.arange(values.start, values.stop),
                *[of.inputs_at + torch.arange(run.start, run.stop) for run in runs],
                *[at + torch.arange(first, last) for at in of_heads],
            ]
        )
        width, own_channels = values.stop - values.start, sum(run.stop - run.start for run in runs)
        norm = heads.gating.norm
        own = replace(
            of,
            inputs_at=width,
            heads=replace(
                heads,
                count=last - first,
                groups=groups.stop - groups.start,
                rates_at=width + own_channels,
                betas_at=None if heads.betas_at is None else width + own_channels + last - first,
                rate=heads.rate[first:last],
                rate_bias=heads.rate_bias[first:last],
                direct=None if heads.direct is None else heads.direct[first:last],
                gating=replace(
                    heads.gating, norm=norm if norm is None or len(norm) == heads.gating.part else norm[values]
                ),
            ),
        )
        found.append((_narrowed(own, runs, first), taken, values))
    return found


def _scaled(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def _narrowed(of: Recurrence, runs: tuple[slice, ...], heads_before: int) -> Recurrence:
    channels = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    bias = None if of.bias is None else of.bias[channels].contiguous()
    part = StatePart(of.weight.shape[1], runs, heads_before)
    return replace(of, weight=of.weight[:, channels].contiguous(), bias=bias, part=part)


def gated_by(gates: str, of: Recurrence, taken: Tensor) -> tuple[Recurrence, Tensor]:
    """Return a layer and inputs with strong or weak gates, with both side by side, or of tokens that are alike.

    Strong gates leave nothing; weak ones nearly all. Tokens that are alike correct each other entirely.
    """
    heads = of.heads
    assert heads is not None
    rate, bias = torch.ones_like(heads.rate), heads.rate_bias
    rates = slice(heads.rates_at, heads.rates_at + heads.count)
    taken = taken.clone()
    match gates:
        case "strong":
            return replace(of, heads=replace(heads, rate=-300 * rate, rate_bias=bias + 5)), taken
        case "weak":
            return replace(of, heads=replace(heads, rate=-1e-4 * rate, rate_bias=bias)), taken
        case "both":
            taken[:, rates] *= 12.0
            return replace(of, heads=replace(heads, rate=-10 * rate, rate_bias=bias)), taken
        case "alike":
            taken[:] = taken[0]
            if heads.betas_at is not None:
                taken[:, heads.betas_at : heads.betas_at + heads.count] = 12.0
            return replace(of, heads=replace(heads, rate=-1e-4 * rate, rate_bias=bias)), taken
        case _:
            raise ValueError(gates)


def num_inputs(of: Recurrence) -> int:
    channels = of.weight.shape[1]
    return 3 * channels if of.heads is None else of.width + channels + 2 * of.heads.count


def expected(of: Recurrence, taken: Tensor) -> Tensor:
    """Compute a sequence of inputs from its beginning, as the formulas say."""
    x, (kernel, channels) = taken.double(), of.weight.shape
    inputs, gates = x[:, of.inputs_at : of.inputs_at + channels], x[:, of.gates_at : of.gates_at + of.width]
    if of.heads is None:
        inputs = (x[:, :channels] * inputs).to(taken.dtype).double()
    padded = torch.cat((inputs.new_zeros(kernel - 1, channels), inputs))
    sums = torch.stack([padded[i : i + len(x)] * of.weight[i].double() for i in range(kernel)]).sum(0)
    sums = sums + (0.0 if of.bias is None else of.bias.double())
    if of.heads is None:
        return gates * sums
    heads, made = of.heads, []
    keys, values = heads.groups * heads.key_dim, of.width
    widths = [values if name == "v" else keys for name in heads.order]
    parts = dict(zip(heads.order, silu(sums).split(widths, 1), strict=True))
    steps = softplus(x[:, heads.rates_at : heads.rates_at + heads.count] + heads.rate_bias.double())
    memory = x.new_zeros(heads.count, heads.key_dim, heads.value_dim)
    for t in range(len(x)):
        q, k = (parts[each][t].view(heads.groups, -1) for each in "qk")
        v = parts["v"][t].view(heads.count, -1)
        if heads.betas_at is not None:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            q = q * heads.key_dim**-0.5
        q, k = (each.repeat_interleave(heads.count // heads.groups, 0) for each in (q, k))
        memory = memory * (heads.rate.double() * steps[t]).exp()[:, None, None]
        if heads.betas_at is None:
            learnt = v * steps[t][:, None]
        else:
            beta = x[t, heads.betas_at : heads.betas_at + heads.count].sigmoid()
            learnt = (v - torch.einsum("hkv,hk->hv", memory, k)) * beta[:, None]
        memory = memory + k[:, :, None] * learnt[:, None]
        direct = 0.0 if heads.direct is None else heads.direct.double()[:, None] * v
        made.append((torch.einsum("hkv,hk->hv", memory, q) + direct).flatten())
    return gated(heads.gating, torch.stack(made), silu(gates))


def gated(of: Gating, made: Tensor, gates: Tensor) -> Tensor:
    if of.norm is None:
        return made * gates * of.scale
    made = made * gates if of.gates_first else made
    parts = made.view(len(made), -1, of.part)
    normed = parts * (parts.square().mean(-1, keepdim=True) + of.eps).rsqrt()
    weights = of.norm.double().repeat(made.shape[1] // len(of.norm))
    return normed.flatten(1) * weights * (1.0 if of.gates_first else gates) * of.scale
