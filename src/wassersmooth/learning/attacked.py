"""Running an attack inside an objective: the model comes back as it was, and random starts differ from step to step."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.learning.parallel import unwrapped
from wassersmooth.model_state import RandomState, seed_passes, untouched


class Attack(Protocol):
    """Images in, attacked images out."""

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> Tensor: ...


def check_attack(received: object) -> None:
    """An attack that leads away from the labels: towards them, it would make the batch easier than it is."""
    if isinstance(received, type) or not callable(received):
        got = f"the class {received.__name__} itself" if isinstance(received, type) else type(received).__name__
        raise ValueError(f"attack must be callable, such as attacks.FGSM(8 / 255); got {got}")
    if getattr(received, "targeted", False):
        raise ValueError("attack must lead away from the labels; got targeted=True; a batch has no targets, so leave it out")


def attacked_images(
    attack: Attack, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
) -> Tensor:
    """The attacked images, as constants. # shape: (B, C, H, W)

    An attack leaves the random state as it was, so without a generator every step would start from the same random point.
    It is therefore given one, seeded by the next number of the global state; and that number counts as drawn only if the
    attack drew anything, so that attacks without randomness leave no trace. Dropout has masks of its own in the attack: with
    those of the pass that is trained on, the attack would know what it cannot know.
    """
    inner = unwrapped(model)  # the wrapper's own forward pass belongs to the step that is trained on
    before = RandomState(images.device)
    own = torch.Generator(device=images.device)
    number = int(torch.randint(2**62, ()))
    own.manual_seed(number)
    after = RandomState(images.device)
    before.restore()
    fresh = own.get_state()
    with untouched(inner, images.device):
        own_state = b"" if before.cuda is None else before.cuda.numpy().tobytes()  # on CUDA that alone moves from step to step
        seed_passes(images.device, number + 1 + zlib.crc32(own_state))
        result = attack(inner, images, labels, generator=own if generator is None else generator)
    if not torch.equal(own.get_state(), fresh):
        after.restore()
    _checks.like("the attacked images", result, images)
    return result.detach()
