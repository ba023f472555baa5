"""The description of an operator, from which a test gets the library's object, inputs, and the oracle's dense matrix.

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


@dataclass(frozen=True)
class OperatorCase:
    height: int = 4
    width: int = 5
    radius: int = 1
    neighborhood: str = "square"
    weight: str = "constant"  # constant, gaussian, function or tensor
    channels: int = 1
    batch: int = 2
    dark: str = "none"  # none, scattered zeros, or a dark half that disconnects the graph
    scale: str = "unit"
    mass: float = 0.0
    uniform: bool = False
    reference: str = ""  # nothing, ones, or an image with scattered zeros
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
        parts += [f"at {self.reference}"] if self.reference else []
        return "-".join(parts)

    # Inputs of the library -------------------------------------------------------------------------------------------

    def weight_tensor(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """One weight per relation, in the order in which the library lists them."""
        plain = ws.PixelGraph.grid(self.height, self.width, self.radius, neighborhood=self.neighborhood)
        return torch.tensor([oracles.lopsided_weight(dy, dx) for dy, dx, _ in plain.relations], dtype=dtype)

    def graph(self, weight: object = None) -> ws.PixelGraph:
        if weight is None:
            weight = {
                "constant": "constant",
                "gaussian": "gaussian",
                "function": oracles.lopsided_weight,
                "tensor": self.weight_tensor() if self.weight == "tensor" else None,
            }[self.weight]
        return ws.PixelGraph.grid(self.height, self.width, self.radius, neighborhood=self.neighborhood, weight=weight)

    def metric(self, weight: object = None) -> ws.Wasserstein | ws.Euclidean:
        if self.euclidean:
            return ws.Euclidean()
        reference = torch.tensor(self.reference_image()) if self.reference == "image" else self.reference or None
        return ws.Wasserstein(self.graph(weight), self.scale, self.mass, self.uniform, reference)

    def images(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
        rng = np.random.default_rng(self.seed)
        x = rng.uniform(0.05, 1.0, self.shape)
        if self.dark == "scattered":
            x[rng.random(self.shape) < 0.6] = 0.0
            x[..., 0, 0] = 0.5  # no channel is left empty
        elif self.dark == "half":
            # Two lit columns at the outer edges; the dark pixels between them disconnect the graph if the radius is small.
            x[..., :, 1:-1] = 0.0
        return torch.tensor(x, dtype=dtype, device=device)

    def reference_image(self) -> Array:
        """(C, H, W)."""
        if self.reference == "ones":
            return np.ones(self.shape[1:])
        rng = np.random.default_rng((self.seed, 2))
        image = rng.uniform(0.2, 3.0, self.shape[1:])
        image[:, 1, 1] = 0.0
        return image

    def covectors(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 1) -> Tensor:
        rng = np.random.default_rng((self.seed, seed))
        return torch.tensor(rng.standard_normal(self.shape), dtype=dtype, device=device)

    @property
    def constant(self) -> bool:
        """Whether L(x) does not depend on x."""
        return self.euclidean or bool(self.reference)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width

    # Expected results of the oracle ----------------------------------------------------------------------------------

    def weight_function(self) -> oracles.WeightFunction:
        if self.weight == "gaussian":
            return oracles.gaussian_weight(self.radius)
        return oracles.constant_weight if self.weight == "constant" else oracles.lopsided_weight

    def omega(self) -> Array:
        return oracles.adjacency(self.height, self.width, self.radius, self.neighborhood, self.weight_function())

    def cometric_function(self) -> Callable[[Array], Array]:
        """x (N,), real or complex, to the dense (N, N) cometric."""
        if self.euclidean:
            return lambda x: np.eye(self.size)
        window = (self.height, self.width, self.radius, self.neighborhood, self.weight_function())
        options = {"scale": self.scale, "mass": self.mass, "uniform": self.uniform}
        return lambda x: oracles.cometric_matrix(
            self.omega(),
            self.reference_image() if self.reference else x.reshape(self.shape[1:]),
            diffusivity=oracles.diffusivity(*window),
            **options,  # type: ignore[arg-type]
        )

    def matrices(self, images: Tensor) -> Array:
        """(B, N, N)."""
        return np.stack([self.cometric_function()(x) for x in images.detach().cpu().double().flatten(1).numpy()])

    def range_bases(self, images: Tensor) -> list[Array]:
        """For each image an orthonormal basis of the range of L: with mass all vectors, else sum = 0 on every component."""
        if self.euclidean or self.mass > 0:
            return [np.eye(self.size)] * len(images)
        bases = []
        for image in images.detach().cpu().double().numpy():
            lit = np.broadcast_to(image.mean((1, 2), keepdims=True), image.shape) if self.uniform else image
            lit = self.reference_image() if self.reference else lit
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
    OperatorCase(reference="ones", radius=2, channels=2),
    OperatorCase(reference="ones", scale="paper", weight="gaussian", radius=2, mass=0.3),
    OperatorCase(reference="image", neighborhood="disk", channels=3),
    OperatorCase(reference="image", scale="pixels", weight="function", radius=2, mass=0.1),
    OperatorCase(scale="pixels", radius=2, channels=2),
    OperatorCase(scale="pixels", height=1, width=6, radius=2, weight="gaussian"),
    OperatorCase(scale="pixels", height=3, radius=7, weight="tensor", mass=0.2),
    OperatorCase(euclidean=True, channels=3),
]

WASSERSTEIN_CASES = [case for case in CASES if not case.euclidean]


def over(cases: list[OperatorCase], **changes: object) -> pytest.MarkDecorator:
    """Parametrize a test over cases, with readable ids."""
    changed = [replace(case, **changes) for case in cases]  # type: ignore[arg-type]
    return pytest.mark.parametrize("case", changed, ids=str)
