"""A ground metric learned from natural pairs: graph weights that maximize the likelihood of how images change.

The difference ``d = x' - x`` of a pair is modeled as ``N(0, eta^2 (L_w(x) + mass I))``. Weights that minimize a gradient
penalty are no ground metric: with volumes held, the penalty is linear in them, so its minimum puts everything on one relation.
The likelihood pays ``logdet`` for every direction that the weights quieten, and is largest, in expectation, at the true
covariance (docs/maths.md, section 11).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry.components import connected_components
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.geometry.neighbor_sum import EdgeList, Relation, edge_ends, spread_to_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Progress = Callable[[int, int, str], None]
Pair = tuple[Tensor, Tensor]

EXACT_NODES = 1024  # up to this number of pixels, matrices are factored; beyond it, traces and determinants are estimated
PROBES = 16  # for such an estimate, by default
LEAST_WEIGHT = 1e-4  # of the mean: a smaller weight is no different from none
LEAST_MASS, LARGEST_MASS = 1e-9, 1e6  # below, covariances are singular to rounding; above, transport is no part of them
CONVERGED = 1e-8  # nats per pixel that another step would gain
STEP = 1e-4  # of central differences, in logarithms of the parameters
_TITLES = {"fitted": "fitted weights", "constant": "the given weights", "euclidean": "white noise"}
_CHUNK = 1 << 23  # entries of the matrices that are factored at a time: 64 MiB


def fit_ground_metric(
    pairs: Pair | Iterable[Pair],
    graph: PixelGraph,
    *,
    mass: float | None = None,
    resolution: float = 1 / 255,
    iterations: int = 200,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> GroundFit:
    """Fit the weights of a graph, eta and a mass term by maximum likelihood to pairs of images, such as two frames of a video.

    The model of the differences is Gaussian with covariance ``eta^2 (L_w(x) + mass I)`` in unit scale, where only the ratios
    of the weights in each connected component of the graph matter: their mean is fixed to 1, and eta has the scale. The fit
    starts from the weights of the graph and never lowers the likelihood in a step (docs/maths.md, section 11).

    Arguments:
        pairs: images and perturbed images, both ``(B, C, H, W)`` in [0, 1], or an iterable of such pairs.
        graph: which pixels exchange mass; the fit starts from its weights and is compared with them.
        mass: the mass term if it is known; None fits it.
        resolution: the step between pixel values. Rounding both images adds a variance of ``resolution^2 / 6``, and
            ``eta^2 mass`` is at least that; otherwise pixels that are black in both images would make the likelihood infinite.
        iterations: the maximum number of steps.
        probes: random vectors by which traces and determinants are estimated; None computes them exactly up to 1,024 pixels,
            and uses 16 beyond.
        generator: the source of these vectors.
        progress: called with the step, the maximum number of steps, and the likelihood in words.
    """
    images, perturbed = _collected(pairs)
    _check_graph(graph)
    _check_pair(images, perturbed, graph)
    if mass is not None and (mass := _checks.non_negative_number("mass", mass, "None fits it", most=LARGEST_MASS)) < LEAST_MASS:
        raise ValueError(
            f"mass must be at least {LEAST_MASS:g}, since a pair of images hardly has exactly equal masses; got {mass:g}; None "
            "fits it"
        )
    resolution = _checks.non_negative_number("resolution", resolution, "8-bit images have 1/255", most=1.0)
    iterations = _checks.positive_integer("iterations", iterations)
    probes = _checked_probes(probes, graph, generator)
    if progress is not None:
        _checks.function("progress", progress, "(done, total, text)", 3)
    if not bool((images != perturbed).any()):
        raise ValueError("images and perturbed images must differ; got pairs that are equal everywhere; give pairs that vary")
    likelihood = _Likelihood.of(images, perturbed, graph, probes, generator)
    floor = max(resolution**2 / 6, 1e-12 * likelihood.mean_square)
    with torch.no_grad():
        euclidean = max(likelihood.mean_square, floor)
        start = _Parameters.start(graph, likelihood.mean_square, mass, floor)
        constant, _, _ = _maximized(likelihood, start, iterations, floor, mass, False, None)
        fitted, steps, converged = _maximized(likelihood, constant, iterations, floor, mass, True, progress)
        information = _Information.at(likelihood, fitted, floor, mass)
        value = likelihood.at(fitted).log_likelihood / likelihood.values
    return GroundFit(
        metric=fitted.metric(graph),
        eta=fitted.eta,
        mass=fitted.mass,
        weights=fitted.weights,
        standard_errors=information.weights,
        eta_error=information.eta,
        mass_error=information.mass,
        log_likelihood=value,
        pairs=len(images),
        steps=steps,
        converged=converged,
        probes=probes,
        _fitted=fitted,
        _constant=constant,
        _euclidean=euclidean,
    )


@dataclass(frozen=True, eq=False)
class GroundScore:
    """Mean log-likelihoods of pairs in nats per pixel value: larger is better. ``str()`` says which model wins.

    Attributes:
        fitted, constant, euclidean: the fitted weights; those of the graph that was given, with their own eta and mass; white
            noise.
        per_pair: the same for each pair, by these names. # shape: (B,) each
    """

    fitted: float
    constant: float
    euclidean: float
    per_pair: dict[str, Tensor] = field(repr=False)

    def gain(self, over: Literal["constant", "euclidean"]) -> tuple[float, float]:
        """How much the fitted weights gain over another model, and the standard error over pairs."""
        _checks.choice("over", over, ("constant", "euclidean"))
        gains = self.per_pair["fitted"] - self.per_pair[over]
        return float(gains.mean()), float(gains.std() / math.sqrt(len(gains))) if len(gains) > 1 else math.nan

    def __str__(self) -> str:
        best = max(_TITLES, key=lambda name: float(getattr(self, name)))
        numbers = ", ".join(f"{title} {getattr(self, name):.4f}" for name, title in _TITLES.items())
        constant, euclidean = self.gain("constant"), self.gain("euclidean")
        return (
            f"best: {_TITLES[best]} ({numbers} nats per pixel); fitted weights gain {constant[0]:+.4f} ± {constant[1]:.4f} "
            f"over {_TITLES['constant']}, {euclidean[0]:+.4f} ± {euclidean[1]:.4f} over {_TITLES['euclidean']}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class GroundFit:
    """A ground metric fitted to pairs of images, by :func:`fit_ground_metric`.

    Attributes:
        metric: ``Wasserstein`` in unit scale with the fitted weights and mass, to use in objectives, noise and attacks.
        eta, mass: the covariance of the differences is ``eta^2 (L_w(x) + mass I)``.
        weights: of the relations of the graph, with a mean of 1 in each of its components. # shape: (R,)
        standard_errors: of the weights, from the observed information; nan for one that has vanished, where the likelihood is
            no parabola. # shape: (R,)
        eta_error, mass_error: of eta and mass.
        log_likelihood: of the pairs that were fitted, in nats per pixel value.
        pairs, steps, converged, probes: how many pairs and steps; whether another step would have gained nothing; the probes of
            the estimates, None if all is exact.
    """

    metric: Wasserstein
    eta: float
    mass: float
    weights: Tensor
    standard_errors: Tensor
    eta_error: float
    mass_error: float
    log_likelihood: float
    pairs: int
    steps: int
    converged: bool
    probes: int | None
    _fitted: _Parameters = field(repr=False)
    _constant: _Parameters = field(repr=False)
    _euclidean: float = field(repr=False)

    @torch.no_grad()
    def score(self, pairs: Pair | Iterable[Pair], generator: torch.Generator | None = None) -> GroundScore:
        """The likelihood of other pairs, compared with that of the given weights and of white noise, all as fitted before."""
        images, perturbed = _collected(pairs)
        graph = self.metric.graph
        _check_pair(images, perturbed, graph)
        _checks.generator(generator)
        likelihood = _Likelihood.of(images, perturbed, graph, self.probes, generator)
        size, variance = images[0].numel(), self._euclidean
        squares = (perturbed.double() - images.double()).square().flatten(1).sum(1)
        found = {
            "fitted": likelihood.per_pair(self._fitted) / size,
            "constant": likelihood.per_pair(self._constant) / size,
            "euclidean": -(math.log(2 * math.pi * variance) + squares / (size * variance)) / 2,
        }
        fitted, constant, euclidean = (float(found[name].mean()) for name in _TITLES)
        return GroundScore(fitted, constant, euclidean, found)

    def plot(self, axes: Axes | None = None) -> Axes:
        """The weights as a picture, the pixel itself in the middle, on new or given axes. Needs matplotlib."""
        graph = self.metric.graph
        if graph.edges is not None or len(graph.shape) > 2:
            raise ValueError(f"the picture of the weights is for grids and lines; got {graph!r}; plot fit.weights yourself")
        if axes is not None and not callable(getattr(axes, "imshow", None)):
            raise ValueError(f"axes must be those of matplotlib; got {_checks.kind_of(axes)}; leave them out for new ones")
        if axes is None:
            try:
                from matplotlib.figure import Figure
            except ImportError:
                raise _checks.extra("matplotlib", "study", "the picture of the weights") from None
            axes = Figure(figsize=(4.0, 3.5), layout="constrained").subplots()
        offsets = [(0, *offset)[-2:] for offset in graph.offsets]
        rows, columns = (max(abs(offset[axis]) for offset in offsets) for axis in (0, 1))
        picture = torch.full((2 * rows + 1, 2 * columns + 1), math.nan, dtype=torch.float64, device="cpu")
        for (dy, dx), weight in zip(offsets, self.weights.tolist(), strict=True):
            picture[rows + dy, columns + dx] = picture[rows - dy, columns - dx] = weight
        extent = (-columns - 0.5, columns + 0.5, rows + 0.5, -rows - 0.5)
        drawn = axes.imshow(picture.numpy(), cmap="viridis", vmin=0, extent=extent)
        for (dy, dx), weight, error in zip(offsets, self.weights.tolist(), self.standard_errors.tolist(), strict=True):
            label = f"{weight:.2f}" + (f"\n±{error:.2f}" if math.isfinite(error) else "")
            color = "white" if weight < 0.6 * float(self.weights.max()) else "black"
            axes.text(dx, dy, label, ha="center", va="center", fontsize=6, color=color)
        axes.set_xlabel("dx in pixels")
        axes.set_ylabel("dy in pixels")
        if axes.figure is not None:
            axes.figure.colorbar(drawn, ax=axes, label="weight")
        return axes

    def __repr__(self) -> str:
        end = "" if self.converged else f", not converged in {self.steps} steps"
        return (
            f"GroundFit({len(self.weights)} weights, eta={self.eta:.4g}, mass={self.mass:.4g}, "
            f"{self.log_likelihood:.4f} nats per pixel on {self.pairs} pairs{end})"
        )


@dataclass(frozen=True)
class _Parameters:
    """The covariance is ``motion L_w(x) + white I``; the weights of each component of the graph have a mean of 1."""

    weights: Tensor  # float64, on the CPU # shape: (R,)
    motion: float
    white: float

    @classmethod
    def start(cls, graph: PixelGraph, mean_square: float, mass: float | None, floor: float) -> _Parameters:
        """Half of the variance from each part, where a pixel of brightness 1/2 has half the variance of a white one."""
        weights = _normalized(graph.weights.detach().cpu().double(), graph)
        white = max(mean_square / 2, floor)
        return cls(weights, white / mass if mass else mean_square, white)

    @property
    def eta(self) -> float:
        return math.sqrt(self.motion)

    @property
    def mass(self) -> float:
        return self.white / self.motion

    def moved(self, log_steps: _Gradient, size: float, floor: float, mass: float | None, graph: PixelGraph) -> _Parameters:
        """The parameters times the exponential of a step, within their bounds."""
        weights = _normalized(self.weights * (size * log_steps.weights).exp(), graph)
        motion = self.motion * math.exp(size * log_steps.motion)
        white = max(self.white * math.exp(size * log_steps.white), floor)
        if mass is not None:  # both change by one factor
            factor = math.exp(size * (log_steps.motion + log_steps.white) / 2)
            motion = max(self.motion * factor, floor / mass)
            return _Parameters(weights, motion, motion * mass)
        return _Parameters(weights, max(motion, white / LARGEST_MASS), white)

    def graph(self, like: PixelGraph) -> PixelGraph:
        return PixelGraph(like.shape, like.radius, like.neighborhood, self.weights, "tensor", like.edges)

    def metric(self, like: PixelGraph) -> Wasserstein:
        return Wasserstein(self.graph(like), mass=self.mass)


def _normalized(weights: Tensor, graph: PixelGraph) -> Tensor:
    """Weights with a mean of 1 in each component of the graph, at least ``LEAST_WEIGHT``. # shape: (R,) -> the same"""
    components = _component_of_weight(graph)
    totals = weights.new_zeros(len(weights)).index_add(0, components, weights)
    return (weights / (totals / components.bincount(minlength=len(weights)))[components]).clamp(min=LEAST_WEIGHT)


