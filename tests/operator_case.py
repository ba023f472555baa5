"""The description of an operator, from which a test gets the library's object, inputs, and the oracle's dense matrix.

Tests of operator methods are written once and parametrized over CASES: every kind of graph, weight, channel count,
size, dark image, scale, mass and control. A new kind of operator needs one new line here and no new test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
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
    motion: str = ""  # nothing, transport or advection: then there is no graph
    smoothness: float = 0.0
    between: str = ""  # nothing, joined, or a matrix: edges between the channels of a pixel
    aware: bool = False  # weights that depend on features, which are the same for all images
    layout: str = "grid"  # or line, volume (of depth 2), edges (a random tree and more), islands (two of these)
    seed: int = 0

    def __str__(self) -> str:
        if self.euclidean:
            return f"euclidean-{self.channels}x{self.height}x{self.width}"
        parts = [f"{self.channels}x{self.height}x{self.width}", f"{self.neighborhood}{self.radius}", self.weight]
        if self.layout != "grid":
            parts[0] = f"{self.layout}-{'x'.join(map(str, self.shape[1:]))}"
        if self.motion:
            parts[1:] = [self.motion, f"smoothness{self.smoothness:g}"]
        parts += [self.dark] if self.dark != "none" else []
        parts += [self.scale] if self.scale != "unit" else []
        parts += [f"mass{self.mass:g}"] if self.mass else []
        parts += ["uniform"] if self.uniform else []
        parts += [f"at {self.reference}"] if self.reference else []
        parts += [f"channels {self.between}"] if self.between else []
        parts += ["edge-aware"] if self.aware else []
        return "-".join(parts)

    # Inputs of the library -------------------------------------------------------------------------------------------

    def weight_tensor(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """One weight per relation, in the order in which the library lists them."""
        if self.layout in ("edges", "islands"):
            return torch.tensor(self.edge_weights(), dtype=dtype)
        if self.layout != "grid":
            relations = replace(self, weight="constant").graph().relations
            return torch.tensor([self.weight_function()(*offset) for *offset, _ in relations], dtype=dtype)
        plain = ws.PixelGraph.grid(self.height, self.width, self.radius, neighborhood=self.neighborhood)
        return torch.tensor([oracles.lopsided_weight(dy, dx) for dy, dx, _ in plain.relations], dtype=dtype)

    def edge_list(self) -> Array:
        """(E, 2): a random tree and some more pairs, in both orders; islands are two such graphs."""
        rng, nodes, pairs = np.random.default_rng((self.seed, 7)), self.shape[2], []
        split = nodes // 2 if self.layout == "islands" else nodes
        for start, stop in ((0, split), (split, nodes)):
            found = {(int(rng.integers(start, i)), i) for i in range(start + 1, stop)}
            found |= {tuple(sorted(rng.choice(np.arange(start, stop), 2, replace=False).tolist())) for _ in range(stop - start)}
            pairs += sorted(found)
        return np.array([pair[:: rng.choice([-1, 1])] for pair in pairs])

    def edge_weights(self) -> Array:
        count = len(self.edge_list())
        return np.ones(count) if self.weight == "constant" else np.random.default_rng((self.seed, 8)).uniform(0.2, 3.0, count)

    def graph(self, weight: object = None) -> ws.PixelGraph:
        if self.layout != "grid":
            return self._other_graph(weight)
        if weight is None:
            weight = {
                "constant": "constant",
                "gaussian": "gaussian",
                "function": oracles.lopsided_weight,
                "tensor": self.weight_tensor() if self.weight == "tensor" else None,
            }[self.weight]
        features = self.constant_features if self.aware else None
        return ws.PixelGraph.grid(self.height, self.width, self.radius, self.neighborhood, weight, features)  # type: ignore[arg-type]

    def constant_features(self, images: Tensor) -> Tensor:
        return images.new_tensor(self.feature_image()).expand(len(images), -1, -1, -1)

    def feature_image(self) -> Array:
        """(2, H, W)."""
        return np.random.default_rng((self.seed, 9)).normal(0.0, 0.8, (2, self.height, self.width))

    def _other_graph(self, weight: object) -> ws.PixelGraph:
        weight = self.weight_tensor() if weight is None and self.weight == "tensor" else weight
        if self.layout in ("edges", "islands"):
            return ws.PixelGraph.from_edges(self.shape[2], torch.tensor(self.edge_list()), weight)  # type: ignore[arg-type]
        given: Any = self.weight if weight is None else weight
        given = self.weight_function() if given == "function" else given
        if self.layout == "line":
            return ws.PixelGraph.line(self.width, self.radius, given)
        return ws.PixelGraph.volume(2, self.height, self.width, self.radius, self.neighborhood, given)  # type: ignore[arg-type]

    def metric(self, weight: object = None) -> ws.Wasserstein | ws.Euclidean | ws.Deformations:
        if self.euclidean:
            return ws.Euclidean()
        if self.motion:
            return ws.Deformations(self.height, self.width, self.smoothness, self.motion, self.mass)  # type: ignore[arg-type]
        reference = torch.tensor(self.reference_image()) if self.reference == "image" else self.reference or None
        channels: Any = torch.tensor(self.channel_matrix()) if self.between == "matrix" else self.between or "separate"
        return ws.Wasserstein(self.graph(weight), self.scale, self.mass, self.uniform, reference, channels)

    def images(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
        rng = np.random.default_rng(self.seed)
        x = rng.uniform(0.05, 1.0, self.shape)
        if self.dark == "scattered":
            x[rng.random(self.shape) < 0.6] = 0.0
            x.reshape(*self.shape[:2], -1)[..., 0] = 0.5  # no channel is left empty
        elif self.dark == "half":
            # Two lit columns at the outer edges; the dark pixels between them disconnect the graph if the radius is small.
            x[..., 1:-1] = 0.0
        return torch.tensor(x, dtype=dtype, device=device)

    def reference_image(self) -> Array:
        """(C, H, W)."""
        if self.reference == "ones":
            return np.ones(self.shape[1:])
        rng = np.random.default_rng((self.seed, 2))
        image = rng.uniform(0.2, 3.0, self.shape[1:])
        image.reshape(self.channels, -1)[:, self.width + 1 if self.layout == "grid" else 1] = 0.0
        return image

    def channel_matrix(self) -> Array:
        """(C, C): weights of the edges between channels; the first and the third have none. The diagonal means nothing."""
        if self.between == "joined":
            return np.ones((self.channels, self.channels))
        return np.array([[9.0, 0.7, 0.0], [0.7, 5.0, 2.0], [0.0, 2.0, 0.0]])[: self.channels, : self.channels]

    def covectors(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 1) -> Tensor:
        rng = np.random.default_rng((self.seed, seed))
        return torch.tensor(rng.standard_normal(self.shape), dtype=dtype, device=device)

    @property
    def constant(self) -> bool:
        """Whether L(x) does not depend on x."""
        return self.euclidean or bool(self.reference)

    @property
    def kills_constants(self) -> bool:
        """Whether L maps the constants of each channel to zero."""
        return self.mass == 0 and not self.euclidean and self.motion != "advection" and not self.between

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {"grid": (self.height, self.width), "line": (self.width,), "volume": (2, self.height, self.width)}
        return (self.batch, self.channels, *sizes.get(self.layout, (self.height * self.width,)))

    @property
    def pixels(self) -> int:
        """Of a channel."""
        return math.prod(self.shape[2:])

    @property
    def size(self) -> int:
        return self.channels * self.pixels

    # Expected results of the oracle ----------------------------------------------------------------------------------

    def weight_function(self) -> Callable[..., float]:
        if self.layout == "line":
            return lambda dx: replace(self, layout="grid").weight_function()(0, dx)
        if self.layout == "volume":
            plane = replace(self, layout="grid").weight_function()
            if self.weight == "gaussian":
                return lambda dz, dy, dx: float(np.exp(-(dz**2 + dy**2 + dx**2) / (2 * (self.radius / 2) ** 2)))
            return lambda dz, dy, dx: plane(dy, dx) + (0.2 * dz if self.weight != "constant" else 0)
        if self.weight == "gaussian":
            return oracles.gaussian_weight(self.radius)
        return oracles.constant_weight if self.weight == "constant" else oracles.lopsided_weight

    def omega(self) -> Array:
        if self.layout in ("edges", "islands"):
            return oracles.edge_adjacency(self.pixels, self.edge_list(), self.edge_weights())
        if self.layout == "volume":
            shape = (2, self.height, self.width)
            return oracles.volume_adjacency(shape, self.radius, self.neighborhood, self.weight_function())
        if self.layout == "line":
            return oracles.adjacency(1, self.width, self.radius, "square", replace(self, layout="grid").weight_function())
        omega = oracles.adjacency(self.height, self.width, self.radius, self.neighborhood, self.weight_function())
        return omega * oracles.similarity(self.feature_image()) if self.aware else omega

    def cometric_function(self) -> Callable[[Array], Array]:
        """x (N,), real or complex, to the dense (N, N) cometric."""
        if self.euclidean:
            return lambda x: np.eye(self.size)
        if self.motion:
            moved = {"smoothness": self.smoothness, "kind": self.motion, "mass": self.mass}
            return lambda x: oracles.motion_matrix(x.reshape(self.shape[1:]), **moved)  # type: ignore[arg-type]
        if self.between:
            return self._joined_cometric
        options = {"scale": self.scale, "mass": self.mass, "uniform": self.uniform, "diffusivity": self.diffusivity()}
        return lambda x: oracles.cometric_matrix(
            self.omega(),
            self.reference_image() if self.reference else x.reshape(self.shape[1:]),
            **options,  # type: ignore[arg-type]
        )

    def _joined_cometric(self, x: Array) -> Array:
        image = self.reference_image() if self.reference else x.reshape(self.shape[1:])
        options = {"scale": self.scale, "mass": self.mass, "uniform": self.uniform, "diffusivity": self.diffusivity()}
        return oracles.joined_cometric_matrix(self.omega(), self.channel_matrix(), image, **options)  # type: ignore[arg-type]

    def diffusivity(self) -> float:
        if self.scale != "pixels":
            return 1.0
        if self.layout == "line":
            return replace(self, layout="grid", height=1).diffusivity()
        assert self.layout == "grid", "the oracle knows the lengths of two dimensions"
        return oracles.diffusivity(self.height, self.width, self.radius, self.neighborhood, self.weight_function())

    def matrices(self, images: Tensor) -> Array:
        """(B, N, N)."""
        return np.stack([self.cometric_function()(x) for x in images.detach().cpu().double().flatten(1).numpy()])

    def range_bases(self, images: Tensor) -> list[Array]:
        """For each image an orthonormal basis of the range of L: with mass all vectors, else sum = 0 on every component."""
        if self.euclidean or self.mass > 0:
            return [np.eye(self.size)] * len(images)
        bases = []
        for image in images.detach().cpu().double().numpy():
            if self.motion:  # K is positive definite, so that the range is that of T
                bases.append(scipy.linalg.orth(oracles.motion(image, self.motion), rcond=1e-10))
                continue
            mean = image.reshape(self.channels, -1).mean(1).reshape(-1, *[1] * (image.ndim - 1))
            lit = np.broadcast_to(mean, image.shape) if self.uniform else image
            lit = self.reference_image() if self.reference else lit
            if self.between:  # all channels are one graph
                omega = oracles.joined_adjacency(self.omega(), self.channel_matrix())
                bases.append(oracles.range_basis(oracles.components(omega, lit.reshape(1, -1))))
                continue
            bases.append(oracles.range_basis(oracles.components(self.omega(), lit)))
        return bases

    def chart(self) -> oracles.Chart:
        """Coordinates for the Riemannian oracles, for images without zeros."""
        if self.euclidean or self.mass > 0:
            return oracles.Chart(self.cometric_function(), np.eye(self.size))
        omega, lit = self.omega(), np.ones(self.shape[1:])
        if self.between:
            omega, lit = oracles.joined_adjacency(omega, self.channel_matrix()), lit.reshape(1, -1)
        labels = oracles.components(omega, lit)
        return oracles.Chart(self.cometric_function(), oracles.range_basis(labels))


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
    OperatorCase(aware=True, radius=2, channels=2),
    OperatorCase(aware=True, radius=3, weight="tensor", scale="paper", mass=0.2, dark="scattered"),
    OperatorCase(aware=True, neighborhood="disk", radius=2, weight="gaussian", dark="half", width=7),
    OperatorCase(aware=True, uniform=True, channels=2, height=3),
    OperatorCase(between="joined", channels=3, radius=2),
    OperatorCase(between="joined", channels=2, weight="tensor", scale="paper", mass=0.2, dark="scattered"),
    OperatorCase(between="matrix", channels=3, weight="gaussian", radius=2, scale="pixels", height=3, dark="scattered"),
    OperatorCase(between="matrix", channels=2, uniform=True, dark="half", width=6),
    OperatorCase(between="joined", channels=3, reference="image", neighborhood="disk", height=3),
    OperatorCase(between="matrix", channels=3, layout="line", width=5, radius=2, weight="function"),
    OperatorCase(between="joined", channels=2, layout="islands", weight="tensor", height=3),
    OperatorCase(layout="line", width=9, radius=2, channels=2),
    OperatorCase(layout="line", width=12, radius=3, weight="gaussian", scale="pixels", mass=0.1),
    OperatorCase(layout="line", width=9, radius=1, dark="half", weight="function"),
    OperatorCase(layout="line", width=7, radius=2, weight="tensor", reference="image"),
    OperatorCase(layout="volume", height=3, width=4, radius=1, channels=2),
    OperatorCase(layout="volume", height=3, width=3, radius=2, neighborhood="disk", weight="gaussian", scale="paper"),
    OperatorCase(layout="volume", height=2, width=5, radius=1, weight="function", mass=0.2, dark="scattered"),
    OperatorCase(layout="volume", height=2, width=3, radius=2, weight="tensor", uniform=True),
    OperatorCase(layout="edges", channels=2),
    OperatorCase(layout="edges", weight="tensor", mass=0.3, dark="scattered"),
    OperatorCase(layout="islands", weight="tensor", channels=2, scale="paper"),
    OperatorCase(layout="islands", reference="ones", dark="scattered"),
    OperatorCase(motion="transport", smoothness=1.0, channels=2, mass=0.3),
    OperatorCase(motion="advection", smoothness=2.0, mass=0.1, dark="scattered"),
    OperatorCase(motion="transport", smoothness=0.5),
    OperatorCase(motion="advection", channels=2),
    OperatorCase(motion="transport", smoothness=0.7, height=1, width=6, channels=2, mass=0.2),
    OperatorCase(motion="advection", smoothness=3.0, height=6, width=1, mass=0.05),
]

WASSERSTEIN_CASES = [case for case in CASES if not case.euclidean and not case.motion]


def over(cases: list[OperatorCase], **changes: object) -> pytest.MarkDecorator:
    """Parametrize a test over cases, with readable ids."""
    changed = [replace(case, **changes) for case in cases]  # type: ignore[arg-type]
    return pytest.mark.parametrize("case", changed, ids=str)
