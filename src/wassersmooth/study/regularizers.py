"""A regularizer as a value: what is written on the command line, what a run folder is called, and the objective it means."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.terms import Objective
from wassersmooth.robustness.attacks import FGSM
from wassersmooth.study.errors import StudyError

KINDS = {
    "none": "the plain loss",
    "euclidean": "loss + eta^2 |grad|^2",
    "wasserstein": "loss + eta^2 <grad, L(x) grad>, L(x) on a pixel graph of the given radius, plus mass * identity",
    "uniform": "as wasserstein, with x replaced by its mean: the control that does not see the image",
    "euclidean-noise": "the loss at x + eta * white noise",
    "wasserstein-noise": "the loss at x + eta * noise of covariance L(x)",
    "adversarial": "the loss at an FGSM example with epsilon = eta, in pixel units",
}
ON_A_GRAPH = ("wasserstein", "uniform", "wasserstein-noise")


@dataclass(frozen=True)
class Regularizer:
    """One point of a study. ``str()`` and :meth:`parse` are inverses: ``wasserstein:eta=0.3,radius=2``."""

    kind: str
    eta: float = 0.0
    radius: int = 0
    mass: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StudyError(f"regularizer must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for name, value in (("eta", self.eta), ("mass", self.mass)):
            if not 0 <= value < math.inf:
                raise StudyError(f"{name} must be a finite number of at least 0; got {value:g} in {self}")
        on_graph = self.kind in ON_A_GRAPH
        if on_graph and self.radius < 1:
            raise StudyError(f"{self.kind} needs a radius of at least 1 pixel; got {self}; write {self.kind}:eta=0.3,radius=2")
        if not on_graph and (self.radius or self.mass):
            raise StudyError(f"radius and mass belong to {', '.join(ON_A_GRAPH)}; got {self}; leave them out")
        if (self.kind == "none") != (self.eta == 0):
            raise StudyError(
                f"eta is positive for every regularizer but none; got {self}; write for example {self.kind}:eta=0.3"
            )

    @classmethod
    def parse(cls, text: str) -> Regularizer:
        """Reads ``kind`` or ``kind:eta=...,radius=...,mass=...``."""
        kind, _, rest = text.partition(":")
        readers = {"eta": float, "radius": int, "mass": float}
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            name, _, number = part.partition("=")
            if name not in readers or name in values:
                raise StudyError(f"a regularizer is KIND:eta=NUMBER,radius=PIXELS,mass=NUMBER, each once; got {text!r}")
            try:
                values[name] = readers[name](number)
            except ValueError:
                expected = "a whole number" if name == "radius" else "a number"
                raise StudyError(f"{name} must be {expected}; got {number!r} in {text!r}") from None
        return cls(kind, **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [
            f"{field.name}={getattr(self, field.name):g}" for field in dataclasses.fields(self)[1:] if getattr(self, field.name)
        ]
        return f"{self.kind}:{','.join(parts)}" if parts else self.kind

    @property
    def slug(self) -> str:
        """The name as a part of a folder's name: ``wasserstein-eta0.3-radius2``."""
        return str(self).replace(":", "-").replace(",", "-").replace("=", "")

    def metric(self, height: int, width: int) -> Metric:
        """The metric it penalizes in; Euclidean where there is no graph."""
        if self.kind not in ON_A_GRAPH:
            return Euclidean()
        return Wasserstein(PixelGraph.grid(height, width, self.radius), mass=self.mass, uniform=self.kind == "uniform")

    def objective(self, size: tuple[int, int], engine: str, eta: float | Tensor | None = None) -> Objective:
        """What is minimized.

        Arguments:
            size: height and width of the images.
            engine: how a gradient penalty is differentiated.
            eta: in place of this regularizer's own, such as a tensor that a ramp fills epoch by epoch.
        """
        strength = self.eta if eta is None else eta
        if self.kind == "none":
            return Plain()
        if self.kind == "adversarial":
            return AdversarialTraining(FGSM(self.eta))
        metric = self.metric(*size)
        return (
            NoisyInputs(metric, strength) if self.kind.endswith("-noise") else GradientPenalty(metric, strength, engine=engine)
        )
