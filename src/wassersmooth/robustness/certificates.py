"""Certified radii: balls around an image in which the smoothed classifier cannot change its class.

The Gaussian certificate of Cohen et al. (2019) in the geometry of a constant metric. Statements, proofs and limits are in
docs/maths.md, section 9. Everything holds with probability at least 1 - alpha for each image, over the noise that was drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.geometry.cometric import LARGEST_DENSE
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.geometry.neighbor_sum import edge_ends
from wassersmooth.model_state import call_model, logits_of, preserve_state
from wassersmooth.robustness.intervals import binomial_lower, wilson
from wassersmooth.robustness.model_queries import allowed_difference
from wassersmooth.robustness.smoothing import (
    SmoothingNoise,
    check_certifiable,
    check_scores,
    check_sigma,
    constant_metric,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Progress = Callable[[int, int], None]  # (images done, images in all)
Unit = Literal["metric", "w1", "relative_w1", "geodesic", "l2", "pixels"]

UNITS: tuple[Unit, ...] = get_args(Unit)
UNIT_TITLES: dict[Unit, str] = {
    "metric": "the metric",
    "w1": "W1 (mass x pixels)",
    "relative_w1": "relative W1 (pixels)",
    "geodesic": "geodesic distance",
    "l2": "L2",
    "pixels": "pixels of a shift",
}
BLOCK = 100  # draws that one call of a generator makes: whole blocks make results independent of the batch size
CHUNK = 64  # images whose votes are counted before progress is reported
SCORE_TOLERANCE = 0.01  # relative to the spread of the scores: sums in another order, in bfloat16
CHECKED_IMAGES = 16  # noisy images on which the model is asked twice, or as many as a smaller batch has


class CertifiedAccuracy(NamedTuple):
    """In percent, with Wilson's 95 % interval over the images. # shape of each: as the radii"""

    percent: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, repr=False)
