"""A smooth function on images whose gradient and Hessian are known in closed form, once in NumPy and once in torch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


@dataclass(frozen=True)
class ScalarField:
    """f(x) = sin(a.x) + x'Qx / 2 + (b.x)^3: neither even nor quadratic, and without the symmetries of the pixel grid."""

    a: Array
    b: Array
    Q: Array

    @classmethod
    def random(cls, size: int, seed: int = 0) -> "ScalarField":
        rng = np.random.default_rng(seed)
        root = rng.standard_normal((size, size)) / np.sqrt(size)
        return cls(rng.standard_normal(size), rng.standard_normal(size) / 2, root + root.T)

    def __call__(self, images: Tensor) -> Tensor:  # shape: (B, C, H, W) -> (B,)
        x = images.flatten(1)
        a, b, Q = (torch.as_tensor(array, dtype=x.dtype, device=x.device) for array in (self.a, self.b, self.Q))
        return torch.sin(x @ a) + ((x @ Q) * x).sum(1) / 2 + (x @ b) ** 3

    # Complex x is allowed below: the oracles differentiate by the complex step.

    def value(self, x: Array) -> Array:
        return np.sin(self.a @ x) + x @ self.Q @ x / 2 + (self.b @ x) ** 3

    def gradient(self, x: Array) -> Array:
        return self.a * np.cos(self.a @ x) + self.Q @ x + 3 * self.b * (self.b @ x) ** 2

    def hessian(self, x: Array) -> Array:
        return -np.outer(self.a, self.a) * np.sin(self.a @ x) + self.Q + 6 * np.outer(self.b, self.b) * (self.b @ x)
