"""Measurements of one model on one set of images, in batches that fit, each with its own seed derived from one seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wassersmooth.model_state import RandomState, seed_rng
from wassersmooth.robustness.model_queries import scores

# (model, images, labels, generator) -> images: an attack, a deformation, or the identity
Perturbation = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]
# (images, labels, generator) -> one value per image, or several
PerImage = Callable[[Tensor, Tensor, torch.Generator], Tensor]
SeveralPerImage = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, ...]]

BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # elements of a batch of images, unless it does not fit
LARGEST_BATCH = {"cpu": 128, "cuda": 2048}


class Measurement:
    """A model and the images to measure it on, in a random order that the seed determines.

    Subsets are the first images of that order, so measures on fewer images are paired with measures on more.

    Arguments:
        model: in the state and mode to measure it in; the caller restores both.
        images, labels: already checked.
        seed: determines the order and, with the name of a measure, that measure's random numbers.
        device: where batches are measured; the images may stay elsewhere.

    Attributes:
        order: the place of each image among those that were given. # shape: (B,), on the CPU
        between_batches: called as ``between_batches(images done, images in all)`` before every batch but the first.
    """

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, seed: int, device: torch.device | None = None) -> None:
        self.model, self.seed = model, seed
        self.between_batches: Callable[[int, int], None] = lambda done, total: None
        shuffled = torch.Generator("cpu").manual_seed(seed)
        self.order = torch.randperm(len(images), device="cpu", generator=shuffled)
        order = self.order.to(images.device)
        self.images, self.labels = images.detach()[order], labels.detach()[order]
        self.device = images.device if device is None else device
        kind = self.device.type if self.device.type in BATCH_ELEMENTS else "cuda"
        self.batch_size = max(1, min(LARGEST_BATCH[kind], BATCH_ELEMENTS[kind] // images[0].numel()))

    def misclassified(self, name: str, perturb: Perturbation, limit: int | None = None) -> Tensor:
        """Which of the first ``limit`` images are misclassified once perturbed. # shape: (limit,) bool, on the CPU"""
        return self.collect(name, lambda *batch: self._answers(name, perturb, *batch)[0], limit)

    def perturbed(self, name: str, perturb: Perturbation, which: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        """:meth:`misclassified` for some images, and the perturbed images if they are to be kept, on the CPU.

        # shape of which: (B,) bool; results: (n,) bool, (n, C, H, W)
        """

        def one_batch(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
            wrong, perturbed = self._answers(name, perturb, images, labels, generator)
            return (wrong, perturbed) if keep else (wrong,)

        chosen = which.to(self.images.device)
        wrong, *kept = self._collect(name, one_batch, self.images[chosen], self.labels[chosen])
        return wrong, kept[0] if kept else None

    def collect(self, name: str, measure: PerImage, limit: int | None = None) -> Tensor:
        """A value for each of the first ``limit`` images, measured in batches. # shape: (limit, ...), on the CPU

        If a batch does not fit into the device's memory, the measure restarts with half of it and the same seed.
        """
        return self._collect(name, lambda *batch: (measure(*batch),), self.images[:limit], self.labels[:limit])[0]

    def _answers(
        self, name: str, perturb: Perturbation, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        perturbed = perturb(self.model, images, labels, generator)
        self.seed_model(f"{name}, answer")  # a random model must not repeat the draw that the attack has seen
        with torch.no_grad():
            return scores(self.model, perturbed, labels).argmax(1) != labels, perturbed

    def _collect(self, name: str, measure: SeveralPerImage, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        while True:
            generator = torch.Generator(self.device).manual_seed(self.seed_of(name))
            self.seed_model(name)
            found: list[tuple[Tensor, ...]] = []
            for first in range(0, len(images), self.batch_size):
                if first:
                    self._notify(first, len(images))
                batch = slice(first, first + self.batch_size)
                try:
                    values = measure(images[batch].to(self.device), labels[batch].to(self.device), generator)
                    found.append(tuple(value.cpu() for value in values))
                except torch.OutOfMemoryError:
                    if self.batch_size == 1:
                        raise
                    self.batch_size //= 2
                    break
            else:
                return tuple(map(torch.cat, zip(*found, strict=True)))

    def _notify(self, done: int, total: int) -> None:
        """Call ``between_batches``; it may draw random numbers, which must not change what is measured."""
        state = RandomState(self.device)
        self.between_batches(done, total)
        state.restore()

    def seed_of(self, name: str) -> int:
        """The seed of a measure, by its name."""
        return zlib.crc32(f"{self.seed} {name}".encode())

    def seed_model(self, name: str) -> None:
        """Seed a model that draws random numbers; the caller of :class:`Measurement` restores the state."""
        seed_rng(self.device, self.seed_of(name))