def _component_of_weight(graph: PixelGraph) -> Tensor:
    """The connected component of the edges of each weight, counted from 0. # shape: (R,)"""
    if graph.edges is None or graph.connected:
        return torch.zeros(len(graph.weights), dtype=torch.int64, device="cpu")
    labels = connected_components(graph, torch.ones(1, 1, 1, graph.nodes, device="cpu")).labels.flatten()
    numbers: Tensor = torch.unique(labels[graph.edges[:, 0]], return_inverse=True)[1]
    return numbers


class _Gradient(NamedTuple):
    """One number for the logarithm of each parameter."""

    weights: Tensor  # shape: (R,)
    motion: float
    white: float


class _At(NamedTuple):
    """The likelihood at some parameters, its gradient in their logarithms, and the expected squares in it.

    The gradient is ``(observed - expected) / 2``, with sums over edges of c R for the weights, c the conductance and R the
    effective resistance; the weights also change the volumes of pixels, which only the gradient contains.
    """

    log_likelihood: float
    gradient: _Gradient
    expected: _Gradient

    def log_steps(self, fit_weights: bool) -> _Gradient:
        """The step that maximizes the minorant: half the logarithm of observed over expected squares."""
        weights = _log_step(self.gradient.weights, self.expected.weights)
        motion, white = (
            float(_log_step(*weights.new_tensor([g, e]))) for g, e in zip(self.gradient[1:], self.expected[1:], strict=True)
        )
        return _Gradient(weights if fit_weights else torch.zeros_like(weights), motion, white)


