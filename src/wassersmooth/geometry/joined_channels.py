"""The graph of an image whose channels exchange mass: a copy of the pixel graph for each, and edges between the channels.

All values of an image are the nodes of one graph, given as a list of edges, so that whatever works on such a list works here:
components, densities, noise, limited flows. The maps of L(x) need no list (:mod:`wassersmooth.geometry.laplacian_maps`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import EdgeList, edge_ends


@dataclass(frozen=True, eq=False, repr=False)
class JoinedChannels(PixelGraph):
    """Fields on its nodes are (B, 1, 1, C N).

    Attributes:
        base: the pixel graph of each channel.
        pairs: two channels and the weight of the edges between them, at every pixel.
        channels: their number.
    """

    base: PixelGraph = None  # type: ignore[assignment]  # what follows a default must have one
    pairs: tuple[tuple[int, int, float], ...] = ()
    channels: int = 1

    @classmethod
    def of(cls, base: PixelGraph, matrix: Tensor) -> JoinedChannels:
        """Join the channels of a graph.

        Arguments:
            matrix: the weights of the edges between two channels of a pixel; its diagonal is ignored. # shape: (C, C)
        """
        channels, nodes = len(matrix), base.nodes
        pairs = tuple((c, d, float(matrix[c, d])) for c in range(channels) for d in range(c) if matrix[c, d] > 0)
        with torch.inference_mode(False), torch.no_grad():
            within, relation_of_edge = _edges(base)
            every = torch.arange(nodes, device="cpu")
            edges = [within + c * nodes for c in range(channels)]
            edges += [torch.stack((every + c * nodes, every + d * nodes), 1) for c, d, _ in pairs]
            numbers = relation_of_edge.to(base.weights.device)
        weights = base.weights[numbers].double().repeat(channels)
        between = [torch.full((nodes,), weight, dtype=torch.float64, device=weights.device) for *_, weight in pairs]
        everything = torch.cat((weights, *between))
        return cls((channels * nodes,), 0, "square", everything, "tensor", torch.cat(edges), None, base, pairs, channels)

    def _is_connected(self) -> bool:
        reached = {0}
        for _ in range(self.channels):
            reached |= {end for c, d, _ in self.pairs for end in (c, d) if reached & {c, d}}
        return self.base.connected and len(reached) == self.channels

    def to_field(self, images: Tensor) -> Tensor:
        return images.reshape(len(images), 1, 1, self.nodes)

    def to_images(self, fields: Tensor) -> Tensor:
        return fields.reshape(len(fields), self.channels, *self.base.shape)

    def split(self, field: Tensor) -> Tensor:
        """A field of all channels as fields on the base graph. # shape: (B, 1, 1, C N) -> (B, C, height, width)"""
        return field.reshape(len(field), self.channels, self.base.height, self.base.width)

    def unit_ratio(self, like: Tensor) -> Tensor:
        """The unit of the base graph's weights, in units of this graph's. # shape: ()"""
        return self.base.weight_unit(like) / self.weight_unit(like)

    def between(self, like: Tensor) -> list[tuple[int, int, Tensor]]:
        """Two channels each and the weight of their edges, in units of the weights."""
        unit = self.weight_unit(like)
        return [(c, d, weight / unit) for c, d, weight in self.pairs]

    def __repr__(self) -> str:
        return f"JoinedChannels({self.base!r}, {self.channels} channels)"


def _edges(base: PixelGraph) -> tuple[Tensor, Tensor]:
    """The nodes of each edge, and the number of its weight. # shape: (E, 2), (E,)"""
    relation = base.edge_relations[0]
    if isinstance(relation, EdgeList):
        number = base.relation_of_edge
        return relation.pairs, torch.arange(len(relation.pairs), device="cpu") if number is None else number
    index = torch.arange(base.nodes, device="cpu").reshape(base.height, base.width)
    ends = [torch.stack([end.flatten() for end in edge_ends(index, relation)], 1) for relation in base.edge_relations]
    return torch.cat(ends), torch.cat([torch.full((len(pairs),), k, device="cpu") for k, pairs in enumerate(ends)])
