"""Metrics: each assigns a cometric to every image.

The theorem holds for any metric, and so does the code: Euclidean and Wasserstein differ in one object. A metric needs
:meth:`Metric.evaluate` alone. The derivatives of its cometric in the image, which are all that calculus needs, are derived
from it by automatic differentiation unless a subclass has a formula.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wassersmooth import _checks, visibility
from wassersmooth.geometry import laplacian_maps
from wassersmooth.geometry.cometric import LARGEST_DENSE, Cometric, Identity, WeightedLaplacian
from wassersmooth.geometry.device_cache import DeviceCache
from wassersmooth.geometry.edge_aware import EdgeAwareGraph
from wassersmooth.geometry.graph import NAMED_WEIGHTS, PixelGraph
from wassersmooth.geometry.joined_channels import JoinedChannels

Scale = Literal["unit", "paper", "pixels"]
Reference = Literal["ones"]
Channels = Literal["separate", "joined"]

SCALES: tuple[Scale, ...] = get_args(Scale)
CHANNELS: tuple[Channels, ...] = get_args(Channels)


class Metric(ABC):
    """A Riemannian metric on images, given by its inverse L(x). # shape of x: (B, C, H, W)"""

    @property
    def constant(self) -> bool:
        """Whether L(x) is the same at every x, so that all its derivatives in x are zero."""
        return False

    def cometric(self, x: Tensor) -> Cometric:
        """L(x) at a batch of images, which are checked first."""
        self.check(x)
        return self.evaluate(_checks.without_inference_mode(x))

    def w1_constant(self) -> float:
        """kappa: for every perturbation d that moves mass, ``sqrt(d' L^+ d) <= kappa W1(x, x + d)``; no smaller kappa will do.

        W1 is exact transport in mass times pixels, summed over the channels, with the Manhattan or the Euclidean distance:
        kappa is the same for both (docs/maths.md, section 9). For constant metrics.
        """
        raise ValueError(
            f"the constant between a metric and W1 is for constant metrics; got {self!r}; use Euclidean(), or "
            'Wasserstein(..., reference="ones")'
        )

    def check(self, x: Tensor) -> None:
        """Raise ValueError if the metric is not defined at x."""
        _checks.batch("images", x, dims=(4, 3, 5))
        _checks.finite("images", x)

    def check_images(self, x: Tensor) -> None:
        """:meth:`check` for the images of an objective: it also warns of, or refuses, a scale that eta is not meant for."""
        self.check(x)

    @abstractmethod
    def evaluate(self, x: Tensor) -> Cometric:
        """L(x) without checking x."""

    def derivative_mv(self, x: Tensor, a: Tensor, v: Tensor) -> Tensor:
        """The derivative of L at x along a, applied to v. # shape: as v"""
        if self.constant:
            return torch.zeros_like(v)
        w, again = torch.zeros_like(v).requires_grad_(), torch.is_grad_enabled()
        with torch.enable_grad():
            point = _differentiable(x)
            linear_in_w = _gradient(laplacian_maps.inner(w, self.evaluate(point).mv(v)).sum(), point, create_graph=True)
            return _gradient(linear_in_w, w, again, a)

    def derivative_quad(self, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """The covector ``p' (dL/dx_k) q`` at x, the adjoint of :meth:`derivative_mv` in a. # shape: as p"""
        if self.constant:
            return torch.zeros_like(p)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            point = _differentiable(x)
            return _gradient(laplacian_maps.inner(p, self.evaluate(point).mv(q)).sum(), point, again)

    def divergence(self, x: Tensor) -> Tensor:
        """``sum_j dL_jk/dx_j``. # shape: as x"""
        total = torch.zeros_like(x)
        if self.constant:
            return total
        for e in torch.eye(x[0].numel(), dtype=x.dtype, device=x.device):
            unit = e.reshape(1, *x.shape[1:]).expand_as(x)
            total = total + self.derivative_mv(x, unit, unit)
        return total

    def grad_logdet(self, x: Tensor) -> Tensor:
        """The Euclidean gradient of the log-determinant, ``tr(L^+ dL/dx_k)``. # shape: as x"""
        if self.constant:
            return torch.zeros_like(x)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            point = _differentiable(x)
            return _gradient(self.evaluate(point).logdet().sum(), point, again)


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _gradient(value: Tensor, point: Tensor, create_graph: bool, weights: Tensor | None = None) -> Tensor:
    """The gradient of a value, or of a weighted sum of values; zero where it does not depend on the point."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    given: dict[str, bool] = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(value, point, weights, **given)[0]


def check_metric(received: object, purpose: str) -> None:
    """Check for a metric with all of its methods: a norm that only measures gradients is not enough."""
    _checks.metric(received)
    if not isinstance(received, Metric):
        raise ValueError(
            f"metric must be Euclidean(), Wasserstein(...) or Deformations(...), {purpose}; got {type(received).__name__}; use "
            "one of them, or subclass wassersmooth.geometry.metrics.Metric"
        )


class Euclidean(Metric):
    """The identity at every image. Pixel values may have any sign, and nothing is transported."""

    constant = True

    def w1_constant(self) -> float:
        return math.sqrt(2)

    def check(self, x: Tensor) -> None:
        _checks.batch("images", x)  # a picture without a batch has as many dimensions as a batch of signals
        _checks.finite("images", x)

    def check_images(self, x: Tensor) -> None:
        """Of an objective, which has a label for each: also signals and volumes."""
        _checks.batch("images", x, dims=(4, 3, 5))
        _checks.expected_pixels("images", x)

    def evaluate(self, x: Tensor) -> Identity:
        return Identity(x)

    def __repr__(self) -> str:
        return "Euclidean()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Euclidean)

    def __hash__(self) -> int:
        return hash(Euclidean)


class Wasserstein(Metric):
    """The Wasserstein-2 metric of images on a pixel graph: L(x) is a weighted Laplacian (docs/maths.md, section 1).

    Arguments:
        graph: which pixels exchange mass.
        scale: ``"paper"`` is L(x) as printed, with node volumes that sum to 1 in each channel. ``"unit"`` divides it by the
            mean diagonal of L(1), which is the sum of all weighted degrees. So eta means the same for every radius and size,
            and at x = 1 the same as with Euclidean. ``"pixels"`` makes the squared length of a small shift of a smooth
            image its mass times the square of the shift in pixels (docs/maths.md, section 7).
        mass: adds ``mass * I`` after scaling, so that mass may also appear and vanish (unnormalized transport).
        uniform: replaces x by its mean in each image and channel, as a control.
        reference: one image, or ``"ones"`` for the white one. L is taken there, whatever x is, so the metric is constant and x
            may have any finite values. Noise of such a metric can be certified. # shape: (C, H, W)
        channels: ``"separate"`` channels each conserve their mass. ``"joined"`` adds an edge of weight 1 between any two
            channels of a pixel, so that mass also flows between colors and only its sum over all channels is conserved. A
            symmetric matrix gives the weights of these edges, 0 for no edge; its diagonal is ignored. # shape: (C, C)
    """

    def __init__(
        self,
        graph: PixelGraph,
        scale: Scale = "unit",
        mass: float = 0.0,
        uniform: bool = False,
        reference: Tensor | Reference | None = None,
        channels: Tensor | Channels = "separate",
    ) -> None:
        if not isinstance(graph, PixelGraph):
            raise ValueError(f"graph must be a PixelGraph; got {type(graph).__name__}; build one with PixelGraph.grid(...)")
        _checks.choice("scale", scale, SCALES)
        if scale == "pixels" and graph.edges is not None:
            raise ValueError(f"scale='pixels' needs a grid, whose edges have lengths; got {graph!r}; use scale='unit'")
        mass = _checks.non_negative_number("mass", mass, most=torch.finfo(torch.float64).max)
        _checks.choice("uniform", uniform, (False, True))
        self.graph, self.scale, self.mass, self.uniform = graph, scale, float(mass), uniform
        self.reference = _checked_reference(reference, graph, uniform)
        self.channels = _checked_channels(channels)
        if graph.features is not None:
            others = {"scale='pixels'": scale == "pixels", "reference": reference is not None}
            others |= {"channels": self.channels != "separate"}
            for name in (name for name, given in others.items() if given):
                raise ValueError(f"{name} needs the same weights for all images; got {graph!r}; use a graph without features")
        self._joined: dict[int, JoinedChannels] = {}
        self._references: DeviceCache[Tensor] = DeviceCache()

    @property
    def constant(self) -> bool:
        return self.reference is not None

    def check(self, x: Tensor) -> None:
        self._check(x, _checks.finite if self.constant else _checks.masses)

    def check_images(self, x: Tensor) -> None:
        """Refuse pixels above 1: L(x) is defined there but grows with the mass, so that eta would mean something else.

        A constant metric takes them, and warns as a Euclidean one does.
        """
        self._check(x, _checks.expected_pixels if self.constant else _checks.pixels)

    def _check(self, x: Tensor, values: Callable[[str, Tensor], None]) -> None:
        self.graph.check_batch("images", x)
        self._check_channels(x)
        values("images", x)
        self.graph.check_weights()
        self._check_size_of_weights(x)

    def _check_size_of_weights(self, x: Tensor) -> None:
        """Refuse weights with which L is no number in the dtype of x: in paper scale, and there alone, it grows with them."""
        weights = self.graph.weights
        if self.scale != "paper" or self.graph.weight_name in NAMED_WEIGHTS or not visibility.values_are_visible(weights, x):
            return
        s, limits = self.graph.degrees(weights.double()).detach(), torch.finfo(x.dtype)
        largest = float(s.sum() * s.max() / s.min() * self.graph.weight_unit(s))  # an entry of L at the white image, or more
        if not limits.tiny <= largest <= limits.max:
            raise ValueError(
                f'in scale="paper", L(x) grows with the weights of the graph and must be within the range of {x.dtype}; got '
                f'entries of about {largest:.1g}; use weights nearer to 1, or scale="unit", which does not depend on their size'
            )

    def _check_channels(self, x: Tensor) -> None:
        if isinstance(self.reference, Tensor) and len(self.reference) != x.shape[1]:
            raise ValueError(
                f"images must have the channels of the reference image, {len(self.reference)}; got {x.shape[1]}; "
                'give a reference with as many channels, or reference="ones"'
            )
        if isinstance(self.channels, Tensor) and len(self.channels) != x.shape[1]:
            raise ValueError(
                f"images must have as many channels as the matrix has rows, {len(self.channels)}; got {x.shape[1]}; "
                'give a matrix of that size, or channels="joined"'
            )

    def cometric(self, x: Tensor) -> WeightedLaplacian:
        self.check(x)
        return self.evaluate(_checks.without_inference_mode(x))

    def evaluate(self, x: Tensor) -> WeightedLaplacian:
        graph = self._graph_of(x)
        return WeightedLaplacian(graph, x, self._density(graph, x), self.mass)

    def _refuse_features(self) -> None:
        if self.graph.features is not None:
            raise ValueError(
                f"calculus needs a metric whose derivatives in the image are known; got {self.graph!r}, whose features are "
                "constants; use a graph without features, or the Laplacian of kind 'additive'"
            )

    def _graph_of(self, x: Tensor) -> PixelGraph:
        """The graph on which L is a Laplacian: that of a channel, or of all channels if they are joined."""
        if self.graph.features is not None:
            return EdgeAwareGraph.of(self.graph, x)
        count = x.shape[1]
        if isinstance(self.channels, str) and (self.channels == "separate" or count == 1):
            return self.graph
        if count in self._joined:
            return self._joined[count]
        matrix = self.channels if isinstance(self.channels, Tensor) else torch.ones(count, count, device="cpu")
        made = JoinedChannels.of(self.graph, matrix)
        if not self.graph.weights.requires_grad and not visibility.tracing():  # learned weights may have changed
            self._joined[count] = made
        return made

    @torch.no_grad()
    def w1_constant(self) -> float:
        if not self.constant:
            return super().w1_constant()
        if self.channels != "separate":
            raise ValueError(
                f"the constant between a metric and W1 is for channels that conserve their mass each; got {self!r}; use the "
                'radius in the metric, or channels="separate"'
            )
        if self.graph.edges is not None or len(self.graph.shape) == 3:
            raise ValueError(
                f"the constant between a metric and W1 is for pictures and signals; got {self.graph!r}; use the radius in the "
                "metric"
            )
        if self.graph.nodes > LARGEST_DENSE:
            raise ValueError(
                f"the constant between a metric and W1 needs a dense matrix, for at most {LARGEST_DENSE} pixels; "
                f"got {'x'.join(map(str, self.graph.shape))}; certify smaller images, or use the radius in the metric"
            )
        channels = len(self.reference) if isinstance(self.reference, Tensor) else 1
        shape = (1, channels, *self.graph.shape)
        return math.sqrt(float(self.cometric(torch.ones(shape, dtype=torch.float64, device="cpu")).adjacent_resistance()))

    def derivative_mv(self, x: Tensor, a: Tensor, v: Tensor) -> Tensor:
        """L is affine in x: its derivative along a is L(a) without the mass term."""
        if self.constant:
            return torch.zeros_like(v)
        self._refuse_features()
        graph = self._graph_of(x)
        return graph.to_images(laplacian_maps.apply(graph, self._density(graph, a), graph.to_field(v)))

    def derivative_quad(self, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        if self.constant:
            return torch.zeros_like(p)
        self._refuse_features()
        graph = self._graph_of(x)
        return self._density_adjoint(graph, laplacian_maps.carre_du_champ(graph, graph.to_field(p), graph.to_field(q)))

    def divergence(self, x: Tensor) -> Tensor:
        """(1/2) (s_k/d_k - sum_j w_kj/d_j): zero only where all degrees are equal (docs/maths.md, section 4)."""
        if self.constant:
            return torch.zeros_like(x)
        self._refuse_features()
        graph = self._graph_of(x)
        if self.uniform:  # L depends on the means alone, and its columns sum to zero, over all channels if they are joined
            total = torch.zeros_like(x)
            if isinstance(graph, JoinedChannels):
                for indicator in torch.eye(graph.channels, dtype=x.dtype, device=x.device):
                    channel = indicator.reshape(1, -1, *[1] * (x.dim() - 2)).expand_as(x)
                    total = total + self.derivative_mv(x, channel, channel) / self.graph.nodes
            return total
        mobility = self._mobility(graph, x)
        change = (graph.degrees(x) * mobility - graph.neighbor_sum(mobility[None, None])[0, 0]) / 2
        return graph.to_images(change.expand_as(graph.to_field(x)))

    def grad_logdet(self, x: Tensor) -> Tensor:
        """(1/2 d_k) sum_j w_kj R_kj, with R the effective resistances. Refused where L(x) is rank-deficient."""
        if self.constant:
            return torch.zeros_like(x)
        self._refuse_features()
        return self._density_adjoint(self._graph_of(x), self.evaluate(x).resistance_sums())

    def _density(self, graph: PixelGraph, x: Tensor) -> Tensor:
        """u = x/d, or its scaled or uniform variant: L depends on the image through this linear map alone.

        # shape: (B, C, *shape of the graph) -> (B, C, height, width)
        """
        field = self.graph.to_field(x)
        if self.constant:
            field = self._reference_like(field).expand_as(field)
        elif self.uniform:
            field = field.mean((-2, -1), keepdim=True).expand_as(field)
        if isinstance(graph, JoinedChannels):
            field = graph.to_field(field)
        return field * self._mobility(graph, x)

    def _density_adjoint(self, graph: PixelGraph, c: Tensor) -> Tensor:
        """# shape: as a field on the graph -> (B, C, *shape of the graph)"""
        scaled = c * self._mobility(graph, c)
        scaled = graph.split(scaled) if isinstance(graph, JoinedChannels) else scaled
        return self.graph.to_images(scaled.mean((-2, -1), keepdim=True).expand_as(scaled) if self.uniform else scaled)

    def _mobility(self, graph: PixelGraph, like: Tensor) -> Tensor:
        """1/d in the chosen scale, on the nodes of a graph. # shape: (height, width)"""
        s = graph.degrees(like)
        if self.scale == "paper":  # d sums to 1 in each channel; in joined channels, to as many as there are
            channels = graph.channels if isinstance(graph, JoinedChannels) else 1
            return s.sum((-2, -1), keepdim=True) / channels / s * graph.weight_unit(s)
        if self.scale == "unit":
            return 1 / s
        if isinstance(graph, JoinedChannels):  # edges between channels have no length
            s = (graph.unit_ratio(like) * graph.base.degrees(like)).reshape(1, -1).repeat(1, graph.channels)
        return 1 / (self.graph.diffusivity(like) * s)

    def _reference_like(self, x: Tensor) -> Tensor:
        """The reference image in the dtype and on the device of x. # shape: (C, height, width)"""
        image = self.reference
        if not isinstance(image, Tensor):
            return torch.ones((1, 1, 1), dtype=x.dtype, device=x.device)
        return self._references.get(x, lambda: self.graph.to_field(image[None])[0].to(x.device, x.dtype), x.dtype)

    def __reduce__(self) -> tuple[Any, ...]:  # without the cache
        return type(self), (self.graph, self.scale, self.mass, self.uniform, self.reference, self.channels)

    def __repr__(self) -> str:
        options = f"scale={self.scale!r}, mass={_checks.format_number(self.mass)}, uniform={self.uniform}"
        if isinstance(self.reference, Tensor):
            options += f", reference=<image of {'x'.join(map(str, self.reference.shape))}>"
        elif self.reference is not None:
            options += f", reference={self.reference!r}"
        if isinstance(self.channels, Tensor):
            options += f", channels=<matrix of {'x'.join(map(str, self.channels.shape))}>"
        elif self.channels != "separate":
            options += f", channels={self.channels!r}"
        return f"Wasserstein({self.graph!r}, {options})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Wasserstein) or self._key() != other._key():
            return False
        return _same(self.reference, other.reference) and _same(self.channels, other.channels)

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.graph, self.scale, self.mass, self.uniform, type(self.reference), type(self.channels))


