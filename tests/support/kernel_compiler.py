"""Compile kernels for chips this machine does not have, and read what the compiler says of them."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
# Of a multiprocessor of compute capability 8.0, 9.0 and 10.0.
REGISTERS, REGISTER_STEP, MAX_WARPS, WARP = 65_536, 8, 64, 32
RESERVED_SHARED = 1024  # per program, by the driver
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel as a wrapper launched it: enough to compile it."""

    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler made of a kernel."""

    kernel: str
    registers: int  # per thread
    spill_bytes: int  # stores, per thread
    shared_bytes: int  # per program
    tensor_columns: int  # of tensor memory, per program; Blackwell has 512
    num_warps: int
    matrix_unit: str  # which instructions multiply matrices; empty: none
    serialized: bool  # the assembler gave up overlapping wgmma
    narrow_inputs: int  # of FP8, how many are summed before float32 takes the sum

    def programs_at_a_time(self, shared_bytes: int) -> int:
        """Return how many programs fit on a multiprocessor of which one program may use `shared_bytes`."""
        registers = -(-self.registers // REGISTER_STEP) * REGISTER_STEP * self.num_warps * WARP
        by_shared = (shared_bytes + RESERVED_SHARED) // (self.shared_bytes + RESERVED_SHARED)
        return min(REGISTERS // registers, by_shared, MAX_WARPS // self.num_warps)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them; tensors may be on torch's meta device."""
    launches: list[Launch] = []

    def note(kernel: JITFunction[Any], *args: object, **kwargs: object) -> None:
        launches.append(_launch_of(kernel, args, kwargs))

    with mock.patch.object(JITFunction, "run", note):
        yield launches


def _launch_of(kernel: JITFunction[Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Launch:
    """Specialize arguments as Triton does: aligned pointers, None, integers that are 1 or multiples of 16."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = values[name]
        fixed = not parameter.do_not_specialize
        is_one = fixed and isinstance(value, int) and value == 1
        if parameter.is_constexpr or is_one or value is None:
            signature[name] = "constexpr"
            constants[index,] = value
            continue
        signature[name] = _type_of(value)
        if isinstance(value, Tensor) or (fixed and isinstance(value, int) and value % 16 == 0):
            attributes[index,] = DIVISIBLE
    options = {name: kwargs[name] for name in OPTIONS if kwargs.get(name) is not None}
    return Launch(kernel, signature, constants, attributes, options)


def _type_of(value: object) -> str:
    match value:
        case Tensor():
            return "*" + TYPE_NAMES[value.dtype]
        case TensorDescriptor():
            return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        case int():
            return "i32" if abs(value) < 1 << 31 else "i64"
        case float():
            return "fp32"
        case _:
            raise TypeError(f"no kernel takes a {type(value).__name__}")


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for a capability, 90 say, down to machine code; raises what Triton raises if it cannot."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    report = _assembler_report(ptx, capability)
    spills = re.findall(r"(\d+) bytes spill stores", report)
    units = [name for name in ("wgmma", "tcgen05", "mma.sync") if f"{name}.mma" in ptx or f"{name}." in ptx]
    return Resources(
        kernel=compiled.metadata.name,
        registers=max(int(count) for count in re.findall(r"Used (\d+) registers", report)),
        spill_bytes=max(int(count) for count in spills),
        shared_bytes=compiled.metadata.shared,
        tensor_columns=compiled.metadata.tmem_size,
        num_warps=compiled.metadata.num_warps,
        matrix_unit=units[0] if units else "",
        serialized="wgmma.mma_async instructions are serialized" in report,
        narrow_inputs=max(map(int, re.findall(r"maxNumImpreciseAcc = (\d+)", compiled.asm["ttgir"])), default=0),
    )


def compile_all(run: Callable[[], object], capability: int) -> list[Resources]:
    """Compile every kernel that `run` launches."""
    with recorded() as launches:
        run()
    return [compile_launch(launch, capability) for launch in launches]


def _assembler_report(ptx: str, capability: int) -> str:
    """Assemble again, asking for the resource report Triton does not pass on."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX always names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
