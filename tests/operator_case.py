"""One description of an operator, from which a test gets the library's object, inputs, and the oracle's dense matrix.

Tests of operator methods are written once and parametrized over CASES: every kind of graph, weight, channel count,
size, dark image, scale, mass and control. A new kind of operator needs one new line here and no new test.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests import oracles

Array = np.ndarray


def lopsided(dy: int, dx: int) -> float:
    """A weight that tells (1, 2) from (1, -2) and from (2, 1): a flipped or transposed kernel gives another matrix."""
    return 1.0 / (1.0 + dy**2 + 2.0 * abs(dx)) + (0.3 if dy * dx > 0 else 0.1)


@dataclass(frozen=True)
class OperatorCase:
    height: int = 4
    width: int = 5
    radius: int = 1
    neighborhood: str = "square"
    weight: str = "constant"  # constant, gaussian, function or tensor
    channels: int = 1
    batch: int = 2
    dark: str = "none"  # none, scattered zeros, or a dark half that cuts the graph
    scale: str = "unit"
    mass: float = 0.0
    uniform: bool = False
    euclidean: bool = False
    seed: int = 0

    def __str__(self) -> str:
        if self.euclidean:
            return f"euclidean-{self.channels}x{self.height}x{self.width}"
        parts = [f"{self.channels}x{self.height}x{self.width}", f"{self.neighborhood}{self.radius}", self.weight]
        parts += [self.dark] if self.dark != "none" else []
        parts += [self.scale] if self.scale != "unit" else []
        parts += [f"mass{self.mass:g}"] if self.mass else []
        parts += ["uniform"] if self.uniform else []
        return "-".join(parts)

    # What the library is given ---------------------------------------------------------------------------------------

    def weight_tensor(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """One weight per relation, in the order in which the library lists them."""
        plain = ws.PixelGraph.grid(self.height, self.width, self.radius, neighborhood=self.neighborhood)
        return torch.tensor([lopsided(dy, dx) for dy, dx, _ in plain.relations], dtype=dtype)

    def graph(self, weight: object = None) -> ws.PixelGraph:
        if weight is None:
            weight = {
                "constant": "constant",
                "gaussian": "gaussian",
                "function": lopsided,
                "tensor": self.weight_tensor() if self.weight == "tensor" else None,
            }[self.weight]
        return ws.PixelGraph.grid(self.height, self.width, self.radius, neighborhood=self.neighborhood, weight=weight)

    def metric(self, weight: object = None) -> ws.Wasserstein | ws.Euclidean:
        if self.euclidean:
            return ws.Euclidean()
        return ws.Wasserstein(self.graph(weight), scale=self.scale, mass=self.mass, uniform=self.uniform)

    def images(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
        rng = np.random.default_rng(self.seed)
        x = rng.uniform(0.05, 1.0, self.shape)
        if self.dark == "scattered":
            x[rng.random(self.shape) < 0.6] = 0.0
            x[..., 0, 0] = 0.5  # no channel is left empty
        elif self.dark == "half":
            # Two lit columns at the outer edges; the black between them cuts the graph if the radius is small.
            x[..., :, 1:-1] = 0.0
        return torch.tensor(x, dtype=dtype, device=device)

    def covectors(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 1) -> Tensor:
        rng = np.random.default_rng((self.seed, seed))
        return torch.tensor(rng.standard_normal(self.shape), dtype=dtype, device=device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width

    # What the oracle says --------------------------------------------------------------------------------------------

    def weight_function(self) -> oracles.WeightFunction:
        if self.weight == "gaussian":
            return oracles.gaussian_weight(self.radius)
        return oracles.constant_weight if self.weight == "constant" else lopsided

    def omega(self) -> Array:
        return oracles.adjacency(self.height, self.width, self.radius, self.neighborhood, self.weight_function())

    def cometric_function(self) -> Callable[[Array], Array]:
        """x (N,), real or complex, to the dense (N, N) cometric."""
        if self.euclidean:
            return lambda x: np.eye(self.size)
        return lambda x: oracles.cometric_matrix(
            self.omega(), x.reshape(self.shape[1:]), scale=self.scale, mass=self.mass, uniform=self.uniform
        )

    def matrices(self, images: Tensor) -> Array:
        """(B, N, N)."""
        return np.stack([self.cometric_function()(x) for x in images.detach().cpu().double().flatten(1).numpy()])

    def range_bases(self, images: Tensor) -> list[Array]:
        """Per image an orthonormal basis of the range of L: everything with mass, else sum = 0 on every component."""
        if self.euclidean or self.mass > 0:
            return [np.eye(self.size)] * len(images)
        bases = []
        for image in images.detach().cpu().double().numpy():
            lit = np.broadcast_to(image.mean((1, 2), keepdims=True), image.shape) if self.uniform else image
            bases.append(oracles.range_basis(oracles.components(self.omega(), lit)))
        return bases

    def chart(self) -> oracles.Chart:
        """Coordinates for the Riemannian oracles, for images without zeros."""
        if self.euclidean or self.mass > 0:
            return oracles.Chart(self.cometric_function(), np.eye(self.size))
        channel = np.repeat(np.arange(self.channels), self.height * self.width)
        return oracles.Chart(self.cometric_function(), oracles.range_basis(channel))


PLAIN = OperatorCase()

CASES = [
    PLAIN,
    OperatorCase(radius=2, channels=3),
    OperatorCase(height=7, width=4, radius=3, batch=1),
    OperatorCase(height=1, width=6, radius=1),
    OperatorCase(height=6, width=1, radius=2),
    OperatorCase(height=3, width=4, radius=7),  # a radius beyond the image: the complete graph
    OperatorCase(height=2, width=9, radius=4, channels=2),  # beyond the image in one direction only
    OperatorCase(neighborhood="disk", radius=1),
    OperatorCase(neighborhood="disk", radius=3, height=6),
    OperatorCase(neighborhood="disk", radius=9, channels=2),
    OperatorCase(weight="gaussian", radius=2),
    OperatorCase(weight="gaussian", neighborhood="disk", radius=3, channels=3),
    OperatorCase(weight="gaussian", radius=6, height=3),
    OperatorCase(weight="function", radius=2),
    OperatorCase(weight="function", neighborhood="disk", radius=3, width=7, channels=2),
    OperatorCase(weight="function", radius=5, height=3),
    OperatorCase(weight="tensor", radius=2),
    OperatorCase(weight="tensor", neighborhood="disk", radius=2, channels=2, scale="paper"),
    OperatorCase(dark="scattered", channels=2),
    OperatorCase(dark="scattered", radius=2, weight="gaussian"),
    OperatorCase(dark="half", neighborhood="disk", width=7, channels=2),
    OperatorCase(dark="half", width=7, radius=2, weight="function", mass=0.3),
    OperatorCase(scale="paper", radius=2, channels=3),
    OperatorCase(scale="paper", neighborhood="disk", radius=2, mass=2.0),
    OperatorCase(mass=0.25, radius=2, channels=2),
    OperatorCase(uniform=True, radius=2, channels=2),
    OperatorCase(uniform=True, dark="scattered", weight="gaussian", radius=2, mass=0.1),
    OperatorCase(uniform=True, scale="paper", neighborhood="disk", radius=2, weight="tensor"),
    OperatorCase(euclidean=True, channels=3),
]

WASSERSTEIN_CASES = [case for case in CASES if not case.euclidean]


def over(cases: list[OperatorCase], **changes: object) -> pytest.MarkDecorator:
    """Parametrize a test over cases, readable ids included."""
    changed = [replace(case, **changes) for case in cases]  # type: ignore[arg-type]
    return pytest.mark.parametrize("case", changed, ids=str)
