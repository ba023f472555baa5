"""Whether tensors have values now that anybody may look at.

A look costs a synchronization on CUDA, so values are checked in eager mode only: not while compiling, not while a CUDA graph
is captured, and not under ``torch.func`` transforms, where a tensor has no single value to look at.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def values_are_visible(*tensors: Tensor) -> bool:
    """Whether the numbers in these tensors may be looked at now."""
    return not recording(*tensors) and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def recording(*tensors: Tensor) -> bool:
    """Whether operations are being written down for later, by the compiler, a tracer, or into a CUDA graph."""
    return tracing() or capturing(*tensors)


def tracing() -> bool:
    """Whether the compiler or a tracer writes operations down: then tensors have no values."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import; who has not, does not trace
    return torch.compiler.is_compiling() or (tracer is not None and tracer.get_proxy_mode() is not None)


def capturing(*tensors: Tensor) -> bool:
    """Whether a CUDA graph is being captured: tensors have values, but none may be looked at, or come from the CPU."""
    return any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()
