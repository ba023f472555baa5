"""Several passes of one batch through one model, with the side effects of a single plain pass.

The first pass is the model's own: it moves the running statistics and the random state. Every further pass starts from the
state before the first one, so that dropout draws the same masks, and works on copies of the buffers, so that nothing moves
twice. While compiling, and while a CUDA graph is captured, the random state cannot be set back: the first pass then
remembers its random draws, and the further ones read them (:mod:`wassersmooth.learning.draws`). Each pass gets a copy of the
images, since some models normalize what they are given in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wassersmooth import _model_checks, visibility
from wassersmooth.learning.draws import Draws
from wassersmooth.learning.parallel import refuse_spread_batches, unwrapped
from wassersmooth.learning.substitution import attention_written_out
from wassersmooth.model_state import HeldBuffers, RandomState, answer, is_expanded, places


class Passes:
    """``first`` once, then ``again`` as often as needed.

    Arguments:
        model: any module; extra passes go around a distributed wrapper, whose own forward pass is for the first one.
        images: the batch, for its device.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model, self.inner = model, unwrapped(model)
        self.traced = visibility.recording(images)
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.inner.named_buffers()}
        # A buffer that two layers share has two places, and one copy for both.
        named = {name: name for name in self.buffers} if torch.compiler.is_compiling() else places(self.inner)
        self.places = {place: name for place, name in named.items() if name in self.buffers}
        self.before = None if self.traced else (RandomState(images.device), HeldBuffers(self.inner))
        self.draws: list[Tensor] = []

    def first(self, x: Tensor) -> Tensor:
        """The model's outputs, with all side effects."""
        if not self.traced:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative, and masks of their own
                outputs = answer(self.model, x)
            _model_checks.outputs(outputs, len(x))
            if x.requires_grad and torch.is_grad_enabled():
                if torch.is_inference_mode_enabled():
                    raise ValueError(
                        "the objective differentiates the model, which torch.inference_mode() forbids; use torch.no_grad()"
                    )
                _model_checks.depends_on_images(outputs)
            return outputs
        draws = Draws()
        with draws, attention_written_out():  # its dropout is then one that is seen
            outputs = answer(self.model, x)
        self.draws = draws.made
        return outputs

    def first_with_pullback(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """:meth:`first`, and the map from covectors of the outputs to covectors of the images (J' w), as constants."""
        if not torch.compiler.is_compiling():
            x = x.detach().requires_grad_()
            outputs = self.first(x)
            return outputs, lambda w: torch.autograd.grad(outputs, x, w.to(outputs.dtype), retain_graph=True)[0]

        # torch.compile follows function transforms, not autograd.grad. A transform must not change what it captured, so
        # it works on copies of the buffers, which are written back afterwards.
        def forward(z: Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], list[Tensor]]]:
            buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
            draws = Draws()
            with draws, attention_written_out():
                outputs = torch.func.functional_call(self.inner, buffers, (z.clone(),), tie_weights=False)
            return outputs, (buffers, draws.made)

        outputs, pullback, (moved, self.draws) = torch.func.vjp(forward, x.detach(), has_aux=True)  # type: ignore[misc]
        with torch.no_grad():
            for name, buffer in self.inner.named_buffers():
                if not is_expanded(buffer):  # which no pass moves, and the compiler cannot write to either
                    buffer.copy_(moved[name])
        return outputs, lambda w: pullback(w.to(outputs.dtype))[0].detach()

    def again(self, x: Tensor, mode: AbstractContextManager[Any] | None = None) -> Tensor:
        """The outputs at another point, in a context: same masks, same buffers, no side effects."""
        refuse_spread_batches(self.model)
        if isinstance(self.inner, torch.jit.ScriptModule):
            raise ValueError(
                "a scripted model cannot be asked twice from one state, so it can be penalized with engine='double_backward' "
                "only; use that, or hand over the module that was scripted"
            )
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        buffers = {place: copies[name] for place, name in self.places.items()}
        start = Draws(self.draws) if self.before is None else _rewound(self.inner, *self.before)
        attention = attention_written_out() if self.traced else nullcontext()
        with start, attention, mode or nullcontext():
            outputs: Tensor = torch.func.functional_call(self.inner, buffers, (x.clone(),), tie_weights=False)
        return outputs


@contextmanager
def _rewound(model: nn.Module, before: RandomState, held: HeldBuffers) -> Iterator[None]:
    """The random state and the buffers of before; those of now come back. A buffer may have been None before."""
    after, held_now = RandomState(before.device), HeldBuffers(model)
    before.restore()
    held.put_back()
    try:
        yield
    finally:
        after.restore()
        held_now.put_back()
