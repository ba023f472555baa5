"""Several passes of one batch through one model, with the side effects of a single pass.

The first pass is an ordinary one: it updates the running statistics and the random state. Every further pass starts from the
state before the first one, so that dropout draws the same masks, and works on copies of the buffers, so that nothing is
updated twice. While compiling, and while a CUDA graph is captured, the random state cannot be restored: the first pass then
records its random numbers, and further passes replay them (:mod:`wassersmooth.learning.recorded_rng`). Each pass gets a copy
of the images, since some models normalize their input in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth import _model_checks, visibility
from wassersmooth.learning.attention import unfused_attention
from wassersmooth.learning.forward_mode_ops import twice_differentiable
from wassersmooth.learning.recorded_rng import RecordedRng
from wassersmooth.learning.wrappers import refuse_data_parallel, unwrap
from wassersmooth.model_state import (
    BufferReferences,
    PythonRandomState,
    RandomState,
    call_model,
    canonical_names,
    is_expanded,
    logits_of,
)


class ReplayableForward:
    """Call :meth:`first` once, then :meth:`replay` as often as needed.

    Arguments:
        model: any module; further passes bypass a distributed wrapper, whose forward pass is run once.
        images: the batch, for its device.
        constants: further arguments of the model.
    """

    def __init__(self, model: nn.Module, images: Tensor, *constants: Any) -> None:
        self.model, self.inner, self.constants = model, unwrap(model), constants
        self.recording = visibility.recording(images)
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.inner.named_buffers()}
        # A buffer that two layers share has two paths and one copy.
        names = {name: name for name in self.buffers} if torch.compiler.is_compiling() else canonical_names(self.inner)
        self.names = {path: name for path, name in names.items() if name in self.buffers}
        self.before = None if self.recording else _Start(self.inner, images.device)
        self.draws: list[Tensor] = []

    def first(self, x: Tensor) -> Tensor:
        """The model's outputs, with all side effects."""
        if not self.recording:
            # The fused kernels have no second derivative, and draw other dropout masks.
            with unfused_attention(), twice_differentiable():
                outputs = call_model(self.model, x, *self.constants)
            _model_checks.outputs(outputs, len(x))
            if x.requires_grad and torch.is_grad_enabled():
                if torch.is_inference_mode_enabled():
                    raise ValueError(
                        "the objective differentiates the model, which torch.inference_mode() forbids; use torch.no_grad()"
                    )
                _model_checks.depends_on_images(outputs)
            return outputs
        rng = RecordedRng()
        with rng, twice_differentiable(forward_mode_too=True):  # attention's dropout can then be recorded
            outputs = call_model(self.model, x, *self.constants)
        self.draws = rng.recorded
        return outputs

    def first_with_pullback(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """:meth:`first`, and the map from covectors w of the outputs to covectors J' w of the images, as constants."""
        if not torch.compiler.is_compiling():
            x = x.detach().requires_grad_()
            outputs = self.first(x)
            return outputs, lambda w: torch.autograd.grad(outputs, x, w.to(outputs.dtype), retain_graph=True)[0]

        # torch.compile supports function transforms but not autograd.grad. A transform must not change what it captured, so
        # it works on copies of the buffers, which are written back afterwards.
        def forward(z: Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], list[Tensor]]]:
            buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
            rng = RecordedRng()
            with rng, twice_differentiable(forward_mode_too=True):
                outputs = self._call(buffers, z)
            return outputs, (buffers, rng.recorded)

        outputs, pullback, (updated, self.draws) = torch.func.vjp(forward, x.detach(), has_aux=True)  # type: ignore[misc]
        with torch.no_grad():
            for name, buffer in self.inner.named_buffers():
                if not is_expanded(buffer):  # no pass can write to an expanded buffer, and neither can the compiler
                    buffer.copy_(updated[name])
        return outputs, lambda w: pullback(w.to(outputs.dtype))[0].detach()

    def replay(self, x: Tensor, mode: AbstractContextManager[Any] | None = None) -> Tensor:
        """The outputs at another point, computed in a context, with the same dropout masks and buffers and no side effects."""
        refuse_data_parallel(self.model)
        if isinstance(self.inner, torch.jit.ScriptModule):
            raise ValueError(
                "a scripted model cannot be run twice from one state, so it can be penalized with engine='double_backward' "
                "only; use that, or pass the module that was scripted"
            )
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        buffers = {path: copies[name] for path, name in self.names.items()}
        start = RecordedRng(self.draws) if self.before is None else _rewound(self.inner, self.before)
        with start, twice_differentiable(forward_mode_too=self.recording), mode or nullcontext():
            return self._call(buffers, x)

    def _call(self, buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        arguments = (x.clone(), *self.constants)
        outputs: Tensor = logits_of(torch.func.functional_call(self.inner, buffers, arguments, tie_weights=False))
        return outputs


class _Start:
    """What a pass starts from: the random state of torch, Python and NumPy, and the buffers."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.parts = RandomState(device), PythonRandomState(), BufferReferences(model)

    def restore(self) -> None:
        for part in self.parts:
            part.restore()


@contextmanager
def _rewound(model: nn.Module, start: _Start) -> Iterator[None]:
    """Go back to an earlier random state and buffers, and restore the present ones on exit. A buffer may have been None."""
    present = _Start(model, start.device)
    start.restore()
    try:
        yield
    finally:
        present.restore()
