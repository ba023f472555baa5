"""The metric of coherent motion: images change by smooth velocity fields (docs/maths.md, section 10).

The flows of :class:`~wassersmooth.Wasserstein` are independent along all edges. Real variations, such as shifts, rotations and
elastic deformations, move neighboring pixels alike. Here the velocity is white noise that a Gaussian has blurred, the same for
all channels, and the cometric is ``L(x) = T(x) K T(x)' + mass I``, with K the covariance of the velocity and T(x) the change
that it makes.

Velocities live on the edges between pixels side by side, and between pixels one above the other. With ``dx`` the difference
and ``mx`` the mean of the two ends of an edge, the adjoint of T is ``T' g = mx dg`` for transport and ``mg dx`` for advection:
so constants move no mass, and no checkerboard is overlooked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth._torch_internals import is_fake
from wassersmooth.geometry import motion_ops
from wassersmooth.geometry.cometric import Cometric
from wassersmooth.geometry.device_cache import DeviceCache
from wassersmooth.geometry.laplacian_maps import inner
from wassersmooth.geometry.metrics import Metric
from wassersmooth.geometry.neighbor_sum import Offsets, edge_ends, spread_to_ends
from wassersmooth.geometry.randomness import standard_normal

Motion = Literal["transport", "advection"]

MOTIONS: tuple[Motion, ...] = get_args(Motion)
_REACH = 4  # standard deviations of the Gaussian that blurs, as in variations.elastic
_REMEDY = "use Deformations(..., mass=...) with a larger mass"


class Deformations(Metric):
    """The metric of coherent motion: ``L(x) = T(x) K T(x)' + mass I``, where T(x) v is how a velocity v changes the image.

    The velocity is white noise, blurred by a Gaussian and scaled to unit variance per axis, with covariance K. So eta is the
    root mean square displacement per axis in pixels, for noise and for penalties. All channels move together. L(x) is
    quadratic in x, so without a mass term the units of the pixels do not matter.

    Arguments:
        height, width: the size of the images.
        smoothness: the standard deviation of the Gaussian in pixels; 0 is independent motion along every edge.
        kind: ``"transport"`` moves mass, ``T v = -div(x v)``, and conserves it in every channel. ``"advection"`` moves
            values, ``T v = v . grad x``, as warping an image does.
        mass: adds ``mass * I``, for changes that are not motion.
    """

    def __init__(self, height: int, width: int, smoothness: float = 2.0, kind: Motion = "transport", mass: float = 0.0) -> None:
        self.height = _checks.positive_integer("height", height)
        self.width = _checks.positive_integer("width", width)
        if self.height * self.width == 1:
            raise ValueError("images must have at least two pixels, since one cannot move; got 1x1; use Euclidean()")
        largest = max(self.height, self.width)
        remedy = f"a motion that is smoother than the image of {self.height}x{self.width} is a shift"
        self.smoothness = float(_checks.non_negative_number("smoothness", smoothness, remedy, most=largest))
        _checks.choice("kind", kind, MOTIONS)
        self.kind = kind
        self.mass = float(_checks.non_negative_number("mass", mass, most=torch.finfo(torch.float64).max))
        self._blurs: DeviceCache[_Blurs] = DeviceCache()

    def check(self, x: Tensor) -> None:
        self._check(x, _checks.masses if self.kind == "transport" else _checks.finite)

    def check_images(self, x: Tensor) -> None:
        self._check(x, _checks.pixels if self.kind == "transport" else _checks.expected_pixels)

    def _check(self, x: Tensor, values: Callable[[str, Tensor], None]) -> None:
        _checks.batch("images", x, (self.height, self.width), ("metric", "Deformations({}, {}, ...)"))
        _checks.float64_on(x.device, "Deformations")
        values("images", x)

    def evaluate(self, x: Tensor) -> CoherentMotion:
        blurs = self._blurs.get(x, lambda: _Blurs.of(self.height, self.width, self.smoothness, x))
        return CoherentMotion(x, self.kind, blurs, self.mass)

    def derivative_mv(self, x: Tensor, a: Tensor, v: Tensor) -> Tensor:
        """L is quadratic in x: ``T(a) K T(x)' v + T(x) K T(a)' v``."""
        here, along = self.evaluate(x), self.evaluate(a)
        return along.moved(here, v) + here.moved(along, v)

    def derivative_quad(self, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """T' is bilinear in image and covector, so that exchanging the two kinds of motion gives the adjoint in the image."""
        here = self.evaluate(x)
        adjoint: Motion = "advection" if self.kind == "transport" else "transport"
        at_p, at_q = (CoherentMotion(v, adjoint, here.blurs, 0.0) for v in (p, q))
        return at_p.moved(here, q) + at_q.moved(here, p)

    def grad_logdet(self, x: Tensor) -> Tensor:
        if not self.mass:
            raise ValueError(
                "the volume of the metric needs an L(x) of full rank; got motion alone, which no volume is left of where the "
                f"image is flat; {_REMEDY}"
            )
        return super().grad_logdet(x)

    def __reduce__(self) -> tuple[Any, ...]:  # without the cache
        return type(self), self._key()

    def __repr__(self) -> str:
        numbers = f"smoothness={_checks.format_number(self.smoothness)}, kind={self.kind!r}"
        return f"Deformations({self.height}, {self.width}, {numbers}, mass={_checks.format_number(self.mass)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deformations) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, float, Motion, float]:
        return self.height, self.width, self.smoothness, self.kind, self.mass


