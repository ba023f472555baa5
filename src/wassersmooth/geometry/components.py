"""Connected components of an image's graph: where mass can flow.

An edge carries nothing when both its ends are dark, so zero pixels may cut an image into parts. Each part conserves its own
mass, and the kernel of L(x) is spanned by the indicators of the parts (a lone dark pixel is a part of its own).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import edge_ends


class Parts:
    """A partition of the pixels, for each image and channel.

    Arguments:
        labels: the number of each pixel's part: the smallest pixel number in it. # shape: (B, C, H, W)
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels.flatten(2)
        self.shape = labels.shape
        self.undivided = not bool(labels.any())  # one part everywhere, as in most images: sums are then plain

    @property
    def whole(self) -> Tensor:
        """Whether an image hangs together in every channel. # shape: (B,)"""
        return (self.labels == 0).flatten(1).all(1)

    def sums(self, field: Tensor) -> Tensor:
        """Each part's sum, at each of its pixels. # shape: (B, C, H, W) -> the same"""
        if self.undivided:
            return field.sum((-2, -1), keepdim=True).expand_as(field)
        flat = field.flatten(2)
        totals = torch.zeros_like(flat).scatter_add_(-1, self.labels, flat)
        return totals.gather(-1, self.labels).reshape(self.shape)

    def sizes(self) -> Tensor:
        """How many pixels each pixel's part has. # shape: (B, C, H, W)"""
        return self.sums(torch.ones(self.shape, dtype=torch.float64, device=self.labels.device))

    def remove_means(self, field: Tensor) -> Tensor:
        """Projects on the fields that conserve the mass of every part: the range of L(x). # shape: as field"""
        return field - self.sums(field) / self.sizes().to(field.dtype)

    def kernel_projection(self) -> Tensor:
        """The matrix of the projection on the kernel of L(x). # shape: (B, C, HW, HW)"""
        together = self.labels[..., :, None] == self.labels[..., None, :]
        return together / self.sizes().flatten(2)[..., None]


@torch.no_grad()
def connected(graph: PixelGraph, u: Tensor) -> Parts:
    """The components of the graph whose edges have at least one lit end. # shape of u: (B, C, H, W)"""
    lit = u > 0
    if bool(lit.all()):
        return Parts(torch.zeros(u.shape, dtype=torch.int64, device=u.device))
    numbers = torch.arange(graph.height * graph.width, device=u.device).reshape(graph.height, graph.width)
    labels = numbers.expand(u.shape).clone()
    while True:  # each round every pixel takes the smallest label it touches, then the label of that label
        before = labels.clone()
        for offset in graph.offsets:
            lit_i, lit_j = edge_ends(lit, offset)
            label_i, label_j = edge_ends(labels, offset)
            smallest = torch.where(lit_i | lit_j, torch.minimum(label_i, label_j), numbers.numel())
            label_i.copy_(torch.minimum(label_i, smallest))
            label_j.copy_(torch.minimum(label_j, smallest))
        flat = labels.flatten(2)
        labels = torch.minimum(flat, flat.gather(-1, flat)).reshape(u.shape)
        if torch.equal(labels, before):
            return Parts(labels)
