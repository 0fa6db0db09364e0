"""A GPU that is not there: torch's meta device, with all that a real one would refuse or wait for written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = torch.device("meta")
aten = torch.ops.aten


@dataclass
class Seen:
    """What was done with the device."""

    kernels: list[str] = field(default_factory=list)  # of Triton, in order
    operations: list[str] = field(default_factory=list)  # of torch, on the device's tensors
    mixed: list[str] = field(default_factory=list)  # with tensors of both sides
    waits: list[str] = field(default_factory=list)  # of the host for the device
    sent_bytes: int = 0
    received_bytes: int = 0


class _Recording(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        with self:  # in inference mode what is made of other operations comes whole
            if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.device == DEVICE for tensor in tensors)
        if func is aten.copy_.default and args[0].device != args[1].device:
            self._moved(args[0], args[1], is_async=len(args) > 2 and args[2])
            return args[0]
        if func is aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            made = torch.empty(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype), device=kwargs["device"])
            self._moved(made, args[0], is_async=kwargs.get("non_blocking", False))
            return made
        if not on_device:
            return func(*args, **kwargs)
        self._seen.operations.append(str(func))
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self._seen.waits.append(str(func))
        if any(tensor.device != DEVICE and tensor.dim() for tensor in tensors):  # a number may be on either side
            self._seen.mixed.append(str(func))
        return func(*args, **kwargs)

    def _moved(self, target: Tensor, source: Tensor, *, is_async: bool) -> None:
        if not is_async:
            self._seen.waits.append(f"copy of {list(source.shape)} from {source.device} to {target.device}")
        if target.device == DEVICE:
            self._seen.sent_bytes += source.nbytes
        else:
            self._seen.received_bytes += source.nbytes


@contextmanager
def recorded_device() -> Iterator[Seen]:
    """Write down what is done with the device; Triton's kernels are not run."""
    seen = Seen()

    def note(kernel: JITFunction[Any], *args: object, **kwargs: object) -> None:
        values = [value.base if isinstance(value, TensorDescriptor) else value for value in (*args, *kwargs.values())]
        seen.kernels.append(kernel.__name__)
        if any(isinstance(value, Tensor) and value.device != DEVICE for value in values):
            seen.mixed.append(kernel.__name__)

    with mock.patch.object(JITFunction, "run", note), _Recording(seen):
        yield seen