def _log_step(gradient: Tensor, expected: Tensor) -> Tensor:
    """At most a factor e: far from the maximum, volumes that are held fixed in the minorant are not."""
    known = expected > 0  # not where all pixels of a relation are black
    ratio = (1 + 2 * gradient / torch.where(known, expected, 1.0)).clamp(math.exp(-2), math.exp(2))
    return torch.where(known, ratio.log() / 2, 0.0)


@dataclass(frozen=True)
class _Likelihood:
    """The likelihood of the differences of pairs."""

    images: Tensor  # float64 # shape: (B, C, ...)
    differences: Tensor
    graph: PixelGraph
    probes: int | None
    seed: int  # of the probes: the same at all parameters, so that the estimate is a smooth function of them

    @classmethod
    def of(
        cls, images: Tensor, perturbed: Tensor, graph: PixelGraph, probes: int | None, generator: torch.Generator | None
    ) -> _Likelihood:
        images = images.detach().double()
        seed = 0
        if probes is not None:
            device = "cpu" if generator is None else generator.device
            seed = int(torch.randint(2**31, (), generator=generator, device=device))
        return cls(images, perturbed.detach().double() - images, graph, probes, seed)

    @property
    def values(self) -> int:
        return self.images.numel()

    @property
    def mean_square(self) -> float:
        return float(self.differences.square().mean())

    def at(self, parameters: _Parameters) -> _At:
        """Sums over all pairs."""
        motion, white, graph = parameters.motion, parameters.white, parameters.graph(self.graph)
        logs = dot = trace = energy = 0.0
        expected = observed = volumes = torch.zeros(len(parameters.weights), dtype=torch.float64, device=self.images.device)
        for part in self._parts(parameters):
            phi, (inside, outside) = part.phi, part.resistances(graph)
            logs += float(part.log_likelihood.sum())
            dot += float((part.differences * phi).sum())
            trace += part.trace
            energy += float(phi.square().sum())
            squares = [_difference_products(phi, phi, relation) for relation in graph.edge_relations]
            found, moved = _weight_sums(graph, part.density, squares)
            expected, observed, volumes = expected + inside, observed + found, volumes + moved - outside
        weights = motion * (observed - expected + volumes).cpu() / 2
        # With S = motion L + white I: tr S^-1 (motion L) = n - white tr S^-1, and likewise for the squares.
        of_motion = self.values - white * trace
        gradient = _Gradient(weights, (dot - white * energy - of_motion) / 2, white * (energy - trace) / 2)
        return _At(logs, gradient, _Gradient(motion * expected.cpu(), of_motion, white * trace))

    def per_pair(self, parameters: _Parameters) -> Tensor:
        """# shape: (B,)"""
        return torch.cat([part.log_likelihood for part in self._parts(parameters)]).cpu()

    def _parts(self, parameters: _Parameters) -> Iterator[_Part]:
        """The pairs, as many at a time as fit into memory."""
        metric, nodes = parameters.metric(self.graph), self.graph.nodes
        rows = self.images.shape[1] * nodes * (nodes if self.probes is None else self.probes)
        random = torch.Generator(self.images.device).manual_seed(self.seed)
        for x, d in zip(*(torch.split(of, max(1, _CHUNK // rows)) for of in (self.images, self.differences)), strict=True):
            if self.probes is None:
                yield _exact_part(x, d, metric, parameters)
            else:
                yield _estimated_part(x, d, metric, parameters, self.probes, random)


class _Part(NamedTuple):
    """What the likelihood of some pairs and its derivatives are made of. Fields on the nodes are (B, C, height, width)."""

    log_likelihood: Tensor  # shape: (B,)
    differences: Tensor
    phi: Tensor  # the inverse of the covariance applied to the differences
    density: Tensor  # u = x/s
    trace: float  # of the inverse
    ends: Callable[[Relation], Tensor]  # the effective resistance of each edge of a relation, perhaps estimated

    def resistances(self, graph: PixelGraph) -> tuple[Tensor, Tensor]:
        return _weight_sums(graph, self.density, [self.ends(relation) for relation in graph.edge_relations])


def _exact_part(x: Tensor, d: Tensor, metric: Wasserstein, parameters: _Parameters) -> _Part:
    graph = metric.graph
    cometric = Wasserstein(graph).evaluate(x)
    matrices = parameters.motion * cometric.channel_matrices()
    matrices.diagonal(dim1=-2, dim2=-1).add_(parameters.white)
    factor = torch.linalg.cholesky(matrices)
    fields = graph.to_field(d)
    phi = torch.cholesky_solve(fields.flatten(2)[..., None], factor)[..., 0].reshape(fields.shape)
    inverse = torch.cholesky_inverse(factor)
    potential = inverse.diagonal(dim1=-2, dim2=-1).reshape(fields.shape)
    pixels = torch.arange(graph.nodes, device=x.device).reshape(fields.shape[-2:])

    def resistance(relation: Relation) -> Tensor:
        (i, j), (at_i, at_j) = edge_ends(pixels, relation), edge_ends(potential, relation)
        return at_i + at_j - 2 * inverse[..., i.flatten(), j.flatten()].reshape(at_i.shape)

    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum((1, 2))
    logs = -(math.log(2 * math.pi) * d[0].numel() + logdet + (fields * phi).flatten(1).sum(1)) / 2
    return _Part(logs, fields, phi, cometric.u, float(potential.sum()), resistance)


def _estimated_part(
    x: Tensor, d: Tensor, metric: Wasserstein, parameters: _Parameters, probes: int, random: torch.Generator
) -> _Part:
    graph, cometric = metric.graph, metric.evaluate(x)
    fields, phi = graph.to_field(d), graph.to_field(cometric.solve(d)) / parameters.motion
    signs = [torch.randint(2, x.shape, generator=random, device=x.device).double() * 2 - 1 for _ in range(probes)]
    solved = [graph.to_field(cometric.solve(z)) / parameters.motion for z in signs]
    white = [graph.to_field(z) for z in signs]

    def resistance(relation: Relation) -> Tensor:
        return torch.stack([_difference_products(y, z, relation) for y, z in zip(solved, white, strict=True)]).mean(0)

    trace = sum(float((y * z).sum()) for y, z in zip(solved, white, strict=True)) / probes
    size = d[0].numel()
    logdet = cometric.logdet_estimate(probes, random)[0] + size * math.log(parameters.motion)
    logs = -(math.log(2 * math.pi) * size + logdet + (fields * phi).flatten(1).sum(1)) / 2
    return _Part(logs, fields, phi, cometric.u, trace, resistance)


def _difference_products(a: Tensor, b: Tensor, relation: Relation) -> Tensor:
    """The product of the differences of two fields along every edge of a relation."""
    (a_i, a_j), (b_i, b_j) = edge_ends(a, relation), edge_ends(b, relation)
    return (a_i - a_j) * (b_i - b_j)


def _weight_sums(graph: PixelGraph, u: Tensor, squares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For each weight, the derivative of ``sum of c_e squares_e`` in its logarithm, with ``c_e = w_e (u_i + u_j)/2``.

    # shape: (R,), (R,)

    First at fixed volumes, then what it adds that ``u = x/s`` depends on the weights through the degrees s.
    """
    degrees, received = graph.degrees(u), torch.zeros_like(u)
    relations = graph.weighted_relations(u)
    direct = []
    for (relation, weight), square in zip(relations, squares, strict=True):
        u_i, u_j = edge_ends(u, relation)
        direct.append(_summed(weight * (u_i + u_j) / 2 * square, relation))
        half = weight / 2 * square
        received = received + spread_to_ends(half, half, relation)
    by_degree = -(u * received / degrees).sum((0, 1), keepdim=True)
    volumes = []
    for relation, weight in relations:
        first, second = edge_ends(by_degree, relation)
        volumes.append(_summed(weight * (first + second), relation))
    return graph.by_relation(torch.cat(direct)), graph.by_relation(torch.cat(volumes))


def _summed(values: Tensor, relation: Relation) -> Tensor:
    """The sum over a relation of a grid, or for each edge of a list. # shape: (1,) or (E,)"""
    return values.sum((0, 1, 2)) if isinstance(relation, EdgeList) else values.sum()[None]


def _maximized(
    likelihood: _Likelihood,
    start: _Parameters,
    iterations: int,
    floor: float,
    mass: float | None,
    fit_weights: bool,
    progress: Progress | None,
) -> tuple[_Parameters, int, bool]:
    """The parameters at the maximum, the number of steps, and whether it was reached.

    A step is longer than that of the minorant as long as that helps, and shorter where the likelihood would fall.
    """
    here, at, size = start, likelihood.at(start), 1.0
    for step in range(1, iterations + 1):
        steps = at.log_steps(fit_weights)
        while True:
            there = here.moved(steps, size, floor, mass, likelihood.graph)
            then = likelihood.at(there)
            if then.log_likelihood >= at.log_likelihood or size < 1e-3:
                break
            size /= 2
        gained = (then.log_likelihood - at.log_likelihood) / likelihood.values
        if gained > 0:
            here, at = there, then
        if progress is not None:
            progress(step, iterations, f"{at.log_likelihood / likelihood.values:.5f} nats per pixel")
        if gained < CONVERGED * size:
            return here, step, True
        size = min(1.5 * size, 8.0) if size >= 1 else 2 * size
    return here, iterations, False


class _Information(NamedTuple):
    """Standard errors from the observed information, nan where a parameter is at its bound."""

    weights: Tensor
    eta: float
    mass: float

    @classmethod
    def at(cls, likelihood: _Likelihood, here: _Parameters, floor: float, mass: float | None) -> _Information:
        count = len(here.weights)
        curvature = -_curvature(likelihood, here)  # in the logarithms of weights, motion and white
        alive = here.weights > 10 * LEAST_WEIGHT
        # Directions in which the parameters may change: weights of a component with a fixed sum, in units of their mean; motion
        # and white.
        directions = curvature.new_zeros(count + 2, 0)
        components = _component_of_weight(likelihood.graph)
        for which in ((alive & (components == one)).nonzero()[:, 0] for one in torch.unique(components)):
            if len(which) > 1:
                contrasts = torch.linalg.svd(curvature.new_ones(1, len(which))).Vh[1:].T
                of_weights = curvature.new_zeros(count + 2, contrasts.shape[1])
                of_weights[which] = contrasts / here.weights[which, None]
                directions = torch.cat((directions, of_weights), 1)
        scales = curvature.new_zeros(count + 2, 2)
        scales[count, 0] = scales[count + 1, 1] = 1
        if mass is not None:
            scales = scales.sum(1, keepdim=True)
        elif here.white <= floor * (1 + 1e-6):
            scales = scales[:, :1]
        elif here.mass >= LARGEST_MASS * (1 - 1e-6):
            scales = scales[:, 1:]
        directions = torch.cat((directions, scales), 1)
        nan = curvature.new_full((count,), math.nan)
        factor, failed = torch.linalg.cholesky_ex(directions.T @ curvature @ directions)
        if bool(failed):
            return cls(nan, math.nan, math.nan)
        logs = directions @ torch.cholesky_inverse(factor) @ directions.T
        errors = torch.where(alive, here.weights * logs.diagonal()[:count].clamp(min=0).sqrt(), nan)
        of_mass = logs[count, count] + logs[-1, -1] - 2 * logs[count, -1]
        eta = here.eta * float(logs[count, count].sqrt()) / 2 or math.nan
        return cls(errors, eta, here.mass * float(of_mass.clamp(min=0).sqrt()))


def _curvature(likelihood: _Likelihood, here: _Parameters) -> Tensor:
    """The second derivatives in the logarithms of all parameters, by central differences. # shape: (R + 2, R + 2)"""
    count, columns = len(here.weights), []
    for k in range(count + 2):
        ends = []
        for sign in (1, -1):
            factors = here.weights.new_ones(count + 2)
            factors[k] = math.exp(sign * STEP)
            there = _Parameters(
                here.weights * factors[:count], here.motion * float(factors[-2]), here.white * float(factors[-1])
            )
            gradient = likelihood.at(there).gradient
            ends.append(torch.cat((gradient.weights, gradient.weights.new_tensor(gradient[1:]))))
        columns.append((ends[0] - ends[1]) / (2 * STEP))
    matrix = torch.stack(columns)
    return (matrix + matrix.T) / 2


def _collected(pairs: Any) -> Pair:
    """Images and perturbed images of all pairs."""
    if isinstance(pairs, tuple | list) and len(pairs) == 2 and all(isinstance(one, Tensor) for one in pairs):
        return pairs[0], pairs[1]
    expected = "pairs must be (images, perturbed), or an iterable of such pairs"
    if isinstance(pairs, Tensor) or not isinstance(pairs, Iterable):
        raise ValueError(f"{expected}; got {_checks.kind_of(pairs)}; give two tensors of one shape")
    found = list(pairs)
    for one in found:
        if not (isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(part, Tensor) for part in one)):
            raise ValueError(f"{expected}; got one of {_checks.kind_of(one)} in it; give two tensors of one shape for each")
    if not found:
        raise ValueError(f"{expected}; got none; give at least one")
    shapes = {(tuple(part.shape[1:]), part.dtype, part.device) for one in found for part in one}
    if len(shapes) > 1:
        raise ValueError(
            f"all pairs must have one shape, dtype and device; got {_checks.shown(sorted(map(str, shapes)))}; convert them"
        )
    return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])


def _check_graph(graph: object) -> None:
    if not isinstance(graph, PixelGraph):
        raise ValueError(f"graph must be a PixelGraph; got {_checks.kind_of(graph)}; build one with PixelGraph.grid(...)")
    if graph.features is not None:
        raise ValueError("graph must have weights that are the same for all images; got one with features; leave these out")
    graph.check_weights()


def _check_pair(images: Tensor, perturbed: Tensor, graph: PixelGraph) -> None:
    for name, batch in (("images", images), ("perturbed", perturbed)):
        graph.check_batch(name, batch)
        # Perturbed images may leave [0, 1], as those of the model do; eta and mass have the scale of the images.
        (_checks.pixels if name == "images" else _checks.finite)(name, batch)
    _checks.like("perturbed", perturbed, images)


def _checked_probes(probes: int | None, graph: PixelGraph, generator: torch.Generator | None) -> int | None:
    _checks.generator(generator)
    if probes is not None:
        return _checks.positive_integer("probes", probes, "None is exact for small images")
    return None if graph.nodes <= EXACT_NODES else PROBES
