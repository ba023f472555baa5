"""Exact Wasserstein-2 distances between images, and interpolation at a fixed distance (the paper's figure 1).

The distance is the solution of a linear program (docs/maths.md, section 7), computed by the package POT (extra ``ot``). A
pixel is the unit of length, and each channel is scaled to unit mass; the squared distances of the channels are averaged, so
that moving an image by three pixels costs 3. The work grows fast with the number of pixels: meant for images up to about 32x32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wassersmooth import _checks

Array = npt.NDArray[np.float64]
Distance = Literal["w2", "l2"]

METRICS: tuple[Distance, ...] = get_args(Distance)


def w2(x: Tensor, y: Tensor) -> Tensor:
    """The Wasserstein-2 distance of each pair of images, in pixels. # shape: (B, C, H, W), twice -> (B,)"""
    _check_pair(x, y)
    distances = [_distance(_unit_mass(a), _unit_mass(b)) for a, b in zip(x, y, strict=True)]
    return torch.tensor(distances, dtype=x.dtype, device=x.device)


@torch.no_grad()
def interpolate(x: Tensor, y: Tensor, distance: float, metric: Distance = "w2") -> Tensor:
    """The image at a given distance from x on the path to y. Not differentiable. # shape: (B, C, H, W)

    With ``metric="l2"`` the path is the straight line. With ``"w2"`` mass moves along the optimal plan, and is shared among
    the four pixels around the point it has reached; each channel keeps the mass it has in x. Bisection on the
    exact distance finds how far to go. A distance beyond y is refused.
    """
    _checks.choice("metric", metric, METRICS)
    distance = _checks.non_negative_number("distance", distance, most=torch.finfo(torch.float64).max)
    _check_pair(x, y) if metric == "w2" else _check_finite(x, y)
    move = _move_mass if metric == "w2" else _move_straight
    return torch.stack([move(a, b, distance) for a, b in zip(x, y, strict=True)])


def _move_straight(x: Tensor, y: Tensor, distance: float) -> Tensor:
    way = y.double() - x.double()
    largest = float(way.abs().max()) or 1.0
    length = largest * float((way / largest).norm())  # the squares of large values overflow, already at 1e19 in float32
    _refuse_beyond(distance, length)
    return x if length == 0 else (x.double() + (distance / length) * way).to(x.dtype)


def _move_mass(x: Tensor, y: Tensor, distance: float) -> Tensor:
    source, target = _unit_mass(x), _unit_mass(y)
    length = _distance(source, target)
    _refuse_beyond(distance, length)
    plans = [_plan(a, b) for a, b in zip(source, target, strict=True)]

    def at(fraction: float) -> Array:
        return np.stack([_splat(plan, source.shape[1:], fraction) for plan in plans])

    fraction = _bisect(lambda t: _distance(source, at(t)) - distance)
    moved = torch.as_tensor(at(fraction), dtype=x.dtype, device=x.device)
    return moved * x.sum((-2, -1), keepdim=True)


def _bisect(excess: Callable[[float], float], tolerance: float = 1e-6) -> float:
    """The fraction of the path, in [0, 1], at which the excess distance is zero."""
    low, high = 0.0, 1.0
    if excess(high) <= 0:
        return high
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return low


def _distance(source: Array, target: Array) -> float:
    """The root of the mean over channels of the optimal cost. # shape: (C, H, W), twice, each channel of unit mass"""
    costs = [
        _import_pot().emd2(a[a > 0], b[b > 0], _squared_lengths(_support(a), _support(b)), numItermax=1_000_000)
        for a, b in zip(source, target, strict=True)
    ]
    return float(np.sqrt(max(np.mean(costs), 0.0)))


def _plan(source: Array, target: Array) -> tuple[Array, Array, Array]:
    """The optimal plan as lists of start, end and mass of each route. # shape: (M, 2), (M, 2), (M,)"""
    starts, ends = _support(source), _support(target)
    plan = _import_pot().emd(source[source > 0], target[target > 0], _squared_lengths(starts, ends), numItermax=1_000_000)
    i, j = np.nonzero(plan)
    return starts[i], ends[j], plan[i, j]


def _splat(plan: tuple[Array, Array, Array], shape: tuple[int, ...], fraction: float) -> Array:
    """The masses of a plan after a fraction of their path, shared among the four nearest pixels. # shape: (H, W)"""
    starts, ends, mass = plan
    points = (1 - fraction) * starts + fraction * ends
    corner = np.minimum(np.floor(points).astype(int), np.maximum(np.array(shape) - 2, 0))
    y, x = (points - corner).T
    image = np.zeros(shape)
    for dy, dx, share in ((0, 0, (1 - y) * (1 - x)), (0, 1, (1 - y) * x), (1, 0, y * (1 - x)), (1, 1, y * x)):
        row, column = np.minimum(corner + np.array((dy, dx)), np.array(shape) - 1).T
        np.add.at(image, (row, column), share * mass)
    normalized: Array = image / image.sum()
    return normalized


def _squared_lengths(starts: Array, ends: Array) -> Array:
    squared: Array = ((starts[:, None, :] - ends[None, :, :]) ** 2).sum(-1)
    return squared


def _support(channel: Array) -> Array:
    """The rows and columns of the pixels that have mass. # shape: (M, 2)"""
    return np.argwhere(channel > 0).astype(np.float64)


def _unit_mass(image: Tensor) -> Array:
    """The image as a float64 array, each channel scaled to unit mass. # shape: (C, H, W)"""
    masses = image.detach().double().contiguous()  # a sum must not depend on the order in memory, nor a tie among plans on it
    unit = masses / masses.sum((-2, -1), keepdim=True)
    array: Array = unit.cpu().numpy()
    return array


def _check_finite(x: Tensor, y: Tensor) -> None:
    _checks.batch("x", x)
    _checks.like("y", y, x)
    for name, images in (("x", x), ("y", y)):
        _checks.finite(name, images)


def _check_pair(x: Tensor, y: Tensor) -> None:
    _check_finite(x, y)
    for name, images in (("x", x), ("y", y)):
        _checks.masses(name, images)
        if bool((images.sum((-2, -1)) == 0).any()):
            raise ValueError(f"{name} must have some mass in every channel; got an empty channel; leave such images out")


def _refuse_beyond(distance: float, length: float) -> None:
    if distance > length * (1 + 1e-6):
        raise ValueError(f"distance must be at most the distance of the two images, {length:.4g}; got {distance:.4g}")


def _import_pot() -> Any:
    try:
        import ot
    except ImportError as missing:
        raise _checks.extra("POT", "ot", "wassersmooth.transport") from missing
    return ot
