"""Connected components of an image's graph: where mass can flow.

An edge carries no mass if both its ends are dark, so zero pixels may split an image into several components. Each conserves
its own mass, and the kernel of L(x) is spanned by the indicators of the components; an isolated dark pixel is one, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import edge_ends, lower_to_least


class Components:
    """A partition of the pixels of each image and channel.

    Arguments:
        labels: the component of each pixel, named by the smallest pixel index in it. # shape: (B, C, H, W)
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels.flatten(2)
        self.shape = labels.shape
        self.single = not bool(labels.any())  # one component everywhere, as in most images: sums are then plain

    def sums(self, field: Tensor) -> Tensor:
        """The sum over each pixel's component. # shape: (B, C, H, W) -> the same"""
        if self.single:
            return field.sum((-2, -1), keepdim=True).expand_as(field)
        flat = field.flatten(2)
        totals = torch.zeros_like(flat).scatter_add_(-1, self.labels, flat)
        return totals.gather(-1, self.labels).reshape(self.shape)

    def sizes(self) -> Tensor:
        """The number of pixels of each pixel's component. # shape: (B, C, H, W)"""
        return self.sums(torch.ones(self.shape, dtype=torch.float64, device=self.labels.device))

    def remove_means(self, field: Tensor) -> Tensor:
        """Project onto the range of L(x): the fields that sum to zero on every component. # shape: as field"""
        return field - self.sums(field) / self.sizes().to(field.dtype)

    def kernel_projection(self) -> Tensor:
        """The matrix of the projection onto the kernel of L(x). # shape: (B, C, HW, HW)"""
        together = self.labels[..., :, None] == self.labels[..., None, :]
        return together / self.sizes().flatten(2)[..., None]


@torch.no_grad()
def connected_components(graph: PixelGraph, u: Tensor) -> Components:
    """The components of the graph whose edges have at least one positive end. # shape of u: (B, C, H, W)"""
    lit = u > 0
    if graph.connected and bool(lit.all()):
        return Components(torch.zeros(u.shape, dtype=torch.int64, device=u.device))
    indices = torch.arange(graph.height * graph.width, device=u.device).reshape(graph.height, graph.width)
    labels = indices.expand(u.shape).clone()
    while True:  # in each round every pixel takes the smallest label among its neighbors, then the label of that label
        before = labels
        for relation in graph.edge_relations:
            (lit_i, lit_j), (label_i, label_j) = edge_ends(lit, relation), edge_ends(labels, relation)
            least = torch.where(lit_i | lit_j, torch.minimum(label_i, label_j), indices.numel())
            labels = lower_to_least(labels, least, relation)
        flat = labels.flatten(2)
        labels = torch.minimum(flat, flat.gather(-1, flat)).reshape(u.shape)
        if torch.equal(labels, before):
            return Components(labels)
