"""Compile Triton kernels for a GPU that this machine need not have, instead of launching them.

The interpreter, in which tests run the kernels where there is no GPU, takes code that does not compile, and knows neither
registers nor shared memory. Triton needs no GPU to compile: it brings its own assembler. Here real calls of the library are
made with tensors on the CPU, and every launch becomes a compilation with the arguments of that launch. Results of such calls
are uninitialized memory.

    python -m tests.kernel_compiler [--arch 80] [--all]      # a line for each kernel that the calls of the tests launch
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.learning.compiled.test_convolutions import ODD, REAL
from wassersmooth import convolutions
from wassersmooth.geometry import box_ops, table_ops
from wassersmooth.geometry.coherent_motion import MOTIONS


class Compiled(NamedTuple):
    """A compiled kernel, and what a launch of it takes on the GPU."""

    name: str  # module.function
    launch: str  # its arguments
    registers: int  # of a thread
    stack: int  # bytes of a thread in memory, where spilled registers are
    shared: int  # bytes of a block

    def __str__(self) -> str:
        return f"{self.registers:4} {self.stack:5} {self.shared:6}  {self.name} {self.launch}"


class Target:
    """What Triton asks its driver when it compiles for a GPU of some compute capability."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # one cache for each

    def get_current_stream(self, device: int) -> int:
        return 0


def assembler_is_missing() -> bool:
    from triton import knobs

    try:
        return not knobs.nvidia.ptxas.path
    except RuntimeError:
        return True


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[Collection[Compiled]]:
    """Compile what is launched inside, with any tensors, and note each kernel once for each kind of arguments."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: dict[int, Compiled] = {}

    def compile_(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **constants)
        if id(made) not in found:  # Triton keeps what it has compiled
            registers, stack = _resources(made.asm["cubin"])
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            found[id(made)] = Compiled(name, _shown(args, constants), registers, stack, made.metadata.shared)

    constants_of = convolutions._constants

    def constants_on_cuda(a: Tensor, *more: Any) -> dict[str, Any]:
        return constants_of(a, *more) | {"SCALE": convolutions.TRUNCATION if a.dtype == torch.float32 else 1.0}

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        patch.setattr(driver, "_active", Target(arch))
        patch.setattr(JITFunction, "__getitem__", lambda kernel, grid: functools.partial(compile_, kernel, grid))
        patch.setattr(box_ops, "_on_device", lambda field: True)
        patch.setattr(convolutions, "_constants", constants_on_cuda)
        yield found.values()


def _resources(cubin: bytes) -> tuple[int, int]:
    """The registers of a thread, and the bytes of its stack."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)], capture_output=True, text=True, check=True
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said.stdout)[-1]
    return int(registers), int(stack)


def _shown(args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    given = [f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, Tensor) else str(a) for a in args]
    return " ".join([*given, *(f"{name}={value}" for name, value in constants.items())])


# Calls of the library ------------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """All uses of a metric's kernels with a batch of images."""

    graph: dict[str, Any]  # options of PixelGraph.grid
    shape: tuple[int, int, int, int]
    radius: int = 2
    channels_last: bool = False

    def __call__(self) -> None:
        options = dict(self.graph)
        if "learned" in options:
            number = len(ws.PixelGraph.grid(*self.shape[2:], self.radius).offsets)
            options = {"weight": torch.ones(number, dtype=options["learned"], requires_grad=True)}
        if "features" in options:
            number = options["features"]
            options = options | {"features": lambda images: images.mean(1, keepdim=True).expand(-1, number, -1, -1)}
        use(ws.Wasserstein(ws.PixelGraph.grid(*self.shape[2:], self.radius, **options)), self.shape, self.channels_last)


class MotionUses(NamedTuple):
    kind: Any
    shape: tuple[int, int, int, int]
    channels_last: bool = False

    def __call__(self) -> None:
        use(ws.Deformations(*self.shape[2:], smoothness=1.0, kind=self.kind), self.shape, self.channels_last)


def use(metric: Any, shape: tuple[int, ...], channels_last: bool) -> None:
    """Products, lengths and noise, and first and second derivatives in image and covector."""

    def laid_out(field: Tensor) -> Tensor:
        return field.to(memory_format=torch.channels_last) if channels_last else field

    x, v = laid_out(torch.rand(shape)), laid_out(torch.randn(shape))
    metric.cometric(x).mv(v)
    metric.cometric(x).quad(v)
    metric.cometric(x).quad(v.clone().requires_grad_()).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_ops, "MOST_NORMALS", 2 * x.numel())
        metric.cometric(x).sample()
    for name in ("quad", "mv"):
        image, covector = x.clone().requires_grad_(), v.clone().requires_grad_()
        value = getattr(metric.evaluate(image), name)(covector).square().sum()
        first = torch.autograd.grad(value, [image, covector], create_graph=True)
        sum(g.square().sum() for g in first).backward()


