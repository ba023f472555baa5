"""Held-out likelihoods of pairs of moved images under every candidate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wassersmooth as ws
from experiments.ground_metric.pairs import ROUNDING, SIDE, Motion, make
from wassersmooth.geometry.metrics import Metric
from wassersmooth.study.data import Dataset

GRAPH_RADIUS = 2
SMOOTHNESSES = (0.0, 0.5, 1.0, 2.0, 4.0)
FLOOR = ROUNDING**2 / 6  # the variance of what rounding takes from both images
HALVINGS = 40  # of the interval, about, of the search for the largest likelihood
GRID = 60  # shares of white noise that are tried before the search is refined
FITTED = "fitted weights, radius 2"
EUCLIDEAN = "Euclidean"


class Spectra(NamedTuple):
    """The eigenvalues of L(x) of each pair, and the squares of the differences along its eigenvectors. # shape: (B, N) each"""

    values: Tensor
    squares: Tensor

    @classmethod
    def of(cls, metric: Metric, images: Tensor, differences: Tensor) -> Spectra:
        found = [cls._one(metric, x[None], d) for x, d in zip(images, differences, strict=True)]
        return cls(*(torch.stack(part) for part in zip(*found, strict=True)))

    @staticmethod
    def _one(metric: Metric, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(metric.cometric(x).as_matrix()[0])
        return values.clamp(min=0), (vectors.T @ d.flatten()).square()

    def log_likelihoods(self, motion: float, white: float) -> Tensor:
        """Of N(0, motion L + white I), per pixel. # shape: (B,)"""
        variance = motion * self.values + white
        return -((2 * math.pi * variance).log() + self.squares / variance).mean(1) / 2

    def maximized(self) -> tuple[float, float]:
        """Motion and white at the largest likelihood: over the scale in closed form, over their ratio by golden section."""
        scale = float(self.values.mean())
        ratios = torch.linspace(math.log(1e-6), math.log(1e6), GRID, dtype=torch.float64)
        best = max(range(GRID), key=lambda k: self._at_ratio(scale, float(ratios[k]))[0])
        low, high = (float(ratios[min(max(best + k, 0), GRID - 1)]) for k in (-1, 1))
        ratio = _golden(lambda r: self._at_ratio(scale, r)[0], low, high)
        return self._at_ratio(scale, ratio)[1:]

    def _at_ratio(self, scale: float, log_ratio: float) -> tuple[float, float, float]:
        """The likelihood, motion and white where white over motion is a given multiple of the mean eigenvalue."""
        ratio = scale * math.exp(log_ratio)
        motion = float((self.squares / (self.values + ratio)).mean())
        motion = max(motion, FLOOR / ratio)
        return float(self.log_likelihoods(motion, motion * ratio).mean()), motion, motion * ratio


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one hill is largest."""
    share = (math.sqrt(5) - 1) / 2
    for _ in range(HALVINGS):
        left, right = high - share * (high - low), low + share * (high - low)
        low, high = (low, right) if f(left) >= f(right) else (left, high)
    return (low + high) / 2


def candidates() -> dict[str, list[Metric]]:
    """Metrics by name; of several, that of the largest likelihood of the training pairs is taken."""
    found: dict[str, list[Metric]] = {
        f"constant weights, radius {radius}": [ws.Wasserstein(ws.PixelGraph.grid(SIDE, SIDE, radius))] for radius in (1, 2, 3)
    }
    found["Gaussian weights, radius 3"] = [ws.Wasserstein(ws.PixelGraph.grid(SIDE, SIDE, 3, weight="gaussian"))]
    for kind, title in (("transport", "coherent transport"), ("advection", "coherent advection")):
        found[title] = [ws.Deformations(SIDE, SIDE, smoothness, kind) for smoothness in SMOOTHNESSES]  # type: ignore[arg-type]
    return found


def row_of(
    loaded: Dataset, motion: Motion, counts: tuple[int, int], seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Fit every candidate to pairs of training images, and score it on pairs of test images."""
    started = time.perf_counter()
    train, test = (
        make(part, motion, n, 2 * seed + k) for k, (part, n) in enumerate(zip((loaded.train, loaded.test), counts, strict=True))
    )
    scores: dict[str, list[float]] = {}
    fits: dict[str, dict[str, float]] = {}
    for name, metrics in candidates().items():
        best = max((_fit(metric, train) for metric in metrics), key=lambda found: found[0])
        _, metric, where = best
        held_out = Spectra.of(metric, test[0], test[1] - test[0]).log_likelihoods(*where)
        scores[name] = held_out.tolist()
        fits[name] = {"eta": math.sqrt(where[0]), "mass": where[1] / where[0], "train": best[0]}
        if isinstance(metric, ws.Deformations):
            fits[name]["smoothness"] = metric.smoothness
        progress(f"{name}: {held_out.mean():.4f}")
    fit = ws.fit_ground_metric(train, ws.PixelGraph.grid(SIDE, SIDE, GRAPH_RADIUS), resolution=ROUNDING, iterations=200)
    scored = fit.score(test)
    scores[FITTED], scores[EUCLIDEAN] = scored.per_pair["fitted"].tolist(), scored.per_pair["euclidean"].tolist()
    progress(f"{FITTED}: {scored.fitted:.4f}; {EUCLIDEAN}: {scored.euclidean:.4f}")
    errors = [None if math.isnan(error) else error for error in fit.standard_errors.tolist()]
    found = {"weights": fit.weights.tolist(), "errors": errors, "eta": fit.eta, "mass": fit.mass, "steps": fit.steps}
    found |= {"converged": fit.converged, "train": fit.log_likelihood}
    rounded = {name: [round(value, 5) for value in values] for name, values in scores.items()}
    row: dict[str, Any] = {"motion": motion, "seed": seed, "pairs": list(counts), "scores": rounded, "fit": found, "fits": fits}
    return row | {"offsets": [list(offset) for offset in fit.metric.graph.offsets], "seconds": time.perf_counter() - started}


def _fit(metric: Metric, pairs: Sequence[Tensor]) -> tuple[float, Metric, tuple[float, float]]:
    spectra = Spectra.of(metric, pairs[0], pairs[1] - pairs[0])
    where = spectra.maximized()
    return float(spectra.log_likelihoods(*where).mean()), metric, where
