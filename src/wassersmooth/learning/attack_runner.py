"""Attacks inside an objective: the model stays as it was, and random starts differ from step to step."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.model_state import RandomState, preserve_state, seed_rng


class Attack(Protocol):
    """Images in, attacked images out."""

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> Tensor: ...


def check_attack(received: object) -> None:
    """Raise unless this is an untargeted attack: one targeted at the labels would make the batch easier."""
    signature = "(model, images, labels, generator=None) -> images, such as attacks.FGSM(8 / 255)"
    _checks.function("attack", received, signature, 3, generator=None)
    if getattr(received, "targeted", False):
        raise ValueError("attack must lead away from the labels; got targeted=True; a batch has no targets, so leave it out")


def attacked_images(
    attack: Attack, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
) -> Tensor:
    """The attacked images, as constants. # shape: (B, C, H, W)

    An attack leaves the random state as it was, so without a generator every step would start from the same random point.
    It therefore gets one, seeded by the next number of the global state. That number counts as drawn only if the attack drew
    anything, so that a deterministic attack does not change the global state. Dropout draws other masks in the attack than in
    the pass that is trained on: the attack must not know those.
    """
    inner = unwrap(model)  # the wrapper's forward pass belongs to the step that is trained on
    before = RandomState(images.device)
    attack_generator = torch.Generator(device=images.device)
    seed = int(torch.randint(2**62, (), device="cpu"))
    attack_generator.manual_seed(seed)
    after = RandomState(images.device)
    before.restore()
    unused = attack_generator.get_state()
    with preserve_state(inner, images.device):
        # On CUDA only the state of the device changes from step to step.
        cuda_state = b"" if before.cuda is None else before.cuda.numpy().tobytes()
        seed_rng(images.device, seed + 1 + zlib.crc32(cuda_state))
        # A copy: an attack of a user may move the images in place, and they are needed once more.
        result = attack(inner, images.clone(), labels, generator=attack_generator if generator is None else generator)
    if not torch.equal(attack_generator.get_state(), unused):
        after.restore()
    _checks.like("the attacked images", result, images)
    return result.detach()