class _Blur(NamedTuple):
    """The covariance of one axis of the velocity, a product of one over rows and one over columns, and its symmetric root."""

    rows: Tensor  # shape: (h, h)
    columns: Tensor  # shape: (w, w)
    row_root: Tensor
    column_root: Tensor


class _Blurs(NamedTuple):
    """K, for the velocities along each axis that is longer than one pixel, and the same as the kernels take it."""

    axes: tuple[_Blur, ...]
    tables: motion_ops.Tables

    @classmethod
    def of(cls, height: int, width: int, smoothness: float, like: Tensor) -> _Blurs:
        covariance = _covariance if is_fake(like) else _cached_covariance
        tables = motion_ops.Tables(
            *(torch.zeros(2, n, n, dtype=torch.float32, device="cpu") for n in (height, width, height, width))
        )
        axes = []
        for (_, axis), (h, w) in _edge_grids(height, width).items():
            (rows, row_root), (columns, column_root) = covariance(h, smoothness), covariance(w, smoothness)
            axes.append(_Blur(*(matrix.to(like.device) for matrix in (rows, columns, row_root, column_root))))
            for table, matrix in zip(tables, (rows, columns, row_root, column_root), strict=True):
                table[axis, : len(matrix), : len(matrix)] = matrix
        return cls(tuple(axes), motion_ops.Tables(*(table.to(like.device) for table in tables)))


