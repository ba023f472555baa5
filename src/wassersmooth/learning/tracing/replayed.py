"""A function of tensors captured in a CUDA graph: the kernels of one call, launched again at once by every later call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wassersmooth.model_state import RandomState

WARM_UP = 2  # calls on a side stream before the capture, in which libraries settle on their kernels


class Replayed:
    """Calls a function once to see its kernels, and replays them with other inputs.

    Arguments:
        function: of tensors, without side effects but random draws. It may read other tensors, at addresses that stay.
        inputs: an example of its arguments; later ones have the same shapes.
        generator: what it draws from, beside the global generator of the device.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.function = function  # compiled kernels live as long as the function that owns them
        # A stream of its own: libraries have one workspace for each, and graphs that are replayed side by side need their own.
        stream = torch.cuda.Stream(self.inputs[0].device)  # type: ignore[no-untyped-call]
        self._warm_up(stream, generator)
        self.graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self.graph.register_generator_state(generator)  # so that every replay draws new numbers
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """The outputs, at the same addresses every time: the next call overwrites them."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs

    def _warm_up(self, stream: torch.cuda.Stream, generator: torch.Generator | None) -> None:
        device = self.inputs[0].device
        before, own = RandomState(device), None if generator is None else generator.get_state()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.function(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        before.restore()
        if generator is not None and own is not None:
            generator.set_state(own)
