"""The error against epsilon over all attacks together, and the answer in two sentences that is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wassersmooth.robustness.intervals import wilson

DISPLACEMENT = "pixels of displacement"  # how the units of transport attacks begin whose epsilon is a shift
PIXELS = ("linf", "pixel")  # the ball that the sentences prefer
USUAL = {PIXELS: 8 / 255, ("l2", "pixel"): 0.5}  # the epsilon of each ball that published results are about


@dataclass(frozen=True)
class Ball:
    """Epsilon, units and norm of an attack, as :func:`~wassersmooth.robustness.suites.ball_of` returns them."""

    epsilon: float
    units: str
    norm: str

    @property
    def family(self) -> tuple[str, str]:
        """What two attacks must share for their epsilons to be compared."""
        return self.norm, self.units


@dataclass(frozen=True)
class CurvePoint:
    """The error within one epsilon: in percent, with its Wilson 95 % interval and the number of images.

    An image counts as wrong if it is wrong as it is, or fooled by any attack at this or a smaller epsilon in the same norm and
    units. The images are those that all of these attacks saw.
    """

    epsilon: float
    units: str
    norm: str
    error: float
    low: float
    high: float
    images: int

    @property
    def words(self) -> str:
        """The ball in a sentence: ``8/255``, or ``an L2 distance of 0.5``."""
        levels = 255 * self.epsilon
        size = f"{levels:.4g}/255" if self.norm == "linf" and self.epsilon < 1 else f"{self.epsilon:.4g}"
        if (self.norm, self.units) == PIXELS:
            return size
        if self.norm == "linf":
            return f"{size} in {self.units} units"
        if self.units.startswith(DISPLACEMENT):
            return f"{size} {self.units}"
        norm = {"l2": "an L2", "wasserstein": "a Wasserstein"}.get(self.norm, f"a {self.norm}")
        return f"{norm} distance of {size}" + ("" if self.units == "pixel" else f" ({self.units})")


def error_curve(clean: Tensor, attacked: Mapping[str, Tensor], balls: Mapping[str, Ball]) -> tuple[CurvePoint, ...]:
    """The points of all balls, by norm and units in the order of the attacks, then by epsilon.

    Arguments:
        clean: which images are wrong as they are. # shape: (B,) bool
        attacked: by the name of an attack, which are wrong under it; fewer images are the first of them. # shape: (b,) bool
        balls: by the same names.
    """
    found = []
    for family in dict.fromkeys(ball.family for ball in balls.values()):
        for epsilon in sorted({ball.epsilon for ball in balls.values() if ball.family == family}):
            inside = [attacked[name] for name, ball in balls.items() if ball.family == family and ball.epsilon <= epsilon]
            count = min(len(clean), *map(len, inside))
            wrong = int(torch.stack([part[:count] for part in (clean, *inside)]).any(0).sum())
            norm, units = family
            found.append(CurvePoint(epsilon, units, norm, 100 * (wrong / count), *wilson(wrong, count), count))
    return tuple(found)


def headline(curve: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """One or two points to name in a sentence, the more important one first; none without attacks.

    The first is at the usual epsilon of its ball, or the nearest below it, else above; the second at about a quarter of that.
    """
    families = list(dict.fromkeys((point.norm, point.units) for point in curve if point.epsilon > 0))
    if not families:
        return ()
    family = PIXELS if PIXELS in families else families[0]
    points = [point for point in curve if (point.norm, point.units) == family and point.epsilon > 0]
    first = _largest(points, USUAL.get(family, math.inf)) or points[0]
    second = _largest(points, first.epsilon / 4) or (points[0] if points[0] is not first else None)
    return (first,) if second is None else (first, second)


def error_of_guessing(classes: int | None) -> float:
    """In percent; 100 where the number of classes is unknown."""
    return 100.0 if classes is None else 100 * (1 - 1 / classes)


def summarize(
    error: float, high: float, classes: int | None, curve: Sequence[CurvePoint], findings: Sequence[str], told: str | None
) -> str:
    """The answer in one or two sentences.

    Arguments:
        error, high: the clean error in percent, and the upper end of its interval.
        classes: the number of outputs; None where it is unknown.
        curve: what :func:`error_curve` found.
        findings: the signs of masking in words.
        told: how the verdict begins where the checks cannot tell masking: the model learned nothing, or too few images.
    """
    chance = error_of_guessing(classes)
    if told is not None and told.startswith("learned nothing"):
        return f"Learned nothing: it gives one answer for all images, and {error:.1f} % of the answers are wrong."
    few = told is not None  # an interval of few images reaches any level
    if (error if few else high) >= chance:
        return (
            f"Learned nothing: {error:.1f} % of images are misclassified as they are, and guessing among {classes} classes "
            f"gives {chance:.1f} %. If this model did better elsewhere, check its weights, its normalization and the order of "
            "its classes."
        )
    points = headline(curve)
    trust = _trust(findings, told) if points or findings else ""  # of attacks that were not run there is nothing to say
    return f"{_attacked(error, chance, points, few)} {trust}".strip()


def _attacked(error: float, chance: float, points: Sequence[CurvePoint], few: bool) -> str:
    if not points:
        return f"{error:.1f} % of images are misclassified as they are; no attack was run, so robustness is unknown."
    first, *rest = points
    said = f"{_at(first)} {first.error:.1f} % of images are misclassified ({error:.1f} % clean)"
    said += "".join(f"; {_at(point)} {point.error:.1f} %" for point in rest)
    return f"Not robust: {said}." if (first.error if few else first.high) >= chance else f"{said[0].upper()}{said[1:]}."


def _at(point: CurvePoint) -> str:
    return f"at {point.words}{',' if ' ' in point.words else ''}"


def _trust(findings: Sequence[str], told: str | None) -> str:
    if list(findings) == ["attacks too weak"]:
        return (
            "The error is too low: other attacks of the same size or smaller do more harm. Take more or longer steps, or "
            "loss='margin'."
        )
    if findings:
        return f"The attacks cannot be trusted, errors may be far higher: signs of gradient masking ({', '.join(findings)})."
    if told is not None:
        return "Whether the attacks can be trusted cannot be told from so few images."
    return "The attacks can be trusted: no sign of gradient masking."


def _largest(points: Sequence[CurvePoint], limit: float) -> CurvePoint | None:
    """The point with the largest epsilon up to a limit, rounding aside."""
    return max((p for p in points if p.epsilon <= limit * (1 + 1e-6)), key=lambda point: point.epsilon, default=None)