def _same(a: Tensor | str | None, b: Tensor | str | None) -> bool:
    return torch.equal(a, b.to(a)) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b


def _checked_channels(received: Tensor | Channels) -> Tensor | Channels:
    if isinstance(received, str):
        _checks.choice("channels", received, CHANNELS)
        return received
    expected = "channels must be 'separate', 'joined' or a symmetric matrix (C, C) of weights of at least 0"
    if not isinstance(received, Tensor):
        raise ValueError(f"{expected}; got {_checks.kind_of(received)}; convert it with torch.as_tensor(channels)")
    _checks.dense("channels", received)
    if not received.is_floating_point() or received.dim() != 2 or received.shape[0] != received.shape[1] or not len(received):
        raise ValueError(
            f"{expected}; got {received.dtype} of shape {tuple(received.shape)}; give floats, a row for each channel"
        )
    if received.requires_grad:
        raise ValueError("channels must be a constant matrix; got one that requires grad; pass channels.detach()")
    with torch.inference_mode(False), torch.no_grad():
        matrix = received.detach().cpu().double().clone()
    possible = torch.isfinite(matrix) & (matrix >= 0)
    if not bool(possible.all()):
        raise ValueError(f"{expected}; got {float(matrix[~possible][0]):g}; use 0 where there is no edge")
    if not torch.equal(matrix, matrix.mT):
        raise ValueError(f"{expected}; got one that is not symmetric; use (channels + channels.T) / 2")
    return matrix


def _checked_reference(received: Tensor | Reference | None, graph: PixelGraph, uniform: bool) -> Tensor | Reference | None:
    if received is None:
        return None
    if uniform:
        raise ValueError("reference and uniform exclude each other: both replace x; got both; leave out one of them")
    if isinstance(received, str):
        _checks.choice("reference", received, get_args(Reference))
        return "ones"
    if not isinstance(received, Tensor) or received.dim() != 1 + len(graph.shape):
        shape = tuple(received.shape) if isinstance(received, Tensor) else type(received).__name__
        one = _checks.SHAPES[2 + len(graph.shape)].replace("B, ", "")
        raise ValueError(f'reference must be one image, {one}, or "ones"; got {shape}; an image of a batch is images[0]')
    graph.check_batch("reference", received[None])
    _checks.masses("reference", received)
    if received.requires_grad:
        raise ValueError("reference must be a constant image; got one that requires grad; pass reference.detach()")
    with torch.inference_mode(False), torch.no_grad():
        return received.clone()