class ConvolutionUses(NamedTuple):
    """The convolution and its gradients in a traced step, and as a layer with constant weights."""

    case: tuple[Any, ...]  # images, in, out, size, window, stride, padding, dilation
    dtype: torch.dtype

    def __call__(self) -> None:
        images, c, k, size, window, *settings = self.case
        stride, padding, dilation = (list(pair) for pair in settings)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype).to(memory_format=torch.channels_last)

        a, weight = empty(images, c, *size), empty(k, c, *window)
        d = convolutions.forward(a, weight, stride, padding, dilation)
        convolutions.input_gradient(d, weight, list(a.shape), stride, padding, dilation)
        for pairs in (1, 2):
            convolutions.weight_gradient([a] * pairs, [d] * pairs, list(weight.shape), stride, padding, dilation)
        blocks = ((False, None, nn.ReLU()), (True, None, None), (False, d, nn.SiLU()), (True, d, nn.Softplus()))
        for bias, added, activation in blocks:
            layer = convolutions.Convolution2d(c, k, window, stride, padding, dilation, bias=bias, dtype=self.dtype)
            layer.to(memory_format=torch.channels_last).requires_grad_(False).anywhere = True
            convolutions.ConvolutionBlock(layer, activation)(a, added)


CONSTANT: dict[str, Any] = {}
GAUSSIAN, DISK, LEARNED, AWARE = {"weight": "gaussian"}, {"neighborhood": "disk"}, {"learned": torch.float32}, {"features": 3}
SMALL, GRAY, LARGE, RAGGED = (8, 3, 32, 32), (8, 1, 28, 28), (32, 3, 224, 224), (2, 3, 33, 70)
ODD_SHAPES = (RAGGED, (1, 1, 1, 130), (1, 3, 13, 1))

SELECTION: list[Callable[[], None]] = [
    Geometry(CONSTANT, SMALL, 4),
    Geometry(GAUSSIAN, GRAY, 2),
    Geometry(LEARNED, RAGGED, 2),
    Geometry(AWARE, SMALL, 2, channels_last=True),
    MotionUses("transport", SMALL),
    MotionUses("advection", (2, 3, 24, 40)),
    ConvolutionUses(REAL[1], torch.float32),
    ConvolutionUses(REAL[5], torch.bfloat16),
]

ALL: list[Callable[[], None]] = [
    *SELECTION,
    *(Geometry(graph, SMALL, radius) for graph in (CONSTANT, GAUSSIAN, LEARNED) for radius in (1, 2, 5, 8, 16)),
    *(Geometry({"features": number}, SMALL, radius) for number in (1, 3, 8) for radius in (2, 8)),
    *(Geometry(graph, shape, 2) for graph in (CONSTANT, GAUSSIAN, LEARNED, AWARE) for shape in (GRAY, *ODD_SHAPES)),
    *(Geometry(graph, (2, 1, 3, 21), 16) for graph in (CONSTANT, GAUSSIAN, AWARE)),
    *(Geometry(graph, SMALL, 4, channels_last=True) for graph in (CONSTANT, GAUSSIAN, LEARNED)),
    *(Geometry(graph, LARGE, radius) for graph in (CONSTANT, GAUSSIAN) for radius in (2, 16)),
    *(Geometry({"learned": dtype}, SMALL, 2) for dtype in (torch.float64, torch.bfloat16)),
    Geometry(DISK, SMALL, 8),
    *(MotionUses(kind, shape) for kind in MOTIONS for shape in (GRAY, *ODD_SHAPES, (8, 3, 224, 224))),
    MotionUses("transport", SMALL, channels_last=True),
    *(ConvolutionUses(case, dtype) for case in REAL for dtype in (torch.float32, torch.bfloat16)),
    *(ConvolutionUses(case, torch.float32) for case in ODD),
    ConvolutionUses(REAL[3], torch.float16),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    import triton

    print(f"Triton {triton.__version__}, sm_{given.arch}: registers, bytes of stack, bytes of shared memory")
    for call in ALL if given.all else SELECTION:
        if given.only in repr(call):
            print(call)
            with compiling(given.arch) as compiled:
                call()
            print(*compiled, sep="\n", flush=True)


if __name__ == "__main__":
    main()
