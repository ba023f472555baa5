"""A function captured in a CUDA graph: all its kernels are launched at once by every later call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wassersmooth._torch_internals import pytree
from wassersmooth.model_state import RandomState

WARM_UP = 2  # calls on a side stream before the capture, in which libraries choose their kernels


class CudaGraph:
    """Capture the kernels of one call of a function, and replay them with other inputs.

    Arguments:
        function: of tensors and lists of them, without side effects other than random draws. It may read other tensors, whose
            addresses must not change.
        inputs: an example of its arguments; later ones have the same shapes.
        generator: what it draws from, besides the global generator of the device.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], generator: torch.Generator | None) -> None:
        self.inputs = pytree.tree_map(Tensor.clone, inputs)
        self.device = pytree.tree_leaves(inputs)[0].device
        self.function = function  # keeps its compiled kernels alive
        # A new stream: libraries keep one workspace for each, and graphs that are replayed side by side need separate ones.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._warm_up(stream, generator)
        self.graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self.graph.register_generator_state(generator)  # so that every replay draws new numbers
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Any) -> Any:
        """The outputs, always in the same memory: the next call overwrites them."""
        for captured, given in zip(pytree.tree_leaves(self.inputs), pytree.tree_leaves(inputs), strict=True):
            captured.copy_(given)
        self.graph.replay()
        return self.outputs

    def _warm_up(self, stream: torch.cuda.Stream, generator: torch.Generator | None) -> None:
        device = self.device
        before, generator_state = RandomState(device), None if generator is None else generator.get_state()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.function(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        before.restore()
        if generator is not None and generator_state is not None:
            generator.set_state(generator_state)
