"""The graph of a batch of images whose weights depend on features of each image: mass flows less across an edge in the picture.

The weight between two pixels is that of their offset times ``exp(-|f_i - f_j|^2 / 2)``. Features are constants: no derivative
sees that they may come from the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import edge_aware_ops
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import Relation, edge_ends, relation_sum

LARGEST_EXPONENT = 30.0  # no weight is smaller than exp(-30) of the table's, so that no pixel loses its neighbors


@dataclass(frozen=True, eq=False, repr=False)
class EdgeAwareGraph(PixelGraph):
    """A graph with a weight for every edge of every image, the same in all channels.

    Attributes:
        base: the graph whose weights are multiplied.
        values: the features. # shape: (B, F, height, width)
    """

    base: PixelGraph = None  # type: ignore[assignment]  # what follows a default must have one
    values: Tensor = None  # type: ignore[assignment]
    _found_degrees: dict[tuple[torch.dtype, bool], Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, base: PixelGraph, x: Tensor) -> EdgeAwareGraph:
        """The graph of a batch of images. # shape: (B, C, *shape)"""
        assert base.features is not None
        try:
            with torch.no_grad():
                found: object = base.features(x.detach())
        except RuntimeError as error:  # torch's message about shapes or dtypes does not say which function is meant
            raise ValueError(
                f"features must take images of shape {tuple(x.shape)} and {x.dtype}; its call failed "
                f"({_checks.first_line(error)}); give a function that does"
            ) from error
        if (
            not isinstance(found, Tensor)
            or not found.is_floating_point()
            or found.shape[:1] + found.shape[2:] != x.shape[:1] + x.shape[2:]
        ):
            kind = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else _checks.kind_of(found)
            raise ValueError(
                f"features must return floats of shape ({len(x)}, F, {', '.join(map(str, x.shape[2:]))}) for these images; got "
                f"{kind}; return as many features as you like for every pixel"
            )
        _checks.finite("features", found)
        values = base.to_field(found.detach()).to(device=x.device).contiguous()
        return cls(base.shape, base.radius, base.neighborhood, base.weights, base.weight_name, None, None, base, values)

    has_table = False  # not one for all pixels
    is_box = False

    def degrees(self, like: Tensor) -> Tensor:
        """s of each image. # shape: (B, 1, height, width)"""
        key = like.dtype, self.learned  # what was found under no_grad has no derivative in the weights
        if key not in self._found_degrees:
            self._found_degrees[key] = self.neighbor_sum(torch.ones_like(self.values[:, :1], dtype=like.dtype))
        return self._found_degrees[key]

    def neighbor_sum(self, values: Tensor) -> Tensor:
        if edge_aware_ops.supports(self, values):
            summed: Tensor = edge_aware_ops.neighbor_sum(values, *edge_aware_ops.arguments(self, values))
            return summed
        return relation_sum(self.weighted_relations(values), values)

    def weighted_relations(self, like: Tensor) -> Iterator[tuple[Relation, Tensor]]:
        """Each relation with the weights of its edges, (B, 1, rows, columns), one after the other, to save memory."""
        features = self.values.to(like.dtype)
        for relation, weight in self.base.weighted_relations(like):
            f_i, f_j = edge_ends(features, relation)
            exponent = (f_i - f_j).square().sum(1, keepdim=True) / 2
            yield relation, weight * torch.exp(-exponent.clamp(max=LARGEST_EXPONENT))

    def weight_unit(self, like: Tensor) -> Tensor:
        return self.base.weight_unit(like)

    def weight_table(self, like: Tensor) -> Tensor:
        return self.base.weight_table(like)

    def scaled_features(self) -> Tensor:
        """Features whose squared distance is the exponent to base 2, in float32."""
        return self.values.float() * math.sqrt(math.log2(math.e) / 2)