class Certificates:
    """What :func:`certify` found. Radii are lengths of perturbations; the class is certain at every smaller one.

    Attributes:
        classes: the class of the smoothed classifier, -1 where it abstains. # shape: (B,)
        radii: in the metric, ``sqrt(d' L^+ d) < radius``; 0 where it abstains. # shape: (B,)
        lower: the lower bound on the probability of the selected class. # shape: (B,)
        metric, sigma, samples, select, alpha: as given.
        masses: the mass of each channel of each image, for the units that need it. # shape: (B, C)
        pixels_per_channel: the number of pixels in a channel.
    """

    classes: Tensor
    radii: Tensor
    lower: Tensor
    metric: Metric
    sigma: float
    samples: int
    select: int
    alpha: float
    masses: Tensor
    pixels_per_channel: int

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def abstained(self) -> Tensor:
        """Where no class is certain. # shape: (B,)"""
        return self.classes < 0

    def w1(self, relative: bool = False) -> Tensor:
        """Radii in exact transport: mass times pixels, with the Manhattan or the Euclidean distance. # shape: (B,)

        For perturbations that conserve the mass of each channel. ``relative=True`` divides by the mass of the image, which
        gives the unit of Levine and Feizi (2020) and Wong et al. (2019).
        """
        _checks.choice("relative", relative, (False, True))
        radii = self._white_radii() / constant_metric(self.metric).w1_constant()
        return _over(radii, self._mass()) if relative else radii

    def geodesic(self, free: bool = False) -> Tensor:
        """Radii in the geodesic distance of ``L(x)``, the metric without its reference or control. # shape: (B,)

        For paths of images in [0, 1]. ``free=True`` also allows paths that leave the box between two ends inside it.
        The Euclidean metric has straight geodesics, so its radii do not change.
        """
        _checks.choice("free", free, (False, True))
        if not isinstance(self.metric, Wasserstein):
            return self.radii
        radii = self._white_radii() / math.sqrt(_white_over(self.metric))
        if not free:
            return radii
        white = Wasserstein(self.metric.graph, self.metric.scale, self.metric.mass, reference="ones")
        point = torch.ones(1, 1, *self.metric.graph.shape, dtype=torch.float64, device="cpu")
        largest = float(white.cometric(point).diagonal().detach().max())
        return radii / (1 + radii * math.sqrt(largest) / 2).sqrt()

    def l2(self) -> Tensor:
        """Radii in the Euclidean norm, for perturbations of any kind. # shape: (B,)

        With a mass term m they are ``sqrt(m)`` times the radii. Without one they are 0, because every ball of the Euclidean
        norm holds perturbations that change the mass, which are outside the range of L.
        """
        if not isinstance(self.metric, Wasserstein | Euclidean):
            raise ValueError(
                f"radii in the Euclidean norm are for Euclidean() and Wasserstein(...); got {self.metric!r}; use .radii, which "
                "are lengths in that metric"
            )
        factor = math.sqrt(self.metric.mass) if isinstance(self.metric, Wasserstein) else 1.0
        return factor * self.radii

    def pixels(self) -> Tensor:
        """Radii over the root of the mass: for smooth images, the size of a certified shift in pixels. # shape: (B,)

        For ``Wasserstein(..., scale="pixels")``.
        """
        if not isinstance(self.metric, Wasserstein) or self.metric.scale != "pixels":
            raise ValueError(
                f'radii in pixels need a metric in that scale, Wasserstein(..., scale="pixels"); got {self.metric!r}; '
                "w1() and geodesic() are for every scale"
            )
        return _over(self.geodesic(), self._mass().sqrt())

    def in_unit(self, unit: Unit) -> Tensor:
        """Radii as ``"metric"``, ``"w1"``, ``"relative_w1"``, ``"geodesic"``, ``"l2"`` or ``"pixels"``. # shape: (B,)"""
        _checks.choice("unit", unit, UNITS)
        if unit == "metric":
            return self.radii
        if unit in ("w1", "relative_w1"):
            return self.w1(relative=unit == "relative_w1")
        return {"geodesic": self.geodesic, "l2": self.l2, "pixels": self.pixels}[unit]()

    def accuracy(self, labels: Tensor, radii: Tensor | Sequence[float] | float, unit: Unit = "metric") -> CertifiedAccuracy:
        """For each of the radii, the percentage of images with the right class and at least that radius.

        Abstentions count as wrong. At radius 0 it is the accuracy of the smoothed classifier.
        """
        right = self._right(labels)
        try:
            asked = torch.as_tensor(radii, dtype=torch.float64, device=right.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"radii must be numbers, one or several; got {_checks.shown(radii)}; such as [0.0, 0.5, 1.0]"
            ) from error
        if not bool((asked >= 0).all()):
            raise ValueError(f"radii must be at least 0; got {_checks.shown(radii)}")
        held = right & (self.in_unit(unit).double() >= asked[..., None])
        counts = held.sum(-1)
        ends = torch.tensor([wilson(int(count), len(self)) for count in counts.flatten()], dtype=torch.float64, device="cpu")
        low, high = ends.reshape(*counts.shape, 2).to(right.device).unbind(-1)
        return CertifiedAccuracy(100 * counts.double() / len(self), low, high)

    def to_markdown(self, labels: Tensor | None = None) -> str:
        """The settings, and with labels the accuracy and the quartiles of the radii of right images, as Markdown."""
        certain = self.radii[~self.abstained].double()
        median = float(certain.median()) if len(certain) else 0.0
        lines = [
            f"Smoothing with `{self.metric!r}`, sigma {self.sigma:g}; {self.select} draws to select a class, {self.samples} to "
            f"bound its probability, alpha {self.alpha:g} for each image.",
            "",
            f"{len(self)} images, {int(self.abstained.sum())} abstentions, median certified radius {median:.4g} in the metric.",
        ]
        if labels is None:
            return "\n".join(lines) + "\n"
        at_zero = self.accuracy(labels, 0.0)
        lines[-1] += f" Accuracy {at_zero.percent:.1f} % ({at_zero.low:.1f} to {at_zero.high:.1f}); abstentions count as wrong."
        lines += [
            "",
            "| radii in | 75 % of the right images | 50 % | 25 % | certified accuracy there (%) |",
            "|---|---|---|---|---|",
        ]
        right = self._right(labels)
        for unit in units_of(self.metric) if bool(right.any()) else ():
            held = self.in_unit(unit)[right].double()
            marks = held.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=held.dtype, device=held.device))
            shares = self.accuracy(labels, marks, unit).percent.tolist()
            cells = [UNIT_TITLES[unit], *(f"{mark:.4g}" for mark in marks.tolist()), ", ".join(f"{one:.1f}" for one in shares)]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def plot(self, labels: Tensor, unit: Unit = "metric", axes: Axes | None = None) -> Axes:
        """Certified accuracy against the radius, with its interval, on new or given axes. Needs matplotlib."""
        if axes is not None and not callable(getattr(axes, "fill_between", None)):
            raise ValueError(f"axes must be those of matplotlib; got {_checks.kind_of(axes)}; leave them out for new ones")
        values = self.in_unit(unit)
        top = float(values.max()) * 1.05 or 1.0
        radii = torch.linspace(0, top, 200, dtype=torch.float64, device="cpu")
        curve = self.accuracy(labels, radii, unit)
        if axes is None:
            try:
                from matplotlib.figure import Figure
            except ImportError:
                raise _checks.extra("matplotlib", "study", "the plot of certified accuracy") from None
            axes = Figure(figsize=(5.0, 3.5), layout="constrained").subplots()
        drawn = [one.cpu().numpy() for one in curve]
        axes.plot(radii.numpy(), drawn[0], label=f"sigma {self.sigma:g}")
        axes.fill_between(radii.numpy(), drawn[1], drawn[2], alpha=0.2, linewidth=0)
        axes.set_xlabel(f"radius in {UNIT_TITLES[unit]}")
        axes.set_ylabel("certified accuracy (%)")
        axes.set_ylim(0, 100)
        axes.set_xlim(0, top)
        return axes

    def __repr__(self) -> str:
        return (
            f"Certificates({len(self)} images, {int(self.abstained.sum())} abstained, metric={self.metric!r}, "
            f"sigma={_checks.format_number(self.sigma)}, samples={self.samples}, select={self.select}, alpha={self.alpha:g})"
        )

    def _white_radii(self) -> Tensor:
        """Radii in the norm of :func:`constant_metric`: with ``uniform``, the noise has the brightness in its covariance."""
        if isinstance(self.metric, Wasserstein) and self.metric.uniform:
            return self.radii * (self.masses.amin(1) / self.pixels_per_channel).sqrt()
        return self.radii

    def _mass(self) -> Tensor:
        return self.masses.sum(1)

    def _right(self, labels: Tensor) -> Tensor:
        _model_checks.class_labels(labels, self.classes)
        return self.classes == labels


