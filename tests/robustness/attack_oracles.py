"""The parts of AutoAttack as its papers state them, one image at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def apgd(loss: Callable[[Tensor], Tensor], image: Tensor, start: Tensor, epsilon: float, norm: str, iterations: int) -> Tensor:
    """The best point of APGD (Croce and Hein, 2020, algorithm 1) on one image, line by line. # shape: (1, C, H, W)"""

    def projected(x: Tensor) -> Tensor:
        change = x - image
        if norm == "linf":
            change = change.clamp(-epsilon, epsilon)
        elif float(change.norm()) > epsilon:
            change = change * epsilon / change.norm()
        return (image + change).clamp(0, 1)

    def value_and_direction(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_()
        value = loss(x).sum()
        (g,) = torch.autograd.grad(value, x)
        return float(value), g.sign() if norm == "linf" else g / g.norm()

    # The published code truncates the lengths of the periods to whole iterations.
    lengths = [max(int(0.22 * iterations), 1)]
    while sum(lengths) < iterations:
        lengths.append(max(lengths[-1] - max(int(0.03 * iterations), 1), max(int(0.06 * iterations), 1)))
    checkpoints = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    step, previous, x = 2 * epsilon, start, start
    value, direction = value_and_direction(x)
    best, best_value, best_direction = x, value, direction
    values, best_at_check, halved, last = [value], value, True, 0
    for k in range(iterations):
        z = projected(x + step * direction)
        following = z if k == 0 else projected(x + 0.75 * (z - x) + 0.25 * (x - previous))
        previous, x = x, following
        value, direction = value_and_direction(x)
        values.append(value)
        if value > best_value:
            best, best_value, best_direction = x, value, direction
        if k + 1 in checkpoints:
            rises = sum(values[i + 1] > values[i] for i in range(last, k + 1))
            reduce = rises <= 0.75 * (k + 1 - last) or (not halved and best_value <= best_at_check)
            if reduce:
                step, x, direction = step / 2, best, best_direction
            halved, best_at_check, last = reduce, best_value, k + 1
    return best.detach()


def project_onto_plane(x: Tensor, w: Tensor, value: Tensor, norm: str) -> Tensor:
    """The shortest change d of x in the box with w . d = -value, by bisection over the multiplier. # shape: (n,)"""
    sign = 1.0 if value > 0 else -1.0
    room = torch.where(sign * w > 0, x, 1 - x)
    rate = (w != 0).to(x) if norm == "linf" else w.abs()

    def change(t: float) -> Tensor:
        return -sign * w.sign() * torch.minimum(t * rate, room)

    low, high = 0.0, 1.0
    while float((w * change(high)).sum().abs()) < float(value.abs()) and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((w * change(middle)).sum().abs()) < float(value.abs()) else (low, middle)
    return change(high)


def square_bump(side: int) -> Tensor:
    """The update of the L2 Square attack (Andriushchenko et al., 2020, section 3.3), square by square. # shape: (s, s)"""

    def cone(height: int, width: int) -> Tensor:
        found = torch.zeros(height, width, dtype=torch.float64)
        for k in range(max(height, width) // 2 + 1):
            for i in range(height):
                for j in range(width):
                    if abs(i - height // 2) <= k and abs(j - width // 2) <= k:
                        found[i, j] += 1 / (k + 1) ** 2
        return found / found.norm() if height else found

    both = torch.cat((cone(side // 2, side), -cone(side - side // 2, side)))
    return both / both.norm()