class CoherentMotion(Cometric):
    """``T(x) K T(x)' + mass I``.

    Arguments:
        x: the images.
        kind: ``"transport"`` or ``"advection"``.
        blurs: K.
        mass: the multiple of the identity that is added. Without it, what smooth motion hardly makes counts as outside the
            range: eigenvalues of L that are rounding beside the largest one.
    """

    inaccuracy = f"what is not motion is too small for float64; {_REMEDY}"

    def __init__(self, x: Tensor, kind: Motion, blurs: _Blurs, mass: float) -> None:
        super().__init__(x)
        if mass > torch.finfo(x.dtype).max:
            raise ValueError(f"mass must be a finite number in {x.dtype}; got {mass:g}; use a smaller one, or images.double()")
        self.kind, self.blurs, self.mass = kind, blurs, mass
        self.offsets: Offsets = tuple(_edge_grids(*x.shape[-2:]))

    @property
    def singular(self) -> bool:
        return not self.mass

    def _without_kernel(self, v: Tensor) -> Tensor:
        return v - v.mean((-2, -1), keepdim=True) if self.kind == "transport" else v

    def pull(self, v: Tensor) -> list[Tensor]:
        """T' v: the velocities on the edges along each axis that a covector asks for. # shape: (..., C, H, W) -> (..., h, w)"""
        velocities = []
        for offset in self.offsets:
            (x_i, x_j), (v_i, v_j) = edge_ends(self.x, offset), edge_ends(v, offset)
            asked = (x_i + x_j) / 2 * (v_j - v_i) if self.kind == "transport" else (x_j - x_i) * (v_i + v_j) / 2
            velocities.append(asked.sum(-3))
        return velocities

    def push(self, velocities: list[Tensor]) -> Tensor:
        """T v: the change of the image. # shape: (B, h, w) of each axis -> (B, C, H, W)"""
        total = torch.zeros_like(self.x)
        for offset, velocity in zip(self.offsets, velocities, strict=True):
            x_i, x_j = edge_ends(self.x, offset)
            if self.kind == "transport":
                moved = (x_i + x_j) / 2 * velocity[:, None]
                total = total + spread_to_ends(-moved, moved, offset)
            else:
                changed = (x_j - x_i) / 2 * velocity[:, None]
                total = total + spread_to_ends(changed, changed, offset)
        return total

    def smoothed(self, velocities: list[Tensor]) -> list[Tensor]:
        """K v."""
        return [_product(blur.rows, v, blur.columns) for blur, v in zip(self.blurs.axes, velocities, strict=True)]

    def roots(self, velocities: list[Tensor]) -> list[Tensor]:
        """K^(1/2) v."""
        return [_product(blur.row_root, v, blur.column_root) for blur, v in zip(self.blurs.axes, velocities, strict=True)]

    def moved(self, other: CoherentMotion, v: Tensor) -> Tensor:
        """T(x) K T' v, with T' that of another image or of the same. # shape: (B, C, H, W)"""
        if self._has_kernels(other.x, v):
            return motion_ops.move(self.kind == "transport", self.blurs.tables, self.x, *other._mean_and_difference(v))
        return self.push(self.smoothed(other.pull(v)))

    def _mean_and_difference(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of which field T' v has the mean, and of which the difference."""
        return (self.x, v) if self.kind == "transport" else (v, self.x)

    def _has_kernels(self, *fields: Tensor) -> bool:
        return motion_ops.supports(self.x, *fields) or motion_ops.differentiable(self.x, *fields)

    def mv(self, v: Tensor) -> Tensor:
        v = _checks.like("v", v, self.x)
        moved = self.moved(self, v)
        return moved + self.mass * v if self.mass else moved

    def quad(self, v: Tensor) -> Tensor:
        """|K^(1/2) T' v|^2, plus the mass term. # shape: (B,)"""
        v = _checks.like("v", v, self.x)
        if self._has_kernels(v):
            moved = motion_ops.quad(self.blurs.tables, *self._mean_and_difference(v))
        else:
            moved = torch.stack([root.square().sum((1, 2)) for root in self.roots(self.pull(v))]).sum(0)
        return moved + self.mass * inner(v, v) if self.mass else moved

    def rounding(self, v: Tensor) -> Tensor:
        """How much of :meth:`quad` may come from a rounding error of a few ulps in v: sum diag(L) e^2. # shape: (B,)"""
        error = 8 * torch.finfo(v.dtype).eps * v
        return inner(self.diagonal(), error * error)

    def diagonal(self) -> Tensor:
        """A pixel has two edges along an axis, whose velocities are correlated. # shape: (B, C, H, W)"""
        total = torch.full_like(self.x, self.mass)
        for offset, blur in zip(self.offsets, self.blurs.axes, strict=True):
            x_i, x_j = edge_ends(self.x, offset)
            along = blur.rows if offset == (1, 0) else blur.columns
            correlation = along[0, 1].to(self.x) if len(along) > 1 else 0.0
            share = (x_i + x_j) / 2 if self.kind == "transport" else (x_j - x_i) / 2
            sign = -1 if self.kind == "transport" else 1
            after, before = spread_to_ends(share, 0 * share, offset), spread_to_ends(0 * share, share, offset)
            total = total + after.square() + before.square() + sign * 2 * correlation * after * before
        return total

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """T K^(1/2) z with z white, plus the root of the mass times white noise."""
        sizes = [(len(blur.rows), len(blur.columns)) for blur in self.blurs.axes]
        white = [standard_normal(torch.Size((len(self.x), *size)), self.x, generator) for size in sizes]
        xi = self.push(self.roots(white))
        if self.mass:
            xi = xi + self.mass**0.5 * standard_normal(xi.shape, xi, generator)
        return xi

    def as_matrix(self) -> Tensor:
        size = self.x[0].numel()
        self._refuse_large(size, "values")
        identity = torch.eye(size, dtype=self.x.dtype, device=self.x.device)
        columns = self.roots(self.pull(identity.reshape(size, 1, *self.x.shape[1:])))
        matrix = torch.stack([torch.einsum("ibhw,jbhw->bij", c.double(), c.double()) for c in columns]).sum(0)
        return (matrix + self.mass * identity.double()).to(self.x.dtype)


def _edge_grids(height: int, width: int) -> dict[tuple[int, int], tuple[int, int]]:
    """The offset of the edges along each axis that has any, and the size of the grid of these edges."""
    grids = {(1, 0): (height - 1, width), (0, 1): (height, width - 1)}
    return {offset: size for offset, size in grids.items() if all(size)}


def _product(rows: Tensor, field: Tensor, columns: Tensor) -> Tensor:
    """rows @ field @ columns. # shape: (..., h, w) -> the same

    It runs in float64, because a float32 product may be rounded to tf32, and autocast would change its dtype.
    """
    return (rows @ field.double() @ columns).to(field.dtype)


def _covariance(length: int, smoothness: float) -> tuple[Tensor, Tensor]:
    """The covariance of blurred white noise on a line, scaled to variance 1, and its symmetric root. # shape: (length, length)

    The Gaussian ends at four standard deviations; the noise continues beyond the line, so that the variance is 1 everywhere.
    """
    reach = math.ceil(_REACH * smoothness)
    taps = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-(taps / smoothness).square() / 2) if smoothness else torch.ones_like(taps)
    lags = torch.nn.functional.conv1d(weights[None, None], weights[None, None], padding=2 * reach)[0, 0, 2 * reach :]
    lags = torch.cat((lags / lags[0], lags.new_zeros(length)))
    positions = torch.arange(length, device="cpu")
    covariance = lags[(positions[:, None] - positions).abs().clamp(max=2 * reach + 1)]
    values, vectors = torch.linalg.eigh(covariance)
    return covariance, vectors * values.clamp(min=0).sqrt() @ vectors.mT


_cached_covariance = lru_cache(maxsize=64)(_covariance)