def certify(
    model: nn.Module,
    images: Tensor,
    metric: Metric,
    sigma: float,
    samples: int = 10_000,
    select: int = 100,
    alpha: float = 0.001,
    batch_size: int = 1000,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Certificates:
    """Certify the smoothed classifier at each image: its class, and a radius within which it cannot change.

    The smoothed classifier is the majority vote of the model over noise of covariance ``sigma^2 L``. The certificate is for
    that classifier (:class:`wassersmooth.Smoothed`), not for the model, and holds with probability 1 - alpha for each image.

    Arguments:
        model: any classifier in eval mode that returns scores (B, K), without randomness of its own. It sees noisy images, with
            values outside [0, 1], so train it with ``NoisyInputs(metric, sigma)``, or the radii will be small.
        images: in [0, 1]. # shape: (B, C, H, W)
        metric: a metric with the same noise at all images: ``Euclidean()``, ``Wasserstein(..., reference=...)``, or
            ``Wasserstein(..., uniform=True)`` without mass.
        sigma: the size of the noise.
        samples: draws for the bound on the probability. The radius is at most ``sigma * Phi^-1(alpha^(1/samples))``.
        select: additional draws, which select the class.
        alpha: the probability, for each image, that its certificate is wrong.
        batch_size: noisy images at a time, which bounds the memory; results do not depend on it beyond rounding.
        generator: the source of the seeds, one for each image. Without one, the global random state is used and then restored,
            so two calls in a row give the same.
        progress: called as ``progress(images done, images in all)``.
    """
    _checks.batch("images", images, dims=(4, 3, 5))
    _model_checks.same_device(model, images)
    _checks.float64_on(images.device, "certify")
    check_certifiable(metric)
    sigma = check_sigma(sigma)
    samples, select = _checks.positive_integer("samples", samples), _checks.positive_integer("select", select)
    batch_size = _checks.positive_integer("batch_size", batch_size)
    alpha = float(_checks.non_negative_number("alpha", alpha))
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be above 0 and below 0.5; got {alpha:g}; 0.001 is customary")
    _checks.generator(generator)
    if progress is not None:
        _checks.function("progress", progress, "of (done, total), such as print", 2)
    _checks.pixels("images", images)
    metric.check(images)
    _refuse_training_mode(model)
    source = "cpu" if generator is None else generator.device
    with torch.no_grad(), preserve_state(model, images.device):
        seeds = torch.randint(2**62, (len(images),), device=source, generator=generator).tolist()
        counter = VoteCounter(model, images.detach(), metric, sigma, batch_size)
        counts = counter.count(seeds, select, samples, progress)
    best = counts[:, 0].argmax(1)
    hits = counts[:, 1].gather(1, best[:, None])[:, 0]
    lower = binomial_lower(hits, samples, alpha)
    certain = lower > 0.5
    radii = torch.where(certain, sigma * torch.special.ndtri(lower.clamp(min=0.5)), 0.0)
    return Certificates(
        classes=torch.where(certain, best, -1),
        radii=radii,
        lower=lower,
        metric=metric,
        sigma=sigma,
        samples=samples,
        select=select,
        alpha=alpha,
        masses=images.detach().double().flatten(2).sum(2),
        pixels_per_channel=math.prod(images.shape[2:]),
    )


class _Block(NamedTuple):
    """Draws of one image: those of selection or of estimation (stage 0 or 1)."""

    image: int
    stage: int
    used: int


class VoteCounter:
    """Count the classes of noisy images on the device, as integers. On CUDA one batch is a replay of one CUDA graph.

    Arguments:
        model: in eval mode; the caller restores its state.
        images: already checked.
        batch_size: rounded down to whole blocks, at least one; smaller batches are parts of a block.
    """

    def __init__(self, model: nn.Module, images: Tensor, metric: Metric, sigma: float, batch_size: int) -> None:
        self.model, self.images = model, images
        self.noise = SmoothingNoise(metric, sigma, images)
        self.scales = self.noise.scales(images)
        self.batch_size = batch_size
        self.blocks = max(1, batch_size // BLOCK)
        self.classes = self._check_model()
        self.buffer = torch.empty(self.blocks * BLOCK, *images.shape[1:], dtype=images.dtype, device=images.device)

    def count(self, seeds: list[int], select: int, samples: int, progress: Progress | None = None) -> Tensor:
        """Votes for each class in both stages. # shape: (B, 2, K) integers"""
        total = len(self.images)
        self.votes = torch.zeros(total, 2, self.classes, dtype=torch.int64, device=self.images.device)
        captured = self.images.is_cuda and self.batch_size >= BLOCK
        step = self._captured_step() if captured else self._eager_step
        reported = 0
        for blocks in self._draw_batches(seeds, select, samples):
            step(blocks)
            done = blocks[0].image  # all images before this one have all their votes
            if progress is not None and done >= reported + CHUNK:
                progress(done, total)
                reported = done
        if progress is not None:
            progress(total, total)
        return self.votes

    def _draw_batches(self, seeds: list[int], select: int, samples: int) -> Iterator[list[_Block]]:
        """Batches of blocks, whose noise is in the buffer. Each image has its own seed, and its blocks come in order."""
        blocks: list[_Block] = []
        parts: list[tuple[int, int, torch.Generator]] = []
        for image, seed in enumerate(seeds):
            generator = torch.Generator(self.images.device).manual_seed(seed)
            for stage, total in enumerate((select, samples)):
                for start in range(0, total, BLOCK):
                    parts.append((BLOCK * len(blocks), BLOCK * (len(blocks) + 1), generator))
                    blocks.append(_Block(image, stage, min(BLOCK, total - start)))
                    if len(blocks) == self.blocks:
                        self.noise.fill(self.buffer, parts)
                        yield blocks
                        blocks, parts = [], []
        if blocks:
            self.noise.fill(self.buffer[: BLOCK * len(blocks)], parts)
            yield blocks

    @staticmethod
    def table(blocks: list[_Block]) -> Tensor:
        """Image, row of the votes, and number of used draws of each block. # shape: (3, blocks)"""
        rows = [b.image for b in blocks], [2 * b.image + b.stage for b in blocks], [b.used for b in blocks]
        return torch.tensor(rows, device="cpu")

    def _eager_step(self, blocks: list[_Block]) -> None:
        """Classify the draws that are used, in parts of the batch size."""
        which, rows, used = self.table(blocks).to(self.images.device)
        wanted = (torch.arange(BLOCK, device=used.device) < used[:, None]).flatten().nonzero()[:, 0]
        for draws in wanted.split(self.batch_size):
            block = draws // BLOCK
            self._vote(self._noisy(which[block], self.buffer[draws]), rows[block])

    def _captured_step(self) -> Callable[[list[_Block]], None]:
        """:meth:`whole_batch` as a CUDA graph; eager where the model cannot be captured."""
        table = torch.zeros(3, self.blocks, dtype=torch.int64, device=self.images.device)
        self.buffer.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.Stream(self.images.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.images.device))
            with torch.cuda.stream(stream):
                for _ in range(3):  # no draw of the table counts yet
                    self.whole_batch(table)
            torch.cuda.current_stream(self.images.device).wait_stream(stream)
            # On the stream of the images: that of the current device would capture nothing if they are on another one.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.whole_batch(table)
        except RuntimeError as error:
            torch.cuda.synchronize(self.images.device)
            warnings.warn(
                f"certify runs the model eagerly, since no CUDA graph can be captured: {_checks.first_line(error, 200)}",
                stacklevel=4,
            )
            return self._eager_step

        def replay(blocks: list[_Block]) -> None:
            table.copy_(self.table(self.padded(blocks)))
            graph.replay()

        return replay

    def padded(self, blocks: list[_Block]) -> list[_Block]:
        """As many blocks as a batch has; of those that are added, no draw is used."""
        return blocks + [_Block(0, 0, 0)] * (self.blocks - len(blocks))

    def whole_batch(self, table: Tensor) -> None:
        """Classify all draws of the buffer and count those that are used: operations that do not depend on values."""
        which, rows, used = table
        block = torch.arange(self.blocks * BLOCK, device=table.device) // BLOCK
        counted = torch.arange(BLOCK, device=table.device) < used[:, None]
        self._vote(self._noisy(which[block], self.buffer), rows[block], counted.flatten())

    def _noisy(self, which: Tensor, noise: Tensor) -> Tensor:
        return self.images[which] + (noise if self.scales is None else self.scales[which] * noise)

    def _vote(self, noisy: Tensor, rows: Tensor, counted: Tensor | None = None) -> None:
        """Add the classes of noisy images to the votes; ties go to the lowest class, NaN and infinity to none."""
        scores: Tensor = logits_of(self.model(noisy))
        valid = scores.isfinite().all(1)
        if counted is not None:
            valid = valid & counted
        self.votes.view(-1).scatter_add_(0, rows * self.classes + scores.argmax(1), valid.long())

    def _check_model(self) -> int:
        """The number of classes, after checking that the scores of an image depend on it alone."""
        count = min(CHECKED_IMAGES, max(2, self.batch_size))
        which = torch.arange(count, device=self.images.device) % len(self.images)
        noise = torch.empty(count, *self.images.shape[1:], dtype=self.images.dtype, device=self.images.device)
        generator = torch.Generator(self.images.device).manual_seed(0)
        self.noise.fill(noise, [(0, count, generator)])
        noisy = self._noisy(which, noise)
        half = count // 2
        scores, again = (check_scores(call_model(self.model, noisy), noisy) for _ in range(2))
        # Next to negatives, in a batch of the same size: the same kernels run, so rounding is the same.
        elsewhere = check_scores(call_model(self.model, torch.cat((noisy[:half], 1 - noisy[half:]))), noisy)
        for part, other, problem in (
            (scores, again, "gives other scores to the same images when it is asked again: it draws random numbers"),
            (scores[:half], elsewhere[:half], "gives other scores to an image next to others: its images are not independent"),
        ):
            finite = (part.isfinite() & other.isfinite()).all(1)
            if not bool(finite.any()):
                continue
            difference = (part - other)[finite].double().abs()
            if bool((difference > allowed_difference(part[finite], SCORE_TOLERANCE)).any()):
                raise ValueError(
                    f"the model {problem}; a certificate is for a fixed function of one image; remove dropout, random "
                    "augmentation and batch statistics from its eval mode"
                )
        return scores.shape[1]


def units_of(metric: Metric) -> tuple[Unit, ...]:
    """The units in which radii of a metric are known: W1 needs its constant, and pixels need that scale."""
    if not isinstance(metric, Wasserstein):
        return tuple(unit for unit in UNITS if unit != "pixels")
    large = metric.graph.height * metric.graph.width > LARGEST_DENSE
    missing = {"w1", "relative_w1"} if large else set()
    return tuple(unit for unit in UNITS if unit not in missing and (unit != "pixels" or metric.scale == "pixels"))


def _refuse_training_mode(model: nn.Module) -> None:
    training = next((name or "the model" for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(f"the model must be in eval mode to be certified; got training mode in {training}; call model.eval()")


def _white_over(metric: Wasserstein) -> float:
    """The least c with ``L(1) <= c L(reference)`` edge by edge, so for the whole cometric; infinite at a dark edge."""
    if not isinstance(metric.reference, Tensor):
        return 1.0
    ones = torch.ones_like(metric.reference, dtype=torch.float64)[None]
    white = Wasserstein(metric.graph, metric.scale).evaluate(ones).u
    dark = metric.evaluate(ones).u
    ratios = [torch.add(*edge_ends(white, o)) / torch.add(*edge_ends(dark, o)) for o in metric.graph.edge_relations]
    found = max(float(ratio.detach().max()) for ratio in ratios)
    return max(found, 1.0) if metric.mass else found


def _over(radii: Tensor, divisor: Tensor) -> Tensor:
    """The quotient, and 0 for a black image, which has no mass to move."""
    return torch.where(divisor > 0, radii / torch.where(divisor > 0, divisor, 1.0), 0.0)
