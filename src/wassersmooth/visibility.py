"""Whether the values of tensors can be read now.

Values are checked in eager mode only: not while compiling, not while a CUDA graph is captured, where reading them would
synchronize, and not under ``torch.func`` transforms, where a tensor has no single value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth._torch_internals import is_tracing, transformed


def values_are_visible(*tensors: Tensor) -> bool:
    """Whether the values of these tensors can be read now."""
    return not recording(*tensors) and not transformed(*tensors)


def recording(*tensors: Tensor) -> bool:
    """Whether operations are being recorded for later, by the compiler, by a tracer, or into a CUDA graph."""
    return tracing() or capturing(*tensors)


def tracing() -> bool:
    """Whether the compiler or a tracer is recording operations: tensors then have no values."""
    return torch.compiler.is_compiling() or is_tracing()


def capturing(*tensors: Tensor) -> bool:
    """Whether a CUDA graph is being captured: tensors have values, but none can be read, or copied from the CPU."""
    return any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()
