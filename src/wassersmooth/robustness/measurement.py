"""Errors of one model on one set of images: in batches that fit, from one seed, each measure with its own random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wassersmooth.model_state import RandomState, seed_passes
from wassersmooth.robustness.classifier import scores

# (model, images, labels, generator) -> images: an attack, a deformation, or nothing at all
Perturbation = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]
PerImage = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # (images, labels, generator) -> one value per image

ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # how many numbers a batch of images holds at first
LARGEST_BATCH = {"cpu": 128, "cuda": 2048}


class Measurement:
    """A model in eval mode, and the images to ask it about, in a random order that the seed decides.

    Subsets are the first images of that order, so measures on fewer images are paired with measures on more.

    Arguments:
        model: in the state and mode it is to be measured in; whoever builds this restores it.
        images, labels: checked.
        seed: decides the order, and with a measure's name that measure's random numbers.

    Attributes:
        between_batches: called with the images that are done and those of the measure, before every batch but its first.
    """

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
        self.model, self.seed = model, seed
        self.between_batches: Callable[[int, int], None] = lambda done, total: None
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
        self.images, self.labels = images.detach()[order], labels.detach()[order]
        kind = images.device.type if images.device.type in ELEMENTS else "cuda"
        self.batch_size = max(1, min(LARGEST_BATCH[kind], ELEMENTS[kind] // images[0].numel()))

    def wrong(self, name: str, perturb: Perturbation, limit: int | None = None) -> Tensor:
        """Which of the first ``limit`` images are misclassified once perturbed. # shape: (limit,) bool, on the CPU"""

        def one_batch(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            perturbed = perturb(self.model, images, labels, generator)
            self.seed_model(f"{name}, answer")  # a model that draws must not repeat the draw that the attack has seen
            with torch.no_grad():
                return scores(self.model, perturbed, labels).argmax(1) != labels

        return self.collect(name, one_batch, limit)

    def collect(self, name: str, measure: PerImage, limit: int | None = None) -> Tensor:
        """A value for each of the first ``limit`` images, measured in batches. # shape: (limit, ...), on the CPU

        Where a batch does not fit into the device's memory, everything starts again with half of it, and the same numbers.
        """
        images, labels = self.images[:limit], self.labels[:limit]
        while True:
            generator = torch.Generator(images.device).manual_seed(self.seed_of(name))
            self.seed_model(name)
            found = []
            for first in range(0, len(images), self.batch_size):
                if first:
                    self._tell(first, len(images))
                batch = slice(first, first + self.batch_size)
                try:
                    found.append(measure(images[batch], labels[batch], generator).cpu())
                except torch.OutOfMemoryError:
                    if self.batch_size == 1:
                        raise
                    self.batch_size //= 2
                    break
            else:
                return torch.cat(found)

    def _tell(self, done: int, total: int) -> None:
        """Whoever is told may draw random numbers, and must not change what is measured."""
        state = RandomState(self.images.device)
        self.between_batches(done, total)
        state.restore()

    def seed_of(self, name: str) -> int:
        """Another seed for every measure, and always the same one for the same measure."""
        return zlib.crc32(f"{self.seed} {name}".encode())

    def seed_model(self, name: str) -> None:
        """Decides the random numbers of a model that draws some; the caller of :class:`Measurement` restores the state."""
        seed_passes(self.images.device, self.seed_of(name))
