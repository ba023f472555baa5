"""Local transport plans: where the mass of every pixel goes, within a small window around it.

A plan has a row for each pixel with mass of each image of a batch, and a column for each place of the window; its entries are
shares of the image's mass, so that the rows of an image sum to its normalized pixels. Pixels without mass have no row: on MNIST
that is four in five. The cost of a plan is the sum of its entries times the Euclidean distance in pixels, an upper bound on W1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RETURNS = 50  # rounds in which mass flows back from pixels that would exceed 1; all of it has come back long before


@dataclass(frozen=True)
class Window:
    """The pixels with mass of a batch, and where their mass may go.

    Attributes:
        images: in [0, 1], one channel. # shape: (B, 1, H, W)
        row_image: the image of each row. # shape: (R,)
        stock: the share of the image's mass at the row's pixel. # shape: (R,)
        target: the index of the place in the flattened batch; of places outside the image, the pixel itself. # shape: (R, K)
        cost: the distance in pixels, infinite outside the image. # shape: (R, K)
    """

    images: Tensor
    row_image: Tensor
    stock: Tensor
    target: Tensor
    cost: Tensor

    @classmethod
    def around(cls, images: Tensor, size: int) -> Window:
        """The windows of ``size`` by ``size`` pixels around every pixel with mass."""
        height, width = images.shape[-2:]
        image, _, row, column = images.nonzero().unbind(1)
        reach = torch.arange(size, device=images.device) - size // 2
        down, right = (part.flatten() for part in torch.meshgrid(reach, reach, indexing="ij"))
        there, across = row[:, None] + down, column[:, None] + right
        inside = (there >= 0) & (there < height) & (across >= 0) & (across < width)
        own = ((image * height + row) * width + column)[:, None]
        target = torch.where(inside, (image[:, None] * height + there) * width + across, own)
        distance = (down.square() + right.square()).to(images.dtype).sqrt()
        cost = torch.where(inside, distance, math.inf)
        shares = images / images.sum((1, 2, 3), keepdim=True)
        return cls(images, image, shares.flatten()[own[:, 0]], target, cost)

    @property
    def mass(self) -> Tensor:
        """The mass of each image. # shape: (B, 1, 1, 1)"""
        return self.images.sum((1, 2, 3), keepdim=True)

    @property
    def finite_cost(self) -> Tensor:
        """The cost, 0 outside the image, where no plan has any mass. # shape: (R, K)"""
        return torch.where(self.cost.isinf(), 0.0, self.cost)

    def per_image(self, rows: Tensor) -> Tensor:
        """Sums over the rows of each image. # shape: (R,) or (R, K) -> (B,)"""
        values = rows if rows.dim() == 1 else rows.sum(1)
        return values.new_zeros(len(self.images)).index_add_(0, self.row_image, values)

    def at_targets(self, field: Tensor) -> Tensor:
        """The values of a field over the pixels, at the places of the windows. # shape: (B, 1, H, W) -> (R, K)"""
        return field.flatten()[self.target]

    def arriving(self, plan: Tensor) -> Tensor:
        """The shares that a plan brings to each pixel. # shape: (R, K) -> (B, 1, H, W)"""
        found = plan.new_zeros(self.images.numel()).index_add_(0, self.target.flatten(), plan.flatten())
        return found.view_as(self.images)

    def identity(self) -> Tensor:
        """The plan that moves nothing. # shape: (R, K)"""
        return self.stock[:, None] * (self.cost == 0)

    def length(self, plan: Tensor) -> Tensor:
        """The cost of a plan for each image. # shape: (R, K) -> (B,)"""
        return self.per_image(plan * self.finite_cost)

    def within_the_box(self, plan: Tensor) -> Tensor:
        """The plan with so much less movement that no pixel exceeds 1. # shape: (R, K) -> the same

        The papers clip pixels instead, which removes mass: the distance to the original is then no longer bounded. Here, what
        flows into a pixel that would exceed 1 is reduced, and stays where it comes from; that may overfill another pixel, so
        the step is repeated. Costs only fall, and with all movement undone the image is the original, so there is an end.
        """
        moves = self.cost > 0
        limit = 1 / self.mass
        for _ in range(RETURNS):
            filled = self.arriving(plan)
            excess = (filled - limit).clamp_min(0)
            if not bool((excess > 1e-7 * limit).any()):
                break
            inflow = self.arriving(plan * moves)
            kept = (1 - excess / inflow.clamp_min(1e-30)).clamp(0, 1)
            reduced = torch.where(moves, plan * self.at_targets(kept), plan)
            returned = plan.sum(1) - reduced.sum(1)
            plan = reduced + returned[:, None] * (self.cost == 0)
        return plan

    def image_of(self, plan: Tensor) -> Tensor:
        """The images that plans within the box lead to, in [0, 1]. # shape: (R, K) -> (B, 1, H, W)"""
        return (self.arriving(plan) * self.mass).clamp(0, 1)

    def rows_of(self, keep: Tensor) -> tuple[Window, Tensor]:
        """The windows of some images, and which rows are theirs. # shape: (B,) bool -> (R,) bool"""
        rows = keep[self.row_image]
        pixels = self.images[0].numel()
        number = keep.long().cumsum(0) - 1
        moved = (self.row_image - number[self.row_image]) * pixels  # how far the flattened images move up
        kept = Window(
            self.images[keep],
            number[self.row_image][rows],
            self.stock[rows],
            (self.target - moved[:, None])[rows],
            self.cost[rows],
        )
        return kept, rows
